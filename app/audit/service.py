"""The audit log: a line per change that a key or an operator made. Lines are added, never changed, never swept."""

import getpass
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import db
from app.audit.tables import Entry
from app.ids import new_id
from app.schemas import fetch_page

log = logging.getLogger(__name__)

IRREGULAR = {"cancel": "cancelled", "rerun": "rerun", "drain": "drained"}


@dataclass(frozen=True)
class Filter:
    """Which entries; what is empty does not matter."""

    types: Sequence[str] = ()
    project_ids: Sequence[str] = ()
    key_ids: Sequence[str] = ()
    object_ids: Sequence[str] = ()
    since: float | None = None
    before: float | None = None


def type_of(operation: str) -> str:
    """`cancel_job` becomes `job.cancelled`."""
    verb, _, noun = operation.partition("_")
    return f"{noun}.{IRREGULAR.get(verb) or (verb + 'd' if verb.endswith('e') else verb + 'ed')}"


def record(entry: Entry) -> None:
    """Add a line about a change that has been made. Where the database cannot take it, the service's log has it."""
    entry.id = new_id("audit_log-")
    try:
        with db.write() as session:
            session.add(entry)
    except SQLAlchemyError:
        known = {name: value for name, value in vars(entry).items() if not name.startswith("_")}
        log.exception("an audit entry could not be stored: %s", known)


def record_command(session: Session, operation: str, object_id: str) -> None:
    """Add a line about what a command of an operator changes, in the transaction of the change."""
    operator = None
    with suppress(OSError, KeyError):  # a user without a name, as in a container
        operator = getpass.getuser()
    entry = Entry(id=new_id("audit_log-"), type=type_of(operation), object_id=object_id, operator=operator or "unknown")
    session.add(entry)


def list_entries(connection: Connection, wanted: Filter, *, after: str | None, limit: int) -> tuple[Sequence[Row[Any]], bool]:
    """One page, newest first."""
    statement = select(*Entry.__table__.columns).where(*_conditions(wanted))
    return fetch_page(connection, statement, (Entry.effective_at, Entry.id), after=after, limit=limit)


def _conditions(wanted: Filter) -> list[ColumnElement[bool]]:
    lists = [
        (Entry.type, wanted.types),
        (Entry.project_id, wanted.project_ids),
        (Entry.key_id, wanted.key_ids),
        (Entry.object_id, wanted.object_ids),
    ]
    conditions: list[ColumnElement[bool]] = [column.in_(values) for column, values in lists if values]
    if wanted.since is not None:
        conditions.append(Entry.effective_at >= wanted.since)
    if wanted.before is not None:
        conditions.append(Entry.effective_at < wanted.before)
    return conditions
