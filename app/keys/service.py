"""Projects and API keys. A key is shown once, at its creation; afterwards only its hash is known."""

import hashlib
import secrets

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

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


def _hash(plaintext: str) -> str:
    return hashlib.sha256(plaintext.encode()).hexdigest()
