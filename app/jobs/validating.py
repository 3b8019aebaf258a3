"""Jobs whose uploads are still being read: they are queued, or have failed, once that is done."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db, queue
from app.files import service as files
from app.jobs import sources
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.status import Status, switch_status
from app.jobs.tables import Job


def first_status(session: Session, project_id: str, *data: str | None) -> Status:
    """In which state a job on these sources begins to wait: for the end of a reading, or for slots."""
    uploads = [files.file_of_job(session, project_id, source) for source in data if source is not None and _is_upload(source)]
    return Status.VALIDATING if any(file.status == "uploaded" for file in uploads) else Status.QUEUED


def settle_all() -> None:
    """Queue every job whose files have been read, or end it with what is wrong with them. Safe to run at any time."""
    with db.read() as connection:
        waiting = connection.execute(select(Job.id).where(Job.status == Status.VALIDATING)).scalars().all()
    for job_id in waiting:
        with db.write() as session:
            _settle(session, job_id)


def _settle(session: Session, job_id: str) -> None:
    waits = (Job.id == job_id, Job.status == Status.VALIDATING)
    job = session.scalar(select(Job).where(*waits).with_for_update(skip_locked=True))
    if job is None or first_status(session, job.project_id, job.training_file, job.validation_file) == Status.VALIDATING:
        return
    error = _error_of(session, job)
    if error is None:
        told = NewEvent("Files validated, moving job to queued state")
        switch_status(session, job_id, Status.QUEUED, told, *waits)
        queue.send_after_commit(session, "place")
    else:
        told = NewEvent(f"The job failed: {error['message']}", level="error", data={"error": error})
        switch_status(session, job_id, Status.FAILED, told, *waits, error=error, finished_at=db.now())


def _error_of(session: Session, job: Job) -> dict[str, str] | None:
    skips = TrainingSpec.stored(job.spec).data.on_bad_rows == "skip"
    for param in ("training_file", "validation_file"):
        if _is_upload(source := getattr(job, param)):
            file = files.file_of_job(session, job.project_id, source)
            if (message := sources.why_unusable(file, skips_bad_rows=skips)) is not None:
                return {"code": "invalid_training_file", "message": message, "param": param}
    return None


def _is_upload(source: str | None) -> bool:
    return source is not None and source.startswith("file-")
