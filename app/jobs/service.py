"""Placeholder: creation and cancelling come from another branch."""

from sqlalchemy.orm import Session

from app.errors import InvalidRequest
from app.jobs.schemas import JobCreate
from app.jobs.tables import Job


def create_job(session: Session, project_id: str, body: JobCreate) -> Job:
    """A new queued job."""
    raise InvalidRequest("not built yet")


def cancel_job(project_id: str, job_id: str) -> None:
    """Ask a job to stop."""
    raise InvalidRequest("not built yet")
