"""What an ended job leaves behind, swept by age since its end: checkpoints, logs, events, the files of deleted models.

A live job, a paused one, a registered model and what a live job starts from are never touched. Rows go first and bytes
after them, so that nothing is listed that is gone; bytes that a crash leaves without a row go with the next sweep. Any
number may sweep at once.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, String, cast, delete, func, or_, select, update
from sqlalchemy.orm import Session

from app import db, storage
from app.config import get_settings
from app.db import now
from app.jobs.logs import LOG_NAME
from app.jobs.status import TERMINAL
from app.jobs.tables import Artifact, Checkpoint, Event, Job, Metrics
from app.models import service as models

AT_ONCE = 500
FOLDER = "jobs"
GB = 1e9


def sweep() -> int:
    """Sweep the jobs that are due; how many were. What is left over at this time comes with the next call."""
    with db.read() as connection:
        due = (
            connection.execute(select(Job.id).where(_is_due()).order_by(Job.finished_at, Job.id).limit(AT_ONCE)).scalars().all()
        )
    for job_id in due:
        _sweep_job(job_id)
    _sweep_checkpoints_beyond_size()
    return len(due)


def sweep_orphans(older_than_s: float) -> int:
    """Delete stored folders of jobs that the database does not know, when nothing in them is younger; how many."""
    found = storage.folders(FOLDER)
    with db.read() as connection:
        known = {*connection.execute(select(Job.id)).scalars()}
    unknown = [job_id for job_id in found if job_id not in known]
    orphans = [job_id for job_id in unknown if all(storage.age_s(key) > older_than_s for key in storage.keys(_folder(job_id)))]
    for job_id in orphans:
        storage.delete(_folder(job_id))
    return len(orphans)


@dataclass(frozen=True)
class _Ages:
    """What is due of a job, by the seconds since its end."""

    checkpoints: bool
    logs: bool
    events: bool
    orphans: bool

    @classmethod
    def at(cls, age_s: float) -> "_Ages":
        settings = get_settings()
        return cls(
            checkpoints=age_s > settings.retention_checkpoints_s,
            logs=age_s > settings.retention_logs_s,
            events=age_s > settings.retention_events_s,
            orphans=age_s > settings.retention_orphans_s,
        )


def _is_due() -> ColumnElement[bool]:
    """Ended jobs that have come to an age since their last sweep, and those whose model was deleted long enough ago."""
    settings, age_s = get_settings(), now() - Job.finished_at
    limits = (
        settings.retention_checkpoints_s,
        settings.retention_logs_s,
        settings.retention_events_s,
        settings.retention_orphans_s,
    )
    aged = [(age_s > limit) & (Job.swept_until_s <= limit) for limit in limits]
    deleted = Job.id.in_(models.deleted_for(settings.retention_deleted_s)) & Job.id.in_(select(Artifact.job_id))
    return _ended() & or_(*aged, deleted)


def _ended() -> ColumnElement[bool]:
    return Job.status.in_(TERMINAL) & Job.finished_at.is_not(None)


def _sweep_job(job_id: str) -> None:
    # Listed first: what the job writes when it is resumed from now on is not among it.
    stored = storage.keys(_folder(job_id))
    with db.write() as session:
        aged = select(now() - Job.finished_at).where(Job.id == job_id, _ended()).with_for_update(skip_locked=True)
        age_s = session.scalar(aged)
        if age_s is None:
            return
        ages = _Ages.at(age_s)
        dropped = _drop_checkpoints(session, job_id) if ages.checkpoints else []
        dropped += _drop_artifacts_of_deleted_model(session, job_id)
        if ages.events:
            _drop_events(session, job_id)
        kept = _named(session, job_id)
    for key in stored:
        is_orphan = ages.orphans and not _is_log(key) and not _lies_in(key, kept)
        if is_orphan or _lies_in(key, dropped) or (ages.logs and _is_log(key)):
            storage.delete(key)
    with db.write() as session:  # only now: a sweep that was cut off is done again
        session.execute(update(Job).where(Job.id == job_id, _ended()).values(swept_until_s=age_s))


def _drop_checkpoints(session: Session, job_id: str) -> list[str]:
    """Forget a job's checkpoints but for those that an unfinished job starts from; their storage keys."""
    checkpoints = session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)).all()
    dropped = [checkpoint for checkpoint in checkpoints if not _is_wanted(session, job_id, checkpoint.id)]
    for checkpoint in dropped:
        session.delete(checkpoint)
    return [checkpoint.storage_key for checkpoint in dropped]


