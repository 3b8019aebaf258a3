"""A request that is sent again makes no second job.

An `Idempotency-Key` names the job that the first one made. The official SDK sends none, but says of a repetition that it is
one: then the same request of the same API key within minutes is meant.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.db import now
from app.errors import Conflict
from app.jobs.schemas import JobCreate
from app.jobs.tables import Job

RETRY_WINDOW_S = 15 * 60.0  # the SDK's timeout of 600 s, its pauses, and a slow answer


@dataclass(frozen=True)
class Request:
    """What a client sends, and will send again when it gets no answer."""

    project_id: str
    key: str | None
    """Its `Idempotency-Key`."""
    sha256: str
    is_retry: bool

    @classmethod
    def of(cls, project_id: str, api_key_id: str, key: str | None, retry_count: int, body: JobCreate) -> "Request":
        content = json.dumps(body.model_dump(mode="json"), sort_keys=True)
        if key is None:  # the name that the client gave is missing: it is known by its API key
            content = f"{api_key_id}\n{content}"
        return cls(project_id, key, hashlib.sha256(content.encode()).hexdigest(), retry_count > 0)


def once(session: Session, request: Request, create: Callable[[], Job]) -> tuple[Job, bool]:
    """The job of this request, and whether it was there before. Raises Conflict where its key stands for another one."""
    if request.key is None:
        return _once_without_key(session, request, create)
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


def _once_without_key(session: Session, request: Request, create: Callable[[], Job]) -> tuple[Job, bool]:
    _await_equal_requests(session, request)
    if request.is_retry and (job := _newest(session, request)) is not None:
        return job, True
    job = create()
    job.request_sha256 = request.sha256
    session.flush()
    return job, False


def _await_equal_requests(session: Session, request: Request) -> None:
    """A client that lost its connection sends again while the first request is still under way: that one ends first."""
    if session.get_bind().dialect.name == "postgresql":  # SQLite has one writer at a time anyway
        number = int.from_bytes(bytes.fromhex(request.sha256)[:8], signed=True)
        session.execute(select(func.pg_advisory_xact_lock(number)))


def _newest(session: Session, request: Request) -> Job | None:
    same = (Job.project_id == request.project_id, Job.idempotency_key.is_(None), Job.request_sha256 == request.sha256)
    recent = Job.created_at > now() - RETRY_WINDOW_S
    return session.scalar(select(Job).where(*same, recent).order_by(Job.created_at.desc(), Job.id).limit(1))


def _find(session: Session, request: Request) -> Job | None:
    job = session.scalar(select(Job).where(Job.project_id == request.project_id, Job.idempotency_key == request.key))
    if job is not None and job.request_sha256 != request.sha256:
        message = f"This Idempotency-Key belongs to job {job.id}, which was asked for differently: send another key."
        raise Conflict(message, code="idempotency_key_reused", param="Idempotency-Key")
    return job
