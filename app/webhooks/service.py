"""Webhook endpoints of a project, and what they are told: an outbox, filled in the transaction of each change."""

import base64
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select
from sqlalchemy.orm import Session

from app import outbound
from app.db import now, write
from app.errors import Conflict, InvalidRequest, NotFound
from app.ids import new_id
from app.keys import service as keys
from app.schemas import fetch_page
from app.secrets import service as sealed
from app.webhooks.tables import Delivery, Endpoint

OPENAIS_TYPES = tuple(f"fine_tuning.job.{status}" for status in ("succeeded", "failed", "cancelled"))
OWN_TYPES = tuple(f"fine_tuning.job.{status}" for status in ("queued", "running", "paused"))
EVENT_TYPES = OPENAIS_TYPES + OWN_TYPES
MOST_ENDPOINTS = 50
DAY_S = 24 * 3600.0
SECRET_BYTES = 32


@dataclass(frozen=True)
class NewSecret:
    """An endpoint with a signing secret that is shown this once."""

    endpoint: Endpoint
    plaintext: str


def create_endpoint(project_id: str, name: str, url: str, event_types: Sequence[str]) -> NewSecret:
    """Raises InvalidRequest for a URL that may not be called, Conflict for one endpoint too many."""
    _check_url(url)
    with write() as session:
        keys.get_project(session, project_id, lock=True)  # two at once do not both find the last place
        count = session.scalar(select(func.count()).select_from(Endpoint).where(Endpoint.project_id == project_id)) or 0
        if count >= MOST_ENDPOINTS:
            raise Conflict(f"A project has at most {MOST_ENDPOINTS} endpoints: delete one first.", code="too_many_endpoints")
        endpoint = Endpoint(
            id=new_id("we_"), project_id=project_id, name=name, url=url, event_types=list(event_types), secret=b"", hint=""
        )
        plaintext = _give_secret(endpoint)
        session.add(endpoint)
        session.flush()
        session.refresh(endpoint)
        return NewSecret(endpoint, plaintext)


