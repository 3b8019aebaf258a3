"""The states of a job, and the one function that changes them."""

from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from app.db import now
from app.jobs import events
from app.jobs.events import NewEvent
from app.jobs.tables import Job
from app.webhooks import service as webhooks


class Status(StrEnum):
    """OpenAI's states of a fine-tuning job."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING = frozenset({Status.VALIDATING, Status.QUEUED, Status.PAUSED})
"""No supervisor has the job: its user's wishes come true at once."""
TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})


def switch_status(
    session: Session, job_id: str, to: Status, event: NewEvent, *guards: ColumnElement[bool], **values: Any
) -> bool:
    """Change the status where `guards` hold, and tell it in the same transaction; False where they do not.

    The caller's guards must exclude terminal states: those never change, but for a failed job that its user resumes.
    """
    if to == Status.QUEUED:
        values |= {"queued_at": now()}
    told = NewEvent(event.message, event.level, event.type, (event.data or {}) | {"status": to.value})
    if not events.append(session, job_id, [told], *guards, status=to.value, **values):
        return False
    project_id = session.scalars(select(Job.project_id).where(Job.id == job_id)).one()
    webhooks.announce(session, project_id, f"fine_tuning.job.{to.value}", {"id": job_id})
    return True
