"""Jobs that are checked before they wait for slots: their uploads are read, and where GPUs are at stake a node tokenizes every
row on its CPU. Then they are queued, or have failed with what is wrong.

Like an upload, a check is a row with a lease. It never holds a job up for good: where no node can do it, the trainer alone
refuses rows, before it loads the model.
"""

from typing import Any

from sqlalchemy import Row, select, update
from sqlalchemy.orm import Session

from app import db, queue
from app.files import service as files
from app.jobs import sources
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.status import Status, switch_status
from app.jobs.tables import Job
from app.nodes import service as nodes

CHECK_LIMIT_S = 1800.0
LEASE_S = CHECK_LIMIT_S + 30.0
MAX_TRIES = 2


def first_status(session: Session, job: Job) -> Status:
    """In which state a new job begins to wait."""
    return _wake(session, is_unchecked=_is_being_read(session, job) or _is_to_be_checked(session, job))


def next_status(session: Session, job: Job) -> Status:
    """In which state a job waits again that its user resumes: it may not have been checked yet."""
    return _wake(session, is_unchecked=_is_being_read(session, job) or job.check_until is not None)


def _wake(session: Session, *, is_unchecked: bool) -> Status:
    """Wake who is to check the job, or to place it."""
    queue.send_after_commit(session, "validate" if is_unchecked else "place")
    return Status.VALIDATING if is_unchecked else Status.QUEUED


def settle_all() -> None:
    """Move on every job whose files have been read. Safe to run at any time."""
    with db.read() as connection:
        waiting = connection.execute(select(Job.id).where(Job.status == Status.VALIDATING)).scalars().all()
    for job_id in waiting:
        with db.write() as session:
            _settle(session, job_id)


def claim_check() -> Row[Any] | None:
    """Take the oldest job that waits for a node to check its rows."""
    waits = (Job.status == Status.VALIDATING, Job.check_until < db.now())
    oldest = select(Job.id).where(*waits).order_by(Job.created_at).limit(1).with_for_update(skip_locked=True)
    with db.write() as session:
        job_id = session.scalar(oldest)
        if job_id is None:
            return None
        session.execute(
            update(Job).where(Job.id == job_id).values(check_until=db.now() + LEASE_S, check_tries=Job.check_tries + 1)
        )
        return load(session, job_id)


def load(session: Session, job_id: str) -> Row[Any]:
    """What a check needs to know of a job."""
    columns: tuple[Any, ...] = (Job.id, Job.project_id, Job.training_file, Job.validation_file, Job.spec)
    return session.execute(select(*columns).where(Job.id == job_id)).one()


def give_back_check(job_id: str) -> None:
    """Leave the check to another node: this one stops."""
    with db.write() as session:
        changes = {"check_until": 0.0, "check_tries": Job.check_tries - 1}
        session.execute(update(Job).where(*_validating(job_id)).values(**changes))


def expire_check(job_id: str) -> None:
    """The check came to no end: it is tried again, or left to the trainer."""
    with db.write() as session:
        session.execute(update(Job).where(*_validating(job_id)).values(check_until=0.0))


def pass_check(job_id: str) -> None:
    """Every row can be learned from: the job is queued."""
    with db.write() as session:
        _queue(session, job_id, NewEvent("Files validated, moving job to queued state"))


def fail_check(job_id: str, error: dict[str, Any], report: dict[str, Any] | None = None) -> None:
    """End a job that cannot learn from its rows, with what is wrong with them."""
    with db.write() as session:
        _fail(session, job_id, error, report)


def _settle(session: Session, job_id: str) -> None:
    job = session.scalar(select(Job).where(*_validating(job_id)).with_for_update(skip_locked=True))
    is_at_work = session.scalar(select(Job.id).where(Job.id == job_id, Job.check_until > db.now())) is not None
    if job is None or is_at_work or _is_being_read(session, job):
        return
    if (error := _error_of(session, job)) is not None:
        _fail(session, job_id, error)
    elif _is_to_be_checked(session, job):
        session.execute(update(Job).where(*_validating(job_id)).values(check_until=0.0))
        queue.send_after_commit(session, "check", queue=queue.ANY_NODE)
    else:
        _queue(session, job_id, NewEvent("Files validated, moving job to queued state"))


def _is_being_read(session: Session, job: Job) -> bool:
    return any(files.is_being_read(session, source) for source in (job.training_file, job.validation_file) if source)


def _is_to_be_checked(session: Session, job: Job) -> bool:
    """Only what would take GPUs for nothing, and only where somebody may do it; what repeats a run is known."""
    tries = job.check_tries or 0  # a job that is just made has no number yet
    return job.accelerator == "gpu" and job.rerun_of is None and tries < MAX_TRIES and bool(nodes.offers(session))


def _error_of(session: Session, job: Job) -> dict[str, Any] | None:
    skips = TrainingSpec.stored(job.spec).data.on_bad_rows == "skip"
    for param in ("training_file", "validation_file"):
        if (source := getattr(job, param) or "").startswith("file-"):
            file = files.file_of_job(session, job.project_id, source)
            if (message := sources.why_unusable(file, skips_bad_rows=skips)) is not None:
                return {"code": "invalid_training_file", "message": message, "param": param}
    return None


def _queue(session: Session, job_id: str, told: NewEvent) -> None:
    if switch_status(session, job_id, Status.QUEUED, told, *_validating(job_id), check_until=None):
        queue.send_after_commit(session, "place")


def _fail(session: Session, job_id: str, error: dict[str, Any], report: dict[str, Any] | None = None) -> None:
    error = db.storable(error)
    data = {"error": error} | ({"report": report} if report else {})
    told = NewEvent(f"The job failed: {error['message']}", level="error", data=data)
    switch_status(session, job_id, Status.FAILED, told, *_validating(job_id), error=error, finished_at=db.now())


def _validating(job_id: str) -> tuple[Any, ...]:
    return Job.id == job_id, Job.status == Status.VALIDATING
