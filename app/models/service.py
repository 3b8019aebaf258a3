"""Models: the base models an operator offers, and what a project's jobs have made of them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, select, update
from sqlalchemy.orm import Session

from app.config import get_settings
from app.db import now
from app.errors import Forbidden, NotFound
from app.models.tables import FineTunedModel


def is_base_model(name: str) -> bool:
    """Whether an operator lists this name; other Hub ids can be tuned, but are not listed."""
    return name in get_settings().base_models


def list_fine_tuned(connection: Connection, project_id: str) -> Sequence[Row[Any]]:
    """A project's fine-tuned models and usable checkpoints, newest first."""
    statement = _visible(project_id).order_by(FineTunedModel.created_at.desc(), FineTunedModel.id.desc())
    return connection.execute(statement).all()


def get_fine_tuned(connection: Connection | Session, project_id: str, name: str) -> Row[Any]:
    """A project's fine-tuned model; NotFound for any other."""
    model = connection.execute(_visible(project_id).where(FineTunedModel.id == name)).one_or_none()
    if model is None:
        raise NotFound(f"There is no model `{name}`.", code="model_not_found", param="model")
    return model


def delete_model(session: Session, project_id: str, name: str) -> None:
    """Take a fine-tuned model out of use. Its job and the job's artifacts stay: they are the record of what was done."""
    if is_base_model(name):
        raise Forbidden("A base model belongs to all projects and cannot be deleted.", code="base_model", param="model")
    get_fine_tuned(session, project_id, name)
    session.execute(update(FineTunedModel).where(FineTunedModel.id == name).values(deleted_at=now()))


def _visible(project_id: str) -> Select[Any]:
    columns = FineTunedModel.__table__.columns
    return select(*columns).where(FineTunedModel.project_id == project_id, FineTunedModel.deleted_at.is_(None))
