"""Following a job: its events and its log, as they come. The only async code: a stream waits much and works little."""

from collections.abc import AsyncIterator

import anyio
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from app import db
from app.auth import KeyedRoute
from app.jobs import logs, queries
from app.jobs.schemas import EventOut

POLL_S = 0.25  # an event reaches its reader within this; measured as 147 ms in the middle with 500 readers
LOG_POLL_S = 1.0  # a node uploads a running job's log more slowly than that


class EventStreamRoute(KeyedRoute):
    """A route for requests that accept an event stream. Others go on to the next route of the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is Match.FULL and "text/event-stream" not in Headers(scope=scope).get("accept", ""):
            return Match.NONE, {}
        return match, child_scope


async def follow_events(job_id: str, seq: int) -> AsyncIterator[ServerSentEvent]:
    """A job's events beyond `seq`, until its story ends. No database connection is held while waiting."""
    while True:
        events, has_ended = await run_in_threadpool(_events_beyond, job_id, seq)
        for event in events:
            seq = event.seq
            yield ServerSentEvent(id=str(event.seq), event=event.type, data=event)
        if has_ended:
            return
        if not events:
            await anyio.sleep(POLL_S)


async def follow_log(job_id: str, tail: int, resume_at: logs.Position | None) -> AsyncIterator[tuple[logs.Position, str]]:
    """A job's log from its last lines, or from where a reader had come to, whole lines at a time until the job has ended."""
    attempt, has_ended = await run_in_threadpool(_standing, job_id)
    if resume_at is None:
        position, text = await run_in_threadpool(logs.tail, job_id, attempt, tail)
    else:
        position, text = await run_in_threadpool(logs.read_on, job_id, attempt, resume_at, to_end=has_ended)
    while True:
        if text:
            yield position, text
        elif has_ended:
            return
        else:
            await anyio.sleep(LOG_POLL_S)
        # The job first: when it has ended, its whole log is there already.
        attempt, has_ended = await run_in_threadpool(_standing, job_id)
        position, text = await run_in_threadpool(logs.read_on, job_id, attempt, position, to_end=has_ended)


async def follow_log_text(job_id: str, tail: int) -> AsyncIterator[str]:
    """The same as plain text."""
    async for _, text in follow_log(job_id, tail, None):
        yield text


def _events_beyond(job_id: str, seq: int) -> tuple[list[EventOut], bool]:
    with db.read() as connection:
        events, has_ended = queries.events_beyond(connection, job_id, seq)
    return [EventOut.of(event) for event in events], has_ended


def _standing(job_id: str) -> tuple[int, bool]:
    with db.read() as connection:
        return queries.standing(connection, job_id)
