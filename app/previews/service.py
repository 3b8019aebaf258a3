"""Previews: asked for over the API, answered by the first node that is free, kept for a day.

The API has no tokenizer, and only the trainer's own code knows what it trains on. A message only wakes the nodes; what waits
stands in the table, with a lease for the node that is at it.
"""

import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, select, update
from sqlalchemy.orm import Session

from app import db, queue
from app.errors import NotFound
from app.files import service as files
from app.ids import new_id
from app.jobs import service as jobs
from app.jobs.schemas import JobCreate
from app.previews.schemas import PreviewCreate
from app.previews.tables import Preview

PATIENCE_S = 15.0
POLL_S = 0.1
TIME_LIMIT_S = 600.0
LEASE_S = TIME_LIMIT_S + 30.0
MAX_TRIES = 2
KEPT_S = 24 * 3600.0


def create_preview(session: Session, project_id: str, file_id: str, body: PreviewCreate) -> str:
    """Check the question as a job with this model and spec is checked, and ask it; its id. Raises InvalidRequest."""
    files.get_file(session, project_id, file_id)
    sources = {"training_file": file_id, "validation_file": body.validation_file}
    spec = jobs.spec_of(session, project_id, JobCreate(model=body.model, method=body.method, spec=body.spec, **sources))
    preview = Preview(
        id=new_id("preview-"),
        project_id=project_id,
        file_id=file_id,
        validation_file=body.validation_file,
        lines=sorted(set(body.lines)),
        spec=spec.model_dump(mode="json"),
    )
    session.add(preview)
    queue.send_after_commit(session, "preview", queue=queue.ANY_NODE)
    return preview.id


def wait_for_answer(preview_id: str) -> None:
    """Until there is one, or patience ends."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with db.read() as connection:
            if connection.execute(select(Preview.id).where(Preview.id == preview_id, *_open())).first() is None:
                return
        time.sleep(POLL_S)


def get_preview(connection: Connection, project_id: str, file_id: str, preview_id: str) -> Row[Any]:
    """A project's preview of a file; NotFound for any other."""
    mine = (Preview.project_id == project_id, Preview.file_id == file_id, Preview.id == preview_id)
    preview = connection.execute(select(*Preview.__table__.columns).where(*mine)).one_or_none()
    if preview is None:
        raise NotFound(f"There is no preview `{preview_id}` of this file.", code="preview_not_found", param="preview_id")
    return preview


def wake_if_any_waits() -> None:
    """Wake a node for previews whose message, or whose node, was lost."""
    with db.write() as session:
        if session.scalar(select(Preview.id).where(*_waits()).limit(1)) is not None:
            queue.send_after_commit(session, "preview", queue=queue.ANY_NODE)


def claim_next() -> Row[Any] | None:
    """Take the oldest question that waits; one that ended its nodes' processes before is answered with that."""
    oldest = select(Preview.id, Preview.tries).where(*_waits()).order_by(Preview.created_at).limit(1)
    with db.write() as session:
        found = session.execute(oldest.with_for_update(skip_locked=True)).one_or_none()
        if found is None:
            return None
        session.execute(_of(found.id).values(leased_until=db.now() + LEASE_S, tries=found.tries + 1))
        preview = session.execute(select(*Preview.__table__.columns).where(Preview.id == found.id)).one()
    if preview.tries > MAX_TRIES:
        fail(preview.id, "worker_lost", f"No node could answer, in {MAX_TRIES} tries.")
        return claim_next()
    return preview


def load(preview_id: str) -> Row[Any]:
    """A question that a node has claimed."""
    with db.read() as connection:
        return connection.execute(select(*Preview.__table__.columns).where(Preview.id == preview_id)).one()


def give_back(preview_id: str) -> None:
    """Leave the question to another node: this one stops."""
    with db.write() as session:
        session.execute(_of(preview_id).values(leased_until=0.0, tries=Preview.tries - 1))


def answer(preview_id: str, result: dict[str, Any]) -> None:
    """Write the answer, if there is none yet."""
    with db.write() as session:
        session.execute(_of(preview_id).values(result=db.storable(result)))


def fail(preview_id: str, code: str, message: str, param: str | None = None) -> None:
    """Write why there is no answer, if there is none yet."""
    with db.write() as session:
        session.execute(_of(preview_id).values(error=db.storable({"code": code, "message": message, "param": param})))


def sweep() -> None:
    """Forget what nobody will ask for again."""
    with db.write() as session:
        session.execute(delete(Preview).where(Preview.created_at < db.now() - KEPT_S))


def _of(preview_id: str) -> Any:
    return update(Preview).where(Preview.id == preview_id, *_open())


def _open() -> tuple[ColumnElement[bool], ...]:
    return Preview.result.is_(None), Preview.error.is_(None)


def _waits() -> tuple[ColumnElement[bool], ...]:
    return (*_open(), Preview.leased_until < db.now())
