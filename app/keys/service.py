"""Projects and API keys. A key is shown once, at its creation; afterwards only its hash is known."""

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select
from sqlalchemy.orm import Session

from app import queue
from app.config import get_settings
from app.db import now
from app.errors import InvalidRequest, NotFound, QuotaExceeded
from app.ids import new_id
from app.keys.tables import ApiKey, Project

DEFAULT_PROJECT_ID = "proj_default"


def create_project(session: Session, name: str, project_id: str | None = None) -> Project:
    """A new project."""
    project = Project(id=project_id or new_id("proj_"), name=name)
    session.add(project)
    session.flush()
    return project


def create_key(session: Session, project_id: str, name: str, plaintext: str | None = None, *, is_admin: bool = False) -> str:
    """A new key of a project, in plain text: the caller must keep it, nobody can show it again."""
    plaintext = plaintext or f"sk-ty-{secrets.token_urlsafe(32)}"
    key = ApiKey(id=new_id("key_"), project_id=project_id, name=name, key_hash=_hash(plaintext), is_admin=is_admin)
    session.add(key)
    session.flush()
    return plaintext


def authenticate(connection: Connection, plaintext: str) -> str | None:
    """The id of the project a key belongs to; None for a key that is unknown or revoked."""
    # Looking a hash up leaks nothing by its timing: a caller cannot choose the hash of a guess.
    known = select(ApiKey.project_id).where(ApiKey.key_hash == _hash(plaintext), ApiKey.revoked_at.is_(None))
    return connection.execute(known).scalar_one_or_none()


def is_admin(connection: Connection, plaintext: str) -> bool:
    """Whether the key opens what concerns the whole service."""
    known = select(ApiKey.is_admin).where(ApiKey.key_hash == _hash(plaintext), ApiKey.revoked_at.is_(None))
    return connection.execute(known).scalar_one_or_none() is True


def ensure_admin_key(session: Session, plaintext: str | None) -> str | None:
    """At the first start make the default project and its key, and return the key. Later: add `plaintext` where it is not
    known yet (an operator set another one), else do nothing and return None."""
    if session.get(Project, DEFAULT_PROJECT_ID) is None:
        create_project(session, "default", DEFAULT_PROJECT_ID)
    if plaintext is not None:
        known = select(ApiKey.id).where(ApiKey.key_hash == _hash(plaintext))
        return None if session.scalar(known) else create_key(session, DEFAULT_PROJECT_ID, "admin", plaintext, is_admin=True)
    has_keys = session.scalar(select(func.count()).select_from(ApiKey).where(ApiKey.project_id == DEFAULT_PROJECT_ID))
    return None if has_keys else create_key(session, DEFAULT_PROJECT_ID, "admin", is_admin=True)


def update_project(session: Session, project_id: str, changes: Mapping[str, Any]) -> Project:
    """Set weight and quotas; None lifts a quota. Raises NotFound."""
    project = session.get(Project, project_id, with_for_update=True)
    if project is None:
        raise NotFound(f"There is no project `{project_id}`.", code="project_not_found", param="project_id")
    for name, value in changes.items():
        setattr(project, name, value)
    session.flush()
    queue.send_after_commit(session, "place")
    return project


def check_gpus(session: Session, project_id: str, gpus: int) -> None:
    """InvalidRequest for a job that asks for more GPUs than its project may ever use at once."""
    most = session.scalars(select(Project.max_gpus).where(Project.id == project_id)).one()
    if most is not None and gpus > most:
        message = f"The project may use {most} GPU(s) at once and the job needs {gpus}: set spec.parallelism to fewer."
        raise InvalidRequest(message, code="quota_too_small", param="spec.parallelism")


def check_gpu_hours(session: Session, project_id: str, used: Callable[[], float]) -> None:
    """QuotaExceeded for a project whose GPU-hours of this month, which `used` counts if need be, have reached its quota."""
    most = session.scalars(select(Project.max_gpu_hours_per_month).where(Project.id == project_id)).one()
    if most is not None and (hours := used()) >= most:
        message = f"The project has used {hours:.1f} of {most:g} GPU-hours this month: wait for the next, or ask its operator."
        raise QuotaExceeded(message, code="gpu_hours_exceeded")


def check_storage(session: Session, project_id: str, used: Callable[[], int], more: int) -> None:
    """QuotaExceeded where `more` bytes do not fit beside those in use, which `used` counts if need be."""
    # Locked, so that two uploads at once do not both find the last of the room.
    limit = select(Project.max_storage_bytes).where(Project.id == project_id, Project.max_storage_bytes.is_not(None))
    most = session.scalar(limit.with_for_update())
    if most is not None and (kept := used()) + more > most:
        message = f"The project keeps {kept} of {most} bytes and this needs {more} more: delete files, or ask its operator."
        raise QuotaExceeded(message, code="storage_exceeded")


def charge(session: Session, project_id: str, slot_seconds: float) -> None:
    """Add to what a project has used of the nodes."""
    project = session.get_one(Project, project_id, with_for_update={"key_share": True}, populate_existing=True)
    at = session.scalars(select(now())).one()
    project.usage = project.usage * decay(at - project.usage_at) + slot_seconds
    project.usage_at = at
    session.flush()


def decay(seconds: float) -> float:
    """What is left of a use of nodes after so long."""
    return float(0.5 ** (max(seconds, 0.0) / get_settings().usage_half_life_s))


def fair_use(seconds: float) -> float:
    """Seconds of a slot held until now, each as far as it has decayed since."""
    return (1.0 - decay(seconds)) * get_settings().usage_half_life_s / math.log(2)


def shares(connection: Connection | Session) -> Sequence[Row[Any]]:
    """Per project its weight, use and quotas: `id`, `weight`, `usage`, `usage_at`, `max_running_jobs`, `max_gpus`."""
    columns: list[Any] = [
        Project.id,
        Project.weight,
        Project.usage,
        Project.usage_at,
        Project.max_running_jobs,
        Project.max_gpus,
    ]
    return connection.execute(select(*columns)).all()


def _hash(plaintext: str) -> str:
    return hashlib.sha256(plaintext.encode()).hexdigest()
