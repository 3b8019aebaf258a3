"""Named secrets: written once, read by nobody but a job's own processes. Encrypted with AES-256-GCM under the service's key."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, Row, delete, select
from sqlalchemy.orm import Session

from app import keyfile
from app.config import get_settings
from app.errors import InvalidRequest, NotFound
from app.ids import new_id
from app.schemas import fetch_page
from app.secrets.tables import Secret

NONCE_BYTES = 12  # AES-GCM's own size; random for every value (NIST SP 800-38D)


def put_secret(session: Session, project_id: str, name: str, value: str) -> Secret:
    """Keep a value under a name; an older one of the name is replaced."""
    session.execute(delete(Secret).where(Secret.project_id == project_id, Secret.name == name))
    secret = Secret(id=new_id("secret_"), project_id=project_id, name=name, ciphertext=seal(project_id, name, value))
    session.add(secret)
    session.flush()
    session.refresh(secret)
    return secret


def list_secrets(connection: Connection, project_id: str, *, after: str | None, limit: int) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a project's secrets, newest first: their names, never their values."""
    columns: list[Any] = [Secret.id, Secret.name, Secret.created_at]
    statement = select(*columns).where(Secret.project_id == project_id)
    return fetch_page(connection, statement, (Secret.created_at, Secret.id), after=after, limit=limit)


def delete_secret(session: Session, project_id: str, name: str) -> None:
    """Forget a value. Jobs that still name it fail when they need it."""
    gone = delete(Secret).where(Secret.project_id == project_id, Secret.name == name).returning(Secret.id)
    if session.execute(gone).one_or_none() is None:
        raise NotFound(f"There is no secret `{name}`.", code="secret_not_found", param="name")


def require(session: Session, project_id: str, names: Iterable[str], param: str) -> None:
    """Raises InvalidRequest for a name that the project has no secret of."""
    known = set(session.scalars(select(Secret.name).where(Secret.project_id == project_id)))
    for name in names:
        if name not in known:
            message = f"There is no secret `{name}`: create it with POST /v1/secrets."
            raise InvalidRequest(message, code="secret_not_found", param=param)


def reveal(connection: Connection, project_id: str, variables: dict[str, str]) -> dict[str, str]:
    """Environment variables with their values, for one child process. `variables` names a secret for each."""
    statement = select(Secret.name, Secret.ciphertext).where(Secret.project_id == project_id)
    stored = {name: ciphertext for name, ciphertext in connection.execute(statement)}
    missing = sorted(set(variables.values()) - set(stored))
    if missing:
        raise NotFound(f"There is no secret `{missing[0]}` any more.", code="secret_not_found")
    return {variable: unseal(project_id, name, stored[name]) for variable, name in variables.items()}


def seal(project_id: str, name: str, value: str) -> bytes:
    """A value encrypted, readable only where project and name are the same."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _cipher().encrypt(nonce, value.encode(), _place(project_id, name))


def unseal(project_id: str, name: str, ciphertext: bytes) -> str:
    """What was sealed. Raises NotFound where it was sealed under another key."""
    nonce, sealed = ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:]
    try:
        return _cipher().decrypt(nonce, sealed, _place(project_id, name)).decode()
    except InvalidTag:
        message = f"The secret `{name}` was encrypted under another TUNEYARD_SECRETS_KEY: create it again."
        raise NotFound(message, code="secret_unreadable") from None


def _place(project_id: str, name: str) -> bytes:
    """Bound to each value, so that nobody who can write to the database moves one to another project."""
    return f"{project_id}/{name}".encode()


def _cipher() -> AESGCM:
    settings = get_settings()
    return AESGCM(keyfile.load(settings.secrets_key, settings.data_dir.resolve() / "secrets-key"))
