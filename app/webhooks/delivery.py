"""Sending what is in the outbox, signed as `client.webhooks.unwrap` verifies it (Standard Webhooks).

An event arrives at least once: a process that dies between sending and noting it leaves a claim that runs out, and the event
goes out again under the same `webhook-id`.
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, exists, select, update
from sqlalchemy.orm import aliased

from app import db, outbound
from app.db import now
from app.errors import InvalidRequest, NotFound
from app.webhooks import service
from app.webhooks.service import event_body
from app.webhooks.tables import Delivery, Endpoint

CLAIM_S = 120.0  # longer than outbound.DEADLINE_S and the note of its outcome
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 2 * 3600.0
LONGEST_ERROR = 255


@dataclass(frozen=True)
class Claim:
    """A delivery that this process sends."""

    id: str
    endpoint_id: str
    url: str
    event_id: str
    body: str
    tries: int


@dataclass(frozen=True)
class Outcome:
    """How a try ended."""

    status_code: int | None
    error: str | None

    @property
    def is_delivered(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


def deliver_next() -> bool:
    """Send one event that is due and note how that went; False where there is none. Any number may do so at once."""
    claim = _claim()
    if claim is None:
        return False
    _note(claim, _send(claim.endpoint_id, claim.url, claim.event_id, claim.body))
    return True


def send_sample(project_id: str, endpoint_id: str, event_type: str) -> int:
    """The status with which an endpoint answers to a made-up event. Raises NotFound, and InvalidRequest without an answer."""
    with db.read() as connection:
        endpoint = service.get_endpoint(connection, project_id, endpoint_id)
    event = event_body(event_type, {"id": "ftjob-sample"})
    outcome = _send(endpoint_id, endpoint.url, event["id"], json.dumps(event))
    if outcome.status_code is None:
        raise InvalidRequest(f"The endpoint cannot be called: {outcome.error}.", code="webhook_not_answered", param="url")
    return outcome.status_code


def _claim() -> Claim | None:
    """One that is due, of an endpoint that is not being called: a slow one takes no more than one sender."""
    columns = (Delivery.id, Delivery.endpoint_id, Delivery.event_id, Delivery.body, Delivery.tries, Endpoint.url)
    statement = select(*columns).join(Endpoint).where(_is_due(), ~_is_busy()).order_by(Delivery.due_at).limit(1)
    with db.read() as connection:
        due = connection.execute(statement).one_or_none()
    if due is None:
        return None
    taken = (
        update(Delivery)
        .where(Delivery.id == due.id, Delivery.tries == due.tries, _is_due())
        .values(tries=Delivery.tries + 1, due_at=now() + CLAIM_S, is_claimed=True)
        .returning(Delivery.id)
    )
    with db.write() as session:
        if session.execute(taken).one_or_none() is None:
            return None  # another process was faster
    return Claim(due.id, due.endpoint_id, due.url, due.event_id, due.body, due.tries + 1)


def _is_due() -> ColumnElement[bool]:
    return and_(Delivery.status == "pending", Delivery.due_at <= now())


def _is_busy() -> ColumnElement[bool]:
    other = aliased(Delivery)
    return exists().where(
        other.endpoint_id == Delivery.endpoint_id, other.status == "pending", other.is_claimed, other.due_at > now()
    )


def _send(endpoint_id: str, url: str, event_id: str, body: str) -> Outcome:
    try:
        with db.read() as connection:
            keys = service.signing_secrets(connection, endpoint_id)
        status = outbound.post(url, body.encode(), _headers(keys, event_id, body))
    except (outbound.NotAllowed, outbound.NoAnswer, NotFound) as error:
        return Outcome(None, str(error)[:LONGEST_ERROR])
    is_redirect = 300 <= status < 400
    return Outcome(status, "redirects are not followed" if is_redirect else None if status < 300 else f"HTTP {status}")


def _headers(keys: Sequence[bytes], event_id: str, body: str) -> dict[str, str]:
    timestamp = str(int(time.time()))
    signed = f"{event_id}.{timestamp}.{body}".encode()
    signatures = [base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys]
    return {
        "Content-Type": "application/json",
        "User-Agent": "Tuneyard",
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def _note(claim: Claim, outcome: Outcome) -> None:
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(claim.tries - 1, 20), LONGEST_PAUSE_S)
    held = (Delivery.id == claim.id, Delivery.tries == claim.tries, Delivery.is_claimed)
    noted = {"status_code": outcome.status_code, "error": outcome.error, "is_claimed": False}
    with db.write() as session:
        if outcome.is_delivered:
            session.execute(update(Delivery).where(*held).values(status="delivered", ended_at=now(), **noted))
            return
        ends = (*held, Delivery.give_up_at <= now() + pause_s)
        session.execute(update(Delivery).where(*ends).values(status="failed", ended_at=now(), **noted))
        session.execute(update(Delivery).where(*held).values(due_at=now() + pause_s, **noted))
