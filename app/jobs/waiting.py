"""Jobs that wait for a placement: what the scheduler reads of them, and what it tells them."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Row, delete, select, text, update
from sqlalchemy.orm import Session

from app.db import now
from app.jobs import events
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.status import Status, switch_status
from app.jobs.tables import Job, Wait
from app.nodes import service as nodes
from app.nodes.demand import Demand
from app.nodes.planning import Line

log = logging.getLogger(__name__)

# An estimate moves with every figure of every running job: it is written again when it has moved by more.
SAME_START_S = 15.0

_COLUMNS = "job_id, position, reason, blocking_resource, estimated_start"
_UPDATED = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", ")[1:])
# Thousands of rows as one parameter: a statement per row would take longer than the plan itself.
_ROWS = {
    "postgresql": f"SELECT {_COLUMNS} FROM json_to_recordset(CAST(:rows AS json)) AS r(job_id text, position int, reason text, "
    "blocking_resource text, estimated_start double precision) WHERE true",
    "sqlite": "SELECT "
    + ", ".join(f"json_extract(value, '$.{name}')" for name in _COLUMNS.split(", "))
    + " FROM json_each(:rows) WHERE true",
}


def requirements(spec: TrainingSpec) -> dict[str, Any]:
    """The columns of a job that the scheduler reads instead of its spec."""
    asked = spec.resources
    return {"demand": Demand.of(spec).key, "time_limit_s": asked.time_limit_s, "max_wait_s": asked.max_wait_s}


def read_new_specs(session: Session) -> None:
    """Fill in the requirements of jobs that an older version wrote."""
    unread = select(Job.id, Job.spec).where(Job.status == Status.QUEUED, Job.demand.is_(None))
    for job_id, spec in session.execute(unread).all():
        try:
            values = requirements(TrainingSpec.stored(spec))
        except ValidationError:
            log.exception("job %s has a spec that this version cannot read", job_id)
            continue
        session.execute(update(Job).where(Job.id == job_id).values(**values))


def waiting(connection: Connection | Session) -> Sequence[Row[Any]]:
    """Every queued job, those that a node is starting included."""
    columns: list[Any] = [Job.id, Job.project_id, Job.priority, Job.created_at, Job.demand, Job.time_limit_s, Job.run_seconds]
    columns.append(Job.reserved_at)
    queued = select(*columns).where(Job.status == Status.QUEUED, Job.demand.is_not(None))
    return connection.execute(queued).all()


def lock(session: Session, job_id: str) -> bool:
    """Lock the job; False unless it still waits and holds no placement."""
    free = select(Job.id).where(Job.id == job_id, Job.status == Status.QUEUED).with_for_update(skip_locked=True)
    return session.scalar(free) is not None and nodes.holding(session, job_id) == 0


def keep_nodes_for(session: Session, job_ids: Sequence[str]) -> None:
    """These are first in line, each among the jobs that could run where it can, and stay so until they start."""
    if job_ids:
        new = (Job.id.in_(job_ids), Job.status == Status.QUEUED, Job.reserved_at.is_(None))
        session.execute(update(Job).where(*new).values(reserved_at=now()))


def give_up_overdue(session: Session) -> None:
    """End the jobs that have waited longer than they wanted to."""
    columns = (Job.id, Job.attempt, Job.max_wait_s)
    overdue = select(*columns).where(Job.status == Status.QUEUED, now() - Job.queued_at > Job.max_wait_s)
    for job_id, attempt, max_wait_s in session.execute(overdue).all():
        if nodes.holding(session, job_id):
            continue
        message = f"The job waited longer than {max_wait_s} seconds: set a larger spec.resources.max_wait_s, or ask for less."
        error = {"code": "max_wait_exceeded", "message": message, "param": "spec.resources.max_wait_s"}
        told = NewEvent(f"The job failed: {message}", level="error", data={"error": error})
        guards = (Job.status == Status.QUEUED, Job.attempt == attempt)
        switch_status(session, job_id, Status.FAILED, told, *guards, error=error, finished_at=now())


def make_room(session: Session, job_id: str, victim_id: str) -> None:
    """Have a running job save and wait, so that one of higher priority can start; both tell of it."""
    told = NewEvent(f"Job {job_id} has a higher priority: this one saves, and waits for other slots", level="warn")
    guards = (Job.status == Status.RUNNING, Job.preempted_by.is_(None))
    if events.append(session, victim_id, [told], *guards, preempted_by=job_id):
        events.append(session, job_id, [NewEvent(f"Job {victim_id} of lower priority makes room")])


def explain(session: Session, lines: Sequence[Line]) -> None:
    """Write where each waiting job stands, as far as it has changed, and forget those that wait no more."""
    columns: list[Any] = [Wait.job_id, Wait.position, Wait.reason, Wait.blocking_resource, Wait.estimated_start]
    known = {row.job_id: row for row in session.execute(select(*columns))}
    changed = [line for line in lines if line.job_id not in known or _differs(line, known[line.job_id])]
    if changed:
        rows = json.dumps([{name: getattr(line, name) for name in Line.__dataclass_fields__} for line in changed])
        dialect = session.get_bind().dialect.name
        statement = f"INSERT INTO waits ({_COLUMNS}) {_ROWS[dialect]} ON CONFLICT (job_id) DO UPDATE SET {_UPDATED}"
        session.execute(text(statement), {"rows": rows})
    if known.keys() - {line.job_id for line in lines}:
        session.execute(delete(Wait).where(Wait.job_id.not_in(select(Job.id).where(Job.status == Status.QUEUED))))


def _differs(line: Line, row: Row[Any]) -> bool:
    if (line.position, line.reason, line.blocking_resource) != (row.position, row.reason, row.blocking_resource):
        return True
    if line.estimated_start is None or row.estimated_start is None:
        return line.estimated_start is not row.estimated_start
    return bool(abs(line.estimated_start - row.estimated_start) > SAME_START_S)
