"""Files: bytes in storage under a key of ours, never under the name a client gave."""

import hashlib
import io
import re
from collections.abc import Sequence
from functools import partial
from typing import IO, Any
from urllib.parse import unquote

from sqlalchemy import ColumnElement, Connection, Row, Select, func, or_, select
from sqlalchemy import delete as delete_rows
from sqlalchemy.orm import Session

from app import db, storage
from app.config import get_settings
from app.errors import Conflict, InvalidRequest, NotFound, TooLarge
from app.files import validation
from app.files.tables import File
from app.ids import new_id
from app.jobs import queries as jobs
from app.keys import service as keys
from app.schemas import Order, fetch_page

MAX_NAME_CHARACTERS = 255
BLOCK_BYTES = 1 << 20


def create_file(project_id: str, upload: IO[bytes], filename: str, purpose: str, expires_after_s: int | None = None) -> File:
    """Store an upload; training data is `uploaded` until a control worker has read it through.

    No transaction is open while bytes move: an upload takes as long as the client's line allows.
    """
    filename = checked_name(filename)
    file_id = new_id("file-")
    key = f"files/{file_id}"
    size, sha256 = _store(upload, key)
    try:
        is_data = purpose == "fine-tune"
        with db.write() as session:
            keys.check_storage(session, project_id, partial(stored_bytes, session, project_id), size)
            file = File(
                id=file_id,
                project_id=project_id,
                filename=filename,
                purpose=purpose,
                bytes=size,
                sha256=sha256,
                status="uploaded" if is_data else "processed",
                storage_key=key,
            )
            if expires_after_s is not None:
                file.expires_at = db.now() + expires_after_s
            session.add(file)
            session.flush()
            if is_data:
                validation.ask_for(session, file_id)
            session.refresh(file)
            return file
    except BaseException:
        storage.delete(key)
        raise


