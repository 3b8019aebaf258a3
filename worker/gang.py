"""How an attempt over several nodes ends: every node tells how its own part went, the first node decides for all of them.

It writes the end only when nothing of the attempt runs on any node any more: those that it hears of say so, and one that has
been silent for a whole lease has stopped by itself, 0.1 of a lease before. So no two attempts of a job ever train at once.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from app import db
from app.config import get_settings
from app.jobs import attempts
from app.jobs.attempts import Outcome
from app.nodes import gangs
from app.nodes.gangs import Member
from worker import prepare
from worker.failures import JobFailed, Stopped, age_s, traceback_of
from worker.workspace import Run, Workspace

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.5
LONGEST_TRACEBACK = 8000  # characters; the end of one says most

Ending = Outcome | JobFailed | Stopped | None
"""How a part ended: with the job's result, with its training done, or not well."""


def report(run: Run, ending: Ending, workspace: Workspace, node: str, kept_gpus: Sequence[str]) -> None:
    """Tell the other nodes that nothing of the attempt runs here any more, and why. GPUs whose memory did not come back are
    kept from the pool. Waits for a database that is away."""
    failure, age = _failure(ending, workspace), age_s(workspace)

    def write(session: Session) -> None:
        attempts.quarantine(session, run.job_id, run.attempt, node, kept_gpus)
        gangs.stop(session, run.job_id, run.attempt, run.node_rank, failure, age)

    _insist(write)


def settle(run: Run, own: Ending, workspace: Workspace) -> Ending:
    """On the first node: wait until all others have stopped, and say how the attempt ended, by what failed first anywhere."""
    members = _insist(lambda session: gangs.members(session, run.job_id, run.attempt))
    if len(members) == 1:
        return own
    while _insist(lambda session: gangs.num_others_running(session, run.job_id, run.attempt)):
        time.sleep(POLL_S)
    with contextlib.suppress(OSError):
        prepare.forget_rows(run.job_id)
    if isinstance(own, Outcome) or (
        isinstance(own, Stopped) and own.reason not in ("crashed", "timeout", "unmet", "broken", "silent")
    ):
        return own
    members = _insist(lambda session: gangs.members(session, run.job_id, run.attempt))
    first = first_failure(members)
    if first is None:
        return own
    if trace := (first.failure or {}).get("traceback") if first.node_rank else None:
        with workspace.trainer_log.open("a", encoding="utf-8") as file:
            file.write(f"\nThe first rank to fail was on node {first.node}:\n{trace}\n")
    return _ending(first, members)


def first_failure(members: Sequence[Member]) -> Member | None:
    """Whose failure the others only met the consequences of: an error before a process that is gone, each the earliest."""
    failed = [member for member in members if member.failure and member.stopped_at is not None]
    return min(failed, key=lambda member: (_rank_of(member.failure or {}), member.stopped_at), default=None)


def _rank_of(failure: dict[str, Any]) -> int:
    if "code" in failure:
        return 0
    return {"shutdown": 1, "outage": 2, "unreachable": 2, "crashed": 3, "stalled": 3, "timeout": 4, "unmet": 4}.get(
        failure["reason"], 5
    )


def _ending(first: Member, members: Sequence[Member]) -> Ending:
    failure = first.failure or {}
    if "code" in failure:
        where = f"On node {first.node}: " if first.node_rank else ""
        return JobFailed(failure["code"], where + failure["message"], failure["param"])
    # One that says nothing is why those that were left behind say that they were.
    silent = [member.node for member in members if member.stopped_at is None]
    if silent and failure["reason"] in ("crashed", "timeout", "unmet", "broken", "silent"):
        return Stopped("crashed", f"Node {', '.join(silent)} was lost")
    if failure["reason"] == "shutdown":
        return Stopped("shutdown", f"Node {first.node} is shutting down")
    if failure["reason"] in ("broken", "silent"):
        return Stopped("crashed", "The nodes lost each other")
    if failure["reason"] == "unmet":  # nobody can tell which node it was
        return Stopped("unmet", failure["why"])
    if failure["reason"] in ("stalled", "timeout"):
        return Stopped(failure["reason"], f"On node {first.node}: {failure['why']}")
    return Stopped("crashed", f"{failure['why'] or 'A training process was killed'} on node {first.node}")


def _failure(ending: Ending, workspace: Workspace) -> dict[str, Any] | None:
    """What goes into the row: {"code", "message", "param", "traceback"} or {"reason", "why"}; None where it ended well."""
    if isinstance(ending, JobFailed):
        trace = traceback_of(workspace)
        told = {"code": ending.code, "message": ending.message, "param": ending.param}
        return told | {"traceback": trace[-LONGEST_TRACEBACK:] if trace else None}
    return {"reason": ending.reason, "why": ending.why} if isinstance(ending, Stopped) else None


def _insist(action: Callable[[Session], T]) -> T:
    while True:
        try:
            with db.write() as session:
                return action(session)
        except db.AWAY:
            log.warning("database unreachable; the end of the attempt waits", exc_info=True)
            time.sleep(get_settings().heartbeat_s)
