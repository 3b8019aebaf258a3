"""Uploads of training data, read through by a control worker: each becomes `processed` or `error`, with a whole report.

A message only wakes the worker; what waits stands in a table. Whoever reads a file holds a lease on it, which ends soon after
its process does, so that another one begins anew.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, select, update
from sqlalchemy.orm import Session

from app import db, queue, storage
from app.files import dataset
from app.files.problems import Problem
from app.files.tables import File, Validation

log = logging.getLogger(__name__)

LEASE_S = 60.0
RENEW_EVERY_S = 15.0
MAX_TRIES = 3


class Interrupted(Exception):
    """This process is to end: another one reads the file."""


@dataclass(frozen=True)
class Claim:
    """A file that this process reads."""

    file_id: str
    filename: str
    storage_key: str
    tries: int


def ask_for(session: Session, file_id: str) -> None:
    """Note that a new file waits to be read, and wake a control worker once it is there."""
    session.add(Validation(file_id=file_id))
    queue.send_after_commit(session, "validate")


def wake_if_any_waits() -> None:
    """Wake a control worker for files whose message, or whose reader, was lost."""
    with db.write() as session:
        if session.scalar(select(Validation.file_id).where(*_waits()).limit(1)) is not None:
            queue.send_after_commit(session, "validate")


def report_of(connection: Connection, file_id: str) -> dict[str, Any] | None:
    """What was found in a file; None until it has been read."""
    report: dict[str, Any] | None
    report = connection.execute(select(Validation.report).where(Validation.file_id == file_id)).scalar_one_or_none()
    return report


def validate_next(stop: threading.Event | None = None) -> bool:
    """Read one file that waits to its end, and write what it holds; False where none waits.

    Raises Interrupted once `stop` is set, and what storage or database raise while they are away: the file waits on. One that
    ends the processes that read it is given up after a few.
    """
    claim = _claim()
    if claim is None:
        return False
    _write(claim, _read(claim, stop) if claim.tries <= MAX_TRIES else _given_up(claim))
    return True


def _claim() -> Claim | None:
    """Take the oldest file that waits."""
    columns: tuple[Any, ...] = (File.id, File.filename, File.storage_key, Validation.tries)
    oldest = select(*columns).join(Validation, Validation.file_id == File.id).where(*_waits()).order_by(File.created_at)
    with db.write() as session:
        file = session.execute(oldest.limit(1).with_for_update(skip_locked=True, of=Validation)).one_or_none()
        if file is None:
            return None
        _set_lease(session, file.id, db.now() + LEASE_S, tries=file.tries + 1)
        return Claim(file.id, file.filename, file.storage_key, file.tries + 1)


def _read(claim: Claim, stop: threading.Event | None) -> dataset.Report:
    def look_up() -> None:
        if stop is not None and stop.is_set():
            raise Interrupted

    try:
        with _held(claim), storage.open_read(claim.storage_key) as stream:
            return dataset.check(stream, claim.filename, each_row=look_up)
    except Interrupted:
        with db.write() as session:
            _set_lease(session, claim.file_id, 0.0, tries=claim.tries - 1)
        raise


def _given_up(claim: Claim) -> dataset.Report:
    log.error("no process has read file %s to its end, in %d tries", claim.file_id, MAX_TRIES)
    report = dataset.Report()
    report.add(Problem("not_readable", f"The file could not be read to its end, in {MAX_TRIES} tries."))
    return report


def _write(claim: Claim, report: dataset.Report) -> None:
    """The first report stands: a process that was taken for dead may come with another one, of the same bytes."""
    status, details = ("processed", None) if report.is_usable else ("error", db.storable(report.summary))
    with db.write() as session:
        new = (Validation.file_id == claim.file_id, Validation.report.is_(None))
        session.execute(update(Validation).where(*new).values(report=db.storable(report.as_json())))
        unread = (File.id == claim.file_id, File.status == "uploaded")
        session.execute(update(File).where(*unread).values(status=status, status_details=details))


@contextmanager
def _held(claim: Claim) -> Iterator[None]:
    """Keep the lease from a thread: a row, or a storage that hesitates, may take longer than it lasts."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(RENEW_EVERY_S):
            try:
                with db.write() as session:
                    _set_lease(session, claim.file_id, db.now() + LEASE_S)
            except db.AWAY:
                log.warning("the lease on file %s could not be renewed", claim.file_id, exc_info=True)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _set_lease(session: Session, file_id: str, until: Any, **values: int) -> None:
    session.execute(update(Validation).where(Validation.file_id == file_id).values(leased_until=until, **values))


def _waits() -> tuple[ColumnElement[bool], ...]:
    return Validation.report.is_(None), Validation.leased_until < db.now()
