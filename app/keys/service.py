"""Projects and API keys. A key is shown once, at its creation; afterwards only its hash is known."""

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import queue
from app.config import get_settings
from app.db import now, write
from app.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, Unauthenticated
from app.ids import new_id
from app.keys.scopes import ALL_SCOPES, PROJECT_SCOPES
from app.keys.tables import ApiKey, Project
from app.schemas import fetch_page

DEFAULT_PROJECT_ID = "proj_default"
LAST_USE_S = 60.0  # a key's last use is written down at most this often


@dataclass(frozen=True)
class Caller:
    """Who sends a request."""

    key_id: str
    project_id: str
    scopes: frozenset[str]
    is_stale: bool
    """Whether the key's last use was noted long ago."""


@dataclass(frozen=True)
class NewKey:
    """A key at its creation, the only moment at which it can be read."""

    plaintext: str
    row: ApiKey


def create_project(session: Session, name: str, project_id: str | None = None) -> Project:
    """A new project. Raises Conflict for a name that is taken."""
    if session.scalar(select(Project.id).where(Project.name == name)):
        raise Conflict(f"There is a project named `{name}` already: choose another name.", code="project_exists", param="name")
    project = Project(id=project_id or new_id("proj_"), name=name)
    session.add(project)
    session.flush()
    session.refresh(project)
    return project


def create_key(
    session: Session,
    project_id: str,
    name: str,
    plaintext: str | None = None,
    *,
    scopes: Sequence[str] = PROJECT_SCOPES,
    lifetime_s: float | None = None,
) -> NewKey:
    """A new key of a project. Only this answer holds it: nobody can show it again. Raises NotFound."""
    get_project(session, project_id)
    plaintext = plaintext or f"sk-ty-{secrets.token_urlsafe(32)}"
    key = ApiKey(
        id=new_id("key_"),
        project_id=project_id,
        name=name,
        key_hash=_hash(plaintext),
        hint=f"sk-...{plaintext[-4:]}",
        scopes=list(dict.fromkeys(scopes)),
    )
    if lifetime_s is not None:
        key.expires_at = now() + lifetime_s
    session.add(key)
    session.flush()
    session.refresh(key)
    return NewKey(plaintext, key)


def list_keys(
    connection: Connection, project_id: str, *, after: str | None = None, limit: int = 100
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a project's keys, newest first, revoked ones too."""
    statement = select(*ApiKey.__table__.columns).where(ApiKey.project_id == project_id)
    return fetch_page(connection, statement, (ApiKey.created_at, ApiKey.id), after=after, limit=limit)


def rotate_key(session: Session, project_id: str, key_id: str, *, keep_old_s: float = 0.0) -> NewKey:
    """Another key with the same name and scopes, and a lifetime as long as the old one's; that one ends after `keep_old_s`.

    Raises NotFound, and Conflict for a key that opens nothing any more.
    """
    old = _own_key(session, project_id, key_id)
    at = session.scalars(select(now())).one()
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= at):
        raise Conflict(f"The key `{key_id}` was revoked or has expired: create a new one.", code="key_ended")
    lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
    new = create_key(session, project_id, old.name, scopes=old.scopes, lifetime_s=lifetime_s)
    old.expires_at = min(at + keep_old_s, old.expires_at or math.inf)
    session.flush()
    return new


def revoke_key(session: Session, project_id: str, key_id: str) -> None:
    """From now on the key opens nothing; again on a revoked one: nothing changes. Raises NotFound."""
    key = _own_key(session, project_id, key_id)
    key.revoked_at = key.revoked_at or now()
    session.flush()


def _own_key(session: Session, project_id: str, key_id: str) -> ApiKey:
    key = session.scalar(select(ApiKey).where(ApiKey.id == key_id, ApiKey.project_id == project_id).with_for_update())
    if key is None:
        raise NotFound(f"There is no key `{key_id}`.", code="key_not_found", param="key_id")
    return key


def authenticate(connection: Connection, plaintext: str) -> Caller:
    """Whom a key belongs to. Raises Unauthenticated for one that is unknown, revoked or has expired."""
    columns: list[Any] = [
        ApiKey.id.label("key_id"),
        ApiKey.project_id,
        ApiKey.scopes,
        (ApiKey.expires_at <= now()).label("has_expired"),
        func.coalesce(ApiKey.last_used_at < now() - LAST_USE_S, True).label("is_stale"),
    ]
    # Looking a hash up leaks nothing by its timing: a caller cannot choose the hash of a guess.
    known = select(*columns).where(ApiKey.key_hash == _hash(plaintext), ApiKey.revoked_at.is_(None))
    key = connection.execute(known).one_or_none()
    if key is None:
        raise Unauthenticated("This API key is not known here, or was revoked.", code="invalid_api_key")
    if key.has_expired:
        raise Unauthenticated("This API key has expired: ask for a new one.", code="expired_api_key")
    return Caller(key.key_id, key.project_id, frozenset(key.scopes), bool(key.is_stale))


def note_use(key_id: str) -> None:
    """Write down that a key was used. A database that cannot take it refuses nobody."""
    stale = ApiKey.last_used_at.is_(None) | (ApiKey.last_used_at < now() - LAST_USE_S)
    with suppress(SQLAlchemyError), write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == key_id, stale).values(last_used_at=now()))


def ensure_admin_key(session: Session, plaintext: str | None) -> str | None:
    """At the first start make the default project and its key, and return the key. Later: add `plaintext` where it is not
    known yet (an operator set another one), else do nothing and return None."""
    if session.get(Project, DEFAULT_PROJECT_ID) is None:
        create_project(session, "default", DEFAULT_PROJECT_ID)
    known = select(ApiKey.id).where(ApiKey.project_id == DEFAULT_PROJECT_ID)
    if plaintext is not None:
        known = select(ApiKey.id).where(ApiKey.key_hash == _hash(plaintext))
    if session.scalar(known.limit(1)):
        return None
    return create_key(session, DEFAULT_PROJECT_ID, "admin", plaintext, scopes=ALL_SCOPES).plaintext


def list_projects(connection: Connection, *, after: str | None = None, limit: int = 100) -> tuple[Sequence[Row[Any]], bool]:
    """One page of all projects, newest first."""
    statement = select(*Project.__table__.columns)
    return fetch_page(connection, statement, (Project.created_at, Project.id), after=after, limit=limit)


def get_project(session: Session, project_id: str, *, lock: bool = False) -> Project:
    """Raises NotFound."""
    project = session.get(Project, project_id, with_for_update=lock)
    if project is None:
        raise NotFound(f"There is no project `{project_id}`.", code="project_not_found", param="project_id")
    return project


def update_project(session: Session, project_id: str, changes: Mapping[str, Any]) -> Project:
    """Set weight and quotas; None lifts a quota. Raises NotFound."""
    project = get_project(session, project_id, lock=True)
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
