"""Jobs and their story, read only: Core rows, which cost half of what entities do (docs/design.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, String, cast, func, or_, select
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.jobs.status import TERMINAL
from app.jobs.tables import Artifact, Checkpoint, Event, Job, Metrics, Wait
from app.schemas import fetch_page

WAIT = [column.label(f"wait_{column.name}") for column in Wait.__table__.columns if column.name != "job_id"]
JOB = (*[column for column in Job.__table__.columns if column.name != "metadata"], Job.job_metadata.label("job_metadata"))
EVENTS_AT_ONCE = 500


def get_job(connection: Connection | Session, project_id: str, job_id: str) -> Row[Any]:
    """A project's job; NotFound for any other."""
    job = connection.execute(_jobs(project_id).where(Job.id == job_id)).one_or_none()
    if job is None:
        raise _not_found(job_id)
    return job


def require_job(connection: Connection, project_id: str, job_id: str) -> None:
    """NotFound where the project has no such job."""
    if connection.execute(select(Job.id).where(Job.project_id == project_id, Job.id == job_id)).one_or_none() is None:
        raise _not_found(job_id)


def list_jobs(
    connection: Connection, project_id: str, metadata: Mapping[str, str] | None, *, after: str | None, limit: int
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a project's jobs, newest first. `metadata`: only jobs with these pairs; None: all; {}: jobs without any."""
    statement = _jobs(project_id)
    if metadata == {}:
        statement = statement.where(or_(Job.job_metadata.is_(None), cast(Job.job_metadata, String) == "{}"))
    for key, value in (metadata or {}).items():
        statement = statement.where(Job.job_metadata[key].as_string() == value)
    return fetch_page(connection, statement, (Job.created_at, Job.id), after=after, limit=limit)


def job_using_file(session: Session, file_id: str) -> str | None:
    """An unfinished job that reads this file, if there is one."""
    uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
    return session.scalar(select(Job.id).where(uses, Job.status.not_in(TERMINAL)).limit(1))


def list_events(connection: Connection, job_id: str, *, after: str | None, limit: int) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a job's events, newest first."""
    return fetch_page(connection, _events(job_id), (Event.seq, Event.id), after=after, limit=limit)


def events_beyond(connection: Connection, job_id: str, seq: int) -> tuple[Sequence[Row[Any]], bool]:
    """The next events of a job's story, oldest first, and whether the story ends with them."""
    # The job first: when it has ended, its last event is there already. One row by its key while nothing is new.
    job = connection.execute(select(Job.status, Job.last_seq).where(Job.id == job_id)).one_or_none()
    if job is None:
        return [], True
    if job.last_seq <= seq:
        return [], job.status in TERMINAL
    events = connection.execute(_events(job_id).where(Event.seq > seq).order_by(Event.seq).limit(EVENTS_AT_ONCE)).all()
    return events, job.status in TERMINAL and len(events) < EVENTS_AT_ONCE


def standing(connection: Connection, job_id: str) -> tuple[int, bool]:
    """A job's newest attempt, and whether nothing more happens to it."""
    job = connection.execute(select(Job.attempt, Job.status).where(Job.id == job_id)).one_or_none()
    return (0, True) if job is None else (job.attempt, job.status in TERMINAL)


def steps_before(connection: Connection, job_id: str, attempt: int) -> Sequence[Row[Any]]:
    """The figures that attempts before this one reported, by step."""
    columns = (Metrics.step, Metrics.values, Metrics.created_at)
    statement = select(*columns).where(Metrics.job_id == job_id, Metrics.attempt < attempt).order_by(Metrics.step)
    return connection.execute(statement).all()


def list_checkpoints(connection: Connection, job_id: str, *, after: str | None, limit: int) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a job's checkpoints, newest first."""
    statement = select(*Checkpoint.__table__.columns).where(Checkpoint.job_id == job_id)
    return fetch_page(connection, statement, (Checkpoint.step, Checkpoint.id), after=after, limit=limit)


def checkpoint_models(project_id: str, name: str | None = None) -> Select[Any]:
    """The models that a project's checkpoints are, newest first; or the one of this name."""
    named: list[Any] = [Checkpoint.model_id.label("id"), Job.model.label("base_model")]
    own: list[Any] = [Checkpoint.job_id, Checkpoint.step, Checkpoint.created_at]
    statement = select(*named, *own).join(Job, Job.id == Checkpoint.job_id).where(Job.project_id == project_id)
    if name is not None:
        statement = statement.where(Checkpoint.model_id == name)
    return statement.order_by(Checkpoint.created_at.desc(), Checkpoint.model_id.desc())


def list_artifacts(connection: Connection, job_id: str) -> Sequence[Row[Any]]:
    """The files of a job's result, by name."""
    statement = select(*Artifact.__table__.columns).where(Artifact.job_id == job_id).order_by(Artifact.name)
    return connection.execute(statement).all()


def artifact_bytes(session: Session, project_id: str) -> int:
    """What the results of a project take in storage."""
    total = select(func.sum(Artifact.bytes)).join(Job, Job.id == Artifact.job_id).where(Job.project_id == project_id)
    return int(session.scalar(total) or 0)


def get_artifact(connection: Connection, job_id: str, name: str) -> Row[Any]:
    """One file of a job's result by its exact name. The name is looked up, never used as a path."""
    statement = select(*Artifact.__table__.columns).where(Artifact.job_id == job_id, Artifact.name == name)
    artifact = connection.execute(statement).one_or_none()
    if artifact is None:
        raise NotFound("The job has no artifact of this name.", code="artifact_not_found", param="name")
    return artifact


def metrics(
    connection: Connection, job_id: str, *, since_step: int, max_points: int
) -> tuple[int, dict[str, list[float | None]]]:
    """How many points a range has, and up to `max_points` of them as columns, evenly spaced with the first and the last."""
    in_range = (Metrics.job_id == job_id, Metrics.step >= since_step)
    count = connection.execute(select(func.count()).select_from(Metrics).where(*in_range)).scalar_one()
    numbered = select(Metrics.step, Metrics.values, (func.row_number().over(order_by=Metrics.step) - 1).label("index"))
    points = numbered.where(*in_range).subquery()
    statement = select(points.c.step, points.c["values"]).order_by(points.c.step)
    if count > max_points:
        statement = statement.where(points.c.index.in_(_evenly(count, max_points)))
    return count, _columns(connection.execute(statement).all())


def _jobs(project_id: str) -> Select[Any]:
    """A project's jobs, with where they stand in the queue."""
    return select(*JOB, *WAIT).outerjoin(Wait, Wait.job_id == Job.id).where(Job.project_id == project_id)


def _events(job_id: str) -> Select[Any]:
    return select(*Event.__table__.columns).where(Event.job_id == job_id)


def _evenly(count: int, wanted: int) -> list[int]:
    return [index * (count - 1) // (wanted - 1) for index in range(wanted)]


def _columns(points: Sequence[Row[int, dict[str, float | None]]]) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {"step": [step for step, _ in points]}
    for name in sorted({name for _, values in points for name in values}):
        columns[name] = [values.get(name) for _, values in points]
    return columns


def _not_found(job_id: str) -> NotFound:
    return NotFound(f"There is no job `{job_id}`.", code="job_not_found", param="fine_tuning_job_id")
