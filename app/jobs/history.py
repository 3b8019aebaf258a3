"""Every try of a job: where it ran, how far it came, how and why it ended. Written in the transactions that change the job."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.orm import Session

from app.db import now
from app.jobs.tables import Attempt
from app.nodes import service as nodes


class End(StrEnum):
    """How an attempt ended. A job that goes on had one that was `lost`, `stopped` (by the service itself) or `not_started`."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    LOST = "lost"
    STOPPED = "stopped"
    NOT_STARTED = "not_started"


def begin(session: Session, job_id: str, number: int) -> None:
    """The attempt has its nodes, and no supervisor yet."""
    session.execute(insert(Attempt).values(job_id=job_id, number=number))


def start(session: Session, job_id: str, number: int) -> None:
    """A supervisor has taken the attempt up."""
    _change(session, job_id, number, started_at=now())


def pass_steps(session: Session, job_id: str, number: int, first: int, last: int) -> None:
    """The attempt has reported these steps."""
    _change(session, job_id, number, first_step=func.coalesce(Attempt.first_step, first), last_step=last)


def end(session: Session, job_id: str, number: int, how: End, message: str, code: str | None = None) -> None:
    """The attempt is over; nothing where it was already, or never began."""
    _change(session, job_id, number, ended_at=now(), end=how, code=code, message=message)


def of_job(connection: Connection, job_id: str) -> list[dict[str, Any]]:
    """All attempts of a job, oldest first; times are unix seconds.

    Each has `attempt`, `placed_at`, `started_at`, `ended_at`, `first_step`, `last_step`, `end`, `code`, `message`, and
    `nodes`: per node rank its `node`, `node_rank` and `slots`.
    """
    placed = nodes.history(connection, job_id)
    statement = select(Attempt.__table__).where(Attempt.job_id == job_id).order_by(Attempt.number)
    return [
        {
            "attempt": row.number,
            "nodes": placed.get(row.number, []),
            **{name: row._mapping[name] for name in ("placed_at", "started_at", "ended_at", "first_step", "last_step")},
            **{name: row._mapping[name] for name in ("end", "code", "message")},
        }
        for row in connection.execute(statement)
    ]


def seconds_since_end(connection: Connection, job_ids: Iterable[str]) -> dict[tuple[str, int], float | None]:
    """Per (job, attempt) how long ago it ended; None for one that goes on."""
    statement = select(Attempt.job_id, Attempt.number, now() - Attempt.ended_at).where(Attempt.job_id.in_(job_ids))
    return {(job_id, number): seconds for job_id, number, seconds in connection.execute(statement)}


def _change(session: Session, job_id: str, number: int, **values: Any) -> None:
    still_open = (Attempt.job_id == job_id, Attempt.number == number, Attempt.ended_at.is_(None))
    session.execute(update(Attempt).where(*still_open).values(**values).execution_options(synchronize_session=False))
