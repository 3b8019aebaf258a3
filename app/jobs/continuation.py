"""Going on from another job's weights: what `spec.training.from`, or a tuned model as the job's `model`, stands for."""

from typing import Any

from sqlalchemy import Connection, Row, select
from sqlalchemy.orm import Session

from app.errors import InvalidRequest, NotFound
from app.jobs import queries, sources
from app.jobs.schemas import JobCreate, SpecRequest
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Checkpoint, Job
from app.models import service as models

FROM = "spec.training.from"
SHAPE = ("type", "r", "alpha", "target_modules", "target_parameters", "rank_pattern")
"""What makes an adapter's files fit a model, and its scale what it was."""
INTERCHANGEABLE = {"lora", "qlora"}
"""The same files, on a base in 16 bits or in 4."""
RESULT_FOLDERS = ("adapter/", "model/")


def spelled_out(session: Session, project_id: str, body: JobCreate) -> JobCreate:
    """The request with what it takes over from another job written into it; the same where it takes nothing.

    Raises InvalidRequest where there are no such weights, or the request asks for what they cannot be.
    """
    name, param = body.spec.training.from_, FROM
    if body.model.startswith("ft:"):
        if name is not None:
            raise InvalidRequest("`model` already names the weights to go on from: leave spec.training.from out.", param=FROM)
        name, param = body.model, "model"
    if name is None:
        return body
    found = _find(session, project_id, name, param)
    source = TrainingSpec.stored(session.scalars(select(Job.spec).where(Job.id == found.job_id)).one())
    base = source.model.name_or_path
    if param == FROM and sources.resolve_base_model(body.model) != base:
        message = f"The weights to go on from are of the base model {base}: set `model` to that."
        raise InvalidRequest(message, code="base_model_mismatch", param="model")
    said = body.spec.given
    sections = {
        "training": (said.get("training") or {}) | {"from": found.id},
        "adapter": _adapter(said.get("adapter") or {}, source),
        "model": _revision(said.get("model") or {}, source),
        "data": _template(said.get("data") or {}, source),
    }
    return body.model_copy(update={"model": base, "spec": SpecRequest.model_validate(said | sections)})


def has_weights(session: Session, project_id: str, name: str) -> bool:
    """Whether the weights that a job's resolved spec names are still kept."""
    connection = session.connection()
    return bool(result_files(connection, project_id, name) or checkpoint_key(connection, project_id, name))


def result_files(connection: Connection, project_id: str, name: str) -> list[Row[Any]]:
    """The stored weights of a tuned model, deleted or not: `name`, `sha256`, `storage_key`. None for a checkpoint."""
    job_id = models.job_of(connection, project_id, name)
    artifacts = queries.list_artifacts(connection, job_id) if job_id is not None else []
    return [artifact for artifact in artifacts if artifact.name.startswith(RESULT_FOLDERS)]


def checkpoint_key(connection: Connection, project_id: str, name: str) -> str | None:
    """Where the checkpoint lies that is the model of this name."""
    own = select(Checkpoint.storage_key).join(Job, Job.id == Checkpoint.job_id).where(Job.project_id == project_id)
    return connection.execute(own.where(Checkpoint.model_id == name)).scalar_one_or_none()


def _find(session: Session, project_id: str, name: str, param: str) -> Row[Any]:
    try:
        return models.get_tuned(session, project_id, _model_name(session, project_id, name))
    except NotFound as error:
        message = f"There are no weights to go on from under the name '{name}': give a tuned model, a checkpoint or a job."
        raise InvalidRequest(message, code="model_not_found", param=param) from error


def _model_name(session: Session, project_id: str, name: str) -> str:
    """A job's or a checkpoint's id as the name of the model it has made."""
    newest = select(Checkpoint.model_id).join(Job, Job.id == Checkpoint.job_id).where(Job.project_id == project_id)
    if name.startswith("ftckpt_"):
        return session.scalar(newest.where(Checkpoint.id == name)) or name
    if not name.startswith("ftjob-"):
        return name
    result = select(Job.fine_tuned_model).where(Job.id == name, Job.project_id == project_id)
    ordered = newest.where(Job.id == name).order_by(Checkpoint.step.desc()).limit(1)
    return session.scalar(result) or session.scalar(ordered) or name


def _adapter(said: dict[str, Any], source: TrainingSpec) -> dict[str, Any]:
    """The section `adapter`: the shape is the other job's, and a request may only repeat it."""
    shape = {name: value for name, value in source.adapter.model_dump(mode="json").items() if name in SHAPE}
    if source.adapter.is_full:
        shape = {"type": "full"}
    elif said.get("type") in INTERCHANGEABLE:
        shape["type"] = said["type"]
    for name, value in shape.items():
        if said.get(name, value) != value:
            message = f"The weights to go on from have adapter.{name} {value!r}: leave spec.adapter.{name} out."
            raise InvalidRequest(message, code="adapter_mismatch", param=f"spec.adapter.{name}")
    return said | shape


def _revision(said: dict[str, Any], source: TrainingSpec) -> dict[str, Any]:
    revision = source.model.revision
    if said.get("revision", revision) != revision:
        message = f"The weights to go on from were trained on revision {revision!r} of the base: leave spec.model.revision out."
        raise InvalidRequest(message, code="base_model_mismatch", param="spec.model.revision")
    return said | {"revision": revision}


def _template(said: dict[str, Any], source: TrainingSpec) -> dict[str, Any]:
    """Weights that learned one chat template go on with it."""
    return {"chat_template": source.data.chat_template} | said
