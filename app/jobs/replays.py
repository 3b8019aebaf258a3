"""A request that is sent again makes no second job: an `Idempotency-Key` names the job that the first one made."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict
from app.jobs.schemas import JobCreate
from app.jobs.tables import Job


@dataclass(frozen=True)
class Request:
    """What a client sends with a key, and will send again when it gets no answer."""

    project_id: str
    key: str
    sha256: str

    @classmethod
    def of(cls, project_id: str, key: str, body: JobCreate) -> "Request":
        content = json.dumps(body.model_dump(mode="json"), sort_keys=True)
        return cls(project_id, key, hashlib.sha256(content.encode()).hexdigest())


def once(session: Session, request: Request, create: Callable[[], Job]) -> tuple[Job, bool]:
    """The job of this key, and whether it was there before. Raises Conflict where the key stands for another request."""
    if (job := _find(session, request)) is not None:
        return job, True
    try:
        with session.begin_nested():
            job = create()
            job.idempotency_key, job.request_sha256 = request.key, request.sha256
            session.flush()
            return job, False
    except IntegrityError:
        job = _find(session, request)  # the same request, on another connection
        if job is None:
            raise
        return job, True


def _find(session: Session, request: Request) -> Job | None:
    job = session.scalar(select(Job).where(Job.project_id == request.project_id, Job.idempotency_key == request.key))
    if job is not None and job.request_sha256 != request.sha256:
        message = f"This Idempotency-Key belongs to job {job.id}, which was asked for differently: send another key."
        raise Conflict(message, code="idempotency_key_reused", param="Idempotency-Key")
    return job
