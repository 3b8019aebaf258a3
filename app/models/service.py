"""Models: the base models an operator offers, and what a project's jobs have made of them."""

from typing import Any

from sqlalchemy import Connection, Row, Select, null, select, update
from sqlalchemy.orm import Session

from app.config import get_settings
from app.db import now
from app.errors import Forbidden, NotFound
from app.jobs.queries import checkpoint_models
from app.models.tables import FineTunedModel


def is_base_model(name: str) -> bool:
    """Whether an operator lists this name; other Hub ids can be tuned, but are not listed."""
    return name in get_settings().base_models


def register(session: Session, model_id: str, project_id: str, job_id: str, base_model: str) -> None:
    """Name the weights a job has made."""
    session.add(FineTunedModel(id=model_id, project_id=project_id, job_id=job_id, base_model=base_model))


def list_tuned(connection: Connection, project_id: str) -> list[Row[Any]]:
    """A project's fine-tuned models, newest first, then the checkpoints of its jobs."""
    statement = _visible(project_id).order_by(FineTunedModel.created_at.desc(), FineTunedModel.id.desc())
    return [*connection.execute(statement), *connection.execute(checkpoint_models(project_id))]


def get_tuned(connection: Connection | Session, project_id: str, name: str) -> Row[Any]:
    """A project's fine-tuned model or checkpoint; NotFound for any other."""
    model = connection.execute(_visible(project_id).where(FineTunedModel.id == name)).one_or_none()
    model = model or connection.execute(checkpoint_models(project_id, name)).one_or_none()
    if model is None:
        raise NotFound(f"There is no model `{name}`.", code="model_not_found", param="model")
    return model


def job_of(connection: Connection, project_id: str, name: str) -> str | None:
    """The job whose result has this name, in use or deleted."""
    named = select(FineTunedModel.job_id).where(FineTunedModel.id == name, FineTunedModel.project_id == project_id)
    return connection.execute(named).scalar_one_or_none()


def delete_model(session: Session, project_id: str, name: str) -> None:
    """Take a fine-tuned model out of use. Its job and the job's artifacts stay: they are the record of what was done."""
    if is_base_model(name):
        raise Forbidden("A base model belongs to all projects and cannot be deleted.", code="base_model", param="model")
    if get_tuned(session, project_id, name).step is not None:
        raise Forbidden("A checkpoint stays with its job and cannot be deleted alone.", code="checkpoint", param="model")
    session.execute(update(FineTunedModel).where(FineTunedModel.id == name).values(deleted_at=now()))


def deleted_for(seconds: float) -> Select[Any]:
    """The jobs whose models were deleted so long ago."""
    return select(FineTunedModel.job_id).where(FineTunedModel.deleted_at < now() - seconds)


def _visible(project_id: str) -> Select[Any]:
    own: list[Any] = [FineTunedModel.id, FineTunedModel.job_id, FineTunedModel.base_model, FineTunedModel.created_at]
    return select(*own, null().label("step")).where(
        FineTunedModel.project_id == project_id, FineTunedModel.deleted_at.is_(None)
    )