def list_endpoints(
    connection: Connection, project_id: str, *, after: str | None, limit: int
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a project's endpoints, newest first."""
    statement = select(*Endpoint.__table__.columns).where(Endpoint.project_id == project_id)
    return fetch_page(connection, statement, (Endpoint.created_at, Endpoint.id), after=after, limit=limit)


def get_endpoint(connection: Connection, project_id: str, endpoint_id: str) -> Row[Any]:
    """Raises NotFound, also for another project's."""
    own = select(*Endpoint.__table__.columns).where(Endpoint.id == endpoint_id, Endpoint.project_id == project_id)
    endpoint = connection.execute(own).one_or_none()
    if endpoint is None:
        raise _not_found(endpoint_id)
    return endpoint


def update_endpoint(project_id: str, endpoint_id: str, changes: Mapping[str, Any]) -> Endpoint:
    """Change what is given. Raises NotFound, InvalidRequest."""
    if "url" in changes:
        _check_url(changes["url"])
    with write() as session:
        endpoint = _own(session, project_id, endpoint_id)
        if any(getattr(endpoint, name) != value for name, value in changes.items()):
            for name, value in changes.items():
                setattr(endpoint, name, value)
            endpoint.updated_at = now()
            session.flush()
            session.refresh(endpoint)
        return endpoint


def rotate_secret(session: Session, project_id: str, endpoint_id: str, *, keep_old: bool) -> NewSecret:
    """Another signing secret; with `keep_old` the one before signs too for a day. Raises NotFound."""
    endpoint = _own(session, project_id, endpoint_id)
    endpoint.old_secret = endpoint.secret if keep_old else None
    endpoint.old_secret_until = now() + DAY_S if keep_old else None
    plaintext = _give_secret(endpoint)
    endpoint.updated_at = now()
    session.flush()
    session.refresh(endpoint)
    return NewSecret(endpoint, plaintext)


def delete_endpoint(session: Session, project_id: str, endpoint_id: str) -> None:
    """Tell it nothing any more; its deliveries go with it. Raises NotFound."""
    endpoint = _own(session, project_id, endpoint_id)
    session.execute(delete(Endpoint).where(Endpoint.id == endpoint.id))


def announce(session: Session, project_id: str, event_type: str, data: dict[str, Any]) -> None:
    """Write an event for every endpoint of the project that asked for its type. It is sent once `session` has committed."""
    if event_type not in EVENT_TYPES:
        return
    columns = (Endpoint.id, Endpoint.event_types)
    # Held, so that no endpoint is deleted before its delivery is there.
    endpoints = select(*columns).where(Endpoint.project_id == project_id).with_for_update(read=True, key_share=True)
    asked = session.execute(endpoints).all()
    body = event_body(event_type, data)
    for endpoint_id, event_types in asked:
        if event_type in event_types:
            session.add(_delivery(endpoint_id, event_type, body))


def event_body(event_type: str, data: dict[str, Any]) -> dict[str, Any]:
    """An event as OpenAI's SDK reads it."""
    return {"id": new_id("evt_"), "object": "event", "created_at": int(time.time()), "type": event_type, "data": data}


def list_deliveries(
    connection: Connection, project_id: str, endpoint_id: str, *, after: str | None, limit: int
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of what an endpoint was or will be told, newest first. Raises NotFound."""
    get_endpoint(connection, project_id, endpoint_id)
    statement = select(*Delivery.__table__.columns).where(Delivery.endpoint_id == endpoint_id)
    return fetch_page(connection, statement, (Delivery.created_at, Delivery.id), after=after, limit=limit)


def replay(session: Session, project_id: str, endpoint_id: str, delivery_id: str) -> Delivery:
    """Send once more what was sent or given up, as the same event, for another day. Raises NotFound."""
    endpoint = _own(session, project_id, endpoint_id)
    wanted = select(Delivery).where(Delivery.id == delivery_id, Delivery.endpoint_id == endpoint.id).with_for_update()
    delivery = session.scalar(wanted)
    if delivery is None:
        raise NotFound(f"There is no delivery `{delivery_id}`.", code="delivery_not_found", param="delivery_id")
    if not delivery.is_claimed:  # else it is being sent at this moment
        delivery.status, delivery.ended_at = "pending", None
        delivery.due_at, delivery.give_up_at = now(), now() + DAY_S
    session.flush()
    session.refresh(delivery)
    return delivery


def sweep(seconds: float) -> None:
    """Forget deliveries that ended so long ago."""
    with write() as session:
        session.execute(delete(Delivery).where(Delivery.ended_at < now() - seconds))


def signing_secrets(connection: Connection, endpoint_id: str) -> list[bytes]:
    """The keys that sign for an endpoint now, the newest first."""
    active = (Endpoint.old_secret_until > now()).label("old_is_active")
    columns = (Endpoint.project_id, Endpoint.secret, Endpoint.old_secret, active)
    row = connection.execute(select(*columns).where(Endpoint.id == endpoint_id)).one_or_none()
    if row is None:
        raise _not_found(endpoint_id)
    ciphertexts = [row.secret, row.old_secret] if row.old_is_active and row.old_secret is not None else [row.secret]
    return [base64.b64decode(sealed.unseal(row.project_id, endpoint_id, ciphertext)) for ciphertext in ciphertexts]


def _delivery(endpoint_id: str, event_type: str, body: dict[str, Any]) -> Delivery:
    text = json.dumps(body, separators=(",", ":"))
    return Delivery(
        id=new_id("whd_"),
        endpoint_id=endpoint_id,
        event_id=body["id"],
        event_type=event_type,
        body=text,
        give_up_at=now() + DAY_S,
    )


def _give_secret(endpoint: Endpoint) -> str:
    text = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    endpoint.secret = sealed.seal(endpoint.project_id, endpoint.id, text)
    endpoint.hint = f"whsec_...{text[-5:]}"
    return f"whsec_{text}"


def _own(session: Session, project_id: str, endpoint_id: str) -> Endpoint:
    own = select(Endpoint).where(Endpoint.id == endpoint_id, Endpoint.project_id == project_id).with_for_update()
    endpoint = session.scalar(own)
    if endpoint is None:
        raise _not_found(endpoint_id)
    return endpoint


def _not_found(endpoint_id: str) -> NotFound:
    message = f"There is no webhook endpoint `{endpoint_id}`."
    return NotFound(message, code="webhook_endpoint_not_found", param="webhook_endpoint_id")


def _check_url(url: str) -> None:
    try:
        outbound.check_url(url)
    except outbound.NotAllowed as error:
        raise InvalidRequest(str(error), code="url_not_allowed", param="url") from None
