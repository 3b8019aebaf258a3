"""A job's append-only story: events numbered from 1 without gaps, written beside the change they tell of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, insert, update
from sqlalchemy.orm import Session

from app import db
from app.ids import new_id
from app.jobs.tables import Event, Job


@dataclass(frozen=True)
class NewEvent:
    """An event about to be written."""

    message: str
    level: Literal["info", "warn", "error"] = "info"
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] | None = None


def append(session: Session, job_id: str, events: Sequence[NewEvent], *guards: ColumnElement[bool], **values: Any) -> bool:
    """Write events, and `values` onto the job's row, where `guards` hold for it; False, and nothing, where they do not."""
    numbered = (
        update(Job)
        .where(Job.id == job_id, *guards)
        .values(last_seq=Job.last_seq + len(events), **values)
        .returning(Job.last_seq)
        .execution_options(synchronize_session=False)
    )
    last_seq = session.execute(numbered).scalar_one_or_none()
    if last_seq is None:
        return False
    if events:
        session.execute(insert(Event), [_row(job_id, last_seq - len(events) + 1 + i, event) for i, event in enumerate(events)])
    return True


def _row(job_id: str, seq: int, event: NewEvent) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "seq": seq,
        "id": new_id("ftevent-"),
        "level": event.level,
        "type": event.type,
        "message": db.storable(event.message),
        "data": db.storable(event.data),
    }