def list_files(
    connection: Connection, project_id: str, *, purpose: str | None, order: Order, after: str | None, limit: int
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a project's files, and whether more follows."""
    statement = _visible(project_id)
    if purpose is not None:
        statement = statement.where(File.purpose == purpose)
    return fetch_page(connection, statement, (File.created_at, File.id), after=after, limit=limit, order=order)


def get_file(connection: Connection | Session, project_id: str, file_id: str) -> Row[Any]:
    """A project's file; NotFound for any other."""
    return _found(connection, _visible(project_id), file_id)


def validation_report(connection: Connection, project_id: str, file_id: str) -> dict[str, Any]:
    """Everything that was found in a file of training data. Raises NotFound, InvalidRequest, Conflict until it is read."""
    file = get_file(connection, project_id, file_id)
    if file.purpose != "fine-tune":
        message = f"File {file_id} has purpose '{file.purpose}': only files of purpose 'fine-tune' are validated."
        raise InvalidRequest(message, code="not_training_data", param="file_id")
    report = validation.report_of(connection, file_id)
    if report is None:
        message = f"File {file_id} is still being read: wait until its status is `processed` or `error`, then ask again."
        raise Conflict(message, code="validation_not_finished", param="file_id")
    return report


def hold_file(session: Session, project_id: str, file_id: str) -> Row[Any]:
    """The same, and nobody deletes it before the transaction ends."""
    return _found(session, _visible(project_id).with_for_update(read=True), file_id)


def file_of_job(connection: Connection | Session, project_id: str, file_id: str) -> Row[Any]:
    """A file that an unfinished job reads: it stays for that job, also when it has expired for everybody else."""
    return _found(connection, select(*File.__table__.columns).where(File.project_id == project_id), file_id)


def is_being_read(session: Session, file_id: str) -> bool:
    """Whether nobody can say yet what an upload holds."""
    return session.scalar(select(File.id).where(File.id == file_id, File.status == "uploaded")) is not None


def _found(connection: Connection | Session, files: Select[Any], file_id: str) -> Row[Any]:
    file = connection.execute(files.where(File.id == file_id)).one_or_none()
    if file is None:
        raise NotFound(f"There is no file `{file_id}`.", code="file_not_found", param="file_id")
    return file


def delete_file(project_id: str, file_id: str) -> None:
    """Delete a file that no unfinished job needs: first the row, then the bytes, so that no row ever lacks its bytes."""
    with db.write() as session:
        # Locked before jobs are looked at: one that is being created holds the file until it can be seen.
        file = _found(session, _visible(project_id).with_for_update(), file_id)
        job_id = jobs.job_using_file(session, file_id)
        if job_id is not None:
            raise Conflict(f"The job `{job_id}` still uses this file: cancel it or wait for its end.", code="file_in_use")
        session.execute(delete_rows(File).where(File.id == file_id))
    storage.delete(file.storage_key)


def sweep_expired() -> int:
    """Delete expired files that no unfinished job needs, rows first; how many."""
    with db.read() as connection:
        expired = connection.execute(select(File.id).where(File.expires_at <= db.now()).order_by(File.id)).scalars().all()
    return sum(_delete_expired(file_id) for file_id in expired)


def _delete_expired(file_id: str) -> bool:
    with db.write() as session:
        locked = select(File.storage_key).where(File.id == file_id).with_for_update(skip_locked=True)
        key = session.scalar(locked)
        if key is None or jobs.job_using_file(session, file_id) is not None:
            return False
        session.execute(delete_rows(File).where(File.id == file_id))
    storage.delete(key)
    return True


def sweep_orphans(older_than_s: float) -> int:
    """Delete stored bytes that no row has named for so long, as a crash between row and bytes leaves them; how many."""
    stored = storage.keys("files/")
    with db.read() as connection:
        named = {*connection.execute(select(File.storage_key)).scalars()}
    orphans = [key for key in stored if key not in named and storage.age_s(key) > older_than_s]
    for key in orphans:
        storage.delete(key)
    return len(orphans)


def store_result_file(session: Session, project_id: str, filename: str, content: bytes) -> str:
    """Store a file that a job made for its owner; its id. Where the transaction fails, only unlisted bytes stay behind."""
    file_id = new_id("file-")
    key = f"files/{file_id}"
    size, sha256 = _store(io.BytesIO(content), key)
    session.add(
        File(
            id=file_id,
            project_id=project_id,
            filename=filename,
            purpose="fine-tune-results",
            bytes=size,
            sha256=sha256,
            status="processed",
            storage_key=key,
        )
    )
    session.flush()
    return file_id


def stored_bytes(session: Session, project_id: str) -> int:
    """What a project's files and results take in storage."""
    files = session.scalar(select(func.sum(File.bytes)).where(File.project_id == project_id))
    return int(files or 0) + jobs.artifact_bytes(session, project_id)


def checked_name(filename: str) -> str:
    """The exact name of an upload. It is only ever shown, but a client that saves under it must not be led astray."""
    # Browsers and the SDK escape just these three in a multipart header (WHATWG HTML, multipart/form-data).
    name = filename.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
    plain = unquote(name)
    if len(name) > MAX_NAME_CHARACTERS:
        raise _bad_name(f"is longer than {MAX_NAME_CHARACTERS} characters")
    if not plain.strip(" .") or re.search(r"[/\\]", plain):
        raise _bad_name("is a path: send the bare name of the file")
    if re.search(r"[\x00-\x1f\x7f]", plain):
        raise _bad_name("holds a control character")
    if re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", plain):
        raise _bad_name("is reserved on Windows")
    return name


def _bad_name(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The file's name {reason}.", code="invalid_file_name", param="file")


def _store(upload: IO[bytes], key: str) -> tuple[int, str]:
    size, digest, limit = 0, hashlib.sha256(), get_settings().max_upload_bytes
    with storage.writer(key) as target:
        while block := upload.read(BLOCK_BYTES):
            size += len(block)
            if size > limit:
                raise TooLarge(f"The file is larger than {limit} bytes.", code="file_too_large", param="file")
            digest.update(block)
            target.write(block)
    return size, digest.hexdigest()


def _visible(project_id: str) -> Select[Any]:
    return select(*File.__table__.columns).where(File.project_id == project_id, _unexpired())


def _unexpired() -> ColumnElement[bool]:
    return or_(File.expires_at.is_(None), File.expires_at > db.now())