def _drop_artifacts_of_deleted_model(session: Session, job_id: str) -> list[str]:
    """Forget the files of a model that was deleted long enough ago; their storage keys."""
    if _is_wanted(session, job_id):
        return []
    deleted = models.deleted_for(get_settings().retention_deleted_s)
    forget = delete(Artifact).where(Artifact.job_id == job_id, Artifact.job_id.in_(deleted)).returning(Artifact.storage_key)
    return list(session.scalars(forget.execution_options(synchronize_session=False)))


def _drop_events(session: Session, job_id: str) -> None:
    """All but those that tell an end: whoever asks what became of a job is always answered."""
    told = func.coalesce(Event.data["status"].as_string(), "")
    for forget in (
        delete(Event).where(Event.job_id == job_id, told.not_in(TERMINAL)),
        delete(Metrics).where(Metrics.job_id == job_id),
    ):
        session.execute(forget.execution_options(synchronize_session=False))


def _sweep_checkpoints_beyond_size() -> None:
    """Of all checkpoints of ended jobs keep the newest, as many as the operator has room for."""
    limit_gb = get_settings().retention_checkpoints_gb
    if limit_gb is None:
        return
    newest_first = select(Checkpoint.id, Checkpoint.storage_key).join(Job, Job.id == Checkpoint.job_id).where(_ended())
    with db.read() as connection:
        rows = connection.execute(newest_first.order_by(Job.finished_at.desc(), Checkpoint.step.desc())).all()
    total = 0
    for checkpoint_id, key in rows:
        size = storage.size(key)
        total += size
        if total > limit_gb * GB and _drop_checkpoint(checkpoint_id):
            storage.delete(key)
            total -= size


def _drop_checkpoint(checkpoint_id: str) -> bool:
    with db.write() as session:
        found = select(Checkpoint, Job).join(Job, Job.id == Checkpoint.job_id).where(Checkpoint.id == checkpoint_id, _ended())
        row = session.execute(found.with_for_update(skip_locked=True)).one_or_none()
        if row is None or _is_wanted(session, row.Job.id, checkpoint_id):
            return False
        session.delete(row.Checkpoint)
        return True


def _is_wanted(session: Session, job_id: str, checkpoint_id: str | None = None) -> bool:
    """Whether an unfinished job starts from what this one made: then its spec or its model has the id in it."""
    named = [job_id.removeprefix("ftjob-"), *([checkpoint_id] if checkpoint_id else [])]
    mentions = [column.contains(name, autoescape=True) for name in named for column in (cast(Job.spec, String), Job.model)]
    unfinished = select(Job.id).where(Job.status.not_in(TERMINAL), Job.id != job_id, or_(*mentions))
    return session.scalar(unfinished.limit(1)) is not None


def _named(session: Session, job_id: str) -> list[str]:
    """The storage keys of a job, and folders of them, that rows still name."""
    tables: list[type[Checkpoint] | type[Artifact]] = [Checkpoint, Artifact]
    return [key for table in tables for key in session.scalars(select(table.storage_key).where(table.job_id == job_id))]


def _folder(job_id: str) -> str:
    return f"{FOLDER}/{job_id}"


def _is_log(key: str) -> bool:
    return key.endswith(f"/{LOG_NAME}")


def _lies_in(key: str, folders: list[str]) -> bool:
    return any(key == folder or key.startswith(f"{folder}/") for folder in folders)
