"""Jobs as users see them: create, cancel, look up. Here the API's words become a TrainingSpec."""

import secrets
import time
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db, queue
from app.config import get_settings
from app.db import now
from app.errors import Conflict, InvalidRequest, NotFound
from app.ids import new_id
from app.jobs import events, sources
from app.jobs.events import NewEvent
from app.jobs.schemas import IntegrationRequest, JobCreate, WandbIntegration
from app.jobs.spec import FULL_LEARNING_RATE, LORA_LEARNING_RATE, TrainingSpec
from app.jobs.status import TERMINAL, Status, switch_status
from app.jobs.tables import Job
from app.nodes import service as nodes
from app.secrets import service as secrets_of_projects

# The largest micro-batch chosen for a user who only says how many rows an optimizer step takes.
LARGEST_AUTO_MICRO_BATCH = 8
# OpenAI's cancel answers `cancelled`. A running job needs a heartbeat and the rest of its step for that; most are done in 5 s.
CANCEL_PATIENCE_S = 5.0
CANCEL_POLL_S = 0.1


def create_job(session: Session, project_id: str, body: JobCreate) -> Job:
    """Check everything that can be checked now, write the job and its first event, and wake the scheduler.

    Raises InvalidRequest naming the `param` to change.
    """
    _check_integrations(session, project_id, body.integrations)
    sources.check_data_source(session, project_id, body.training_file, "training_file")
    if body.validation_file is not None:
        sources.check_data_source(session, project_id, body.validation_file, "validation_file")
    spec = resolve_spec(session, body)
    secrets_of_projects.require(session, project_id, spec.secrets.values(), "spec.secrets")
    job = Job(
        id=new_id("ftjob-"),
        project_id=project_id,
        status=Status.QUEUED,
        model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        seed=spec.seed,
        method={"type": spec.method, spec.method: {"hyperparameters": hyperparameters(spec)}},
        spec=spec.model_dump(mode="json"),
        job_metadata=body.metadata,
        integrations=[integration.model_dump(mode="json") for integration in body.integrations],
        priority=spec.resources.priority,
        accelerator=spec.resources.accelerator,
        result_files=[],
        answers=[],
    )
    session.add(job)
    session.flush()
    events.append(session, job.id, [NewEvent(f"Created fine-tuning job: {job.id}")])
    queue.send_after_commit(session, "place")
    session.refresh(job)
    return job


def cancel_job(project_id: str, job_id: str) -> None:
    """End a waiting job at once; let a running one save and stop, and wait a little so that the answer says `cancelled`.

    Raises NotFound, and Conflict for a job that ended otherwise. Again on a cancelled job: nothing changes.
    """
    with db.write() as session:
        status = _request_cancel(session, project_id, job_id)
    deadline = time.monotonic() + CANCEL_PATIENCE_S
    while status not in TERMINAL and time.monotonic() < deadline:
        time.sleep(CANCEL_POLL_S)
        with db.read() as connection:
            status = connection.execute(select(Job.status).where(Job.id == job_id)).scalar_one()


def _request_cancel(session: Session, project_id: str, job_id: str) -> str:
    job = get_job(session, project_id, job_id)
    if job.status == Status.QUEUED:
        told = NewEvent("Fine-tuning job cancelled")
        switch_status(session, job_id, Status.CANCELLED, told, Job.status == Status.QUEUED, finished_at=now())
        nodes.release(session, job_id, job.attempt)
        return Status.CANCELLED
    if job.status in TERMINAL - {Status.CANCELLED}:
        message = f"Job {job_id} has already {job.status}: only a queued or running job can be cancelled."
        raise Conflict(message, code="job_ended")
    if job.status == Status.RUNNING and job.cancel_requested_at is None:
        events.append(session, job_id, [NewEvent("Cancelling: the job saves and stops")], cancel_requested_at=now())
    return job.status


def get_job(session: Session, project_id: str, job_id: str) -> Job:
    """The job of this project, locked for the transaction; NotFound also for another project's."""
    job = session.scalar(select(Job).where(Job.id == job_id, Job.project_id == project_id).with_for_update())
    if job is None:
        raise NotFound(f"No such fine-tuning job: {job_id}", code="job_not_found", param="fine_tuning_job_id")
    return job


def resolve_spec(session: Session, body: JobCreate) -> TrainingSpec:
    """The request as a complete spec: `spec` as given, OpenAI's fields laid over it, automatic values chosen."""
    requested = body.spec.given
    given = body.supervised.model_dump(exclude_none=True)
    training = dict(requested.get("training", {}))
    base_rate = FULL_LEARNING_RATE if body.spec.adapter.type == "full" else LORA_LEARNING_RATE
    if (epochs := given.get("n_epochs")) is not None:
        _refuse_both(training, "num_train_epochs", "n_epochs")
        _refuse_both(training, "max_steps", "n_epochs")
        training["num_train_epochs"] = float(epochs)
    if (multiplier := given.get("learning_rate_multiplier")) is not None:
        if training.get("learning_rate", base_rate) != base_rate:
            _refuse_both(training, "learning_rate", "learning_rate_multiplier")
        training["learning_rate"] = base_rate * multiplier
    if (batch_size := given.get("batch_size")) is not None:
        _refuse_both(training, "gradient_accumulation_steps", "batch_size")
        training |= _split_batch(int(batch_size), body.spec.world_size, training.get("per_device_train_batch_size"))
    model = dict(requested.get("model", {})) | {"name_or_path": sources.resolve_base_model(body.model)}
    resources = dict(requested.get("resources", {})) | {"accelerator": check_resources(session, body.spec)}
    seed = body.seed if body.seed is not None else requested.get("seed", secrets.randbelow(2**31))
    # Templates that print the day must print the same one in every attempt.
    data = {"template_date": datetime.now(UTC).date().isoformat()} | dict(requested.get("data", {}))
    resolved = requested | {"training": training, "model": model, "resources": resources, "data": data, "seed": seed}
    return TrainingSpec.model_validate(resolved)


def _check_integrations(session: Session, project_id: str, integrations: list[IntegrationRequest]) -> None:
    settings = get_settings()
    for index, integration in enumerate(integrations):
        param = f"integrations[{index}]"
        if isinstance(integration, WandbIntegration):
            raise InvalidRequest("Weights & Biases is not offered yet: use `mlflow`.", code="not_offered", param=param)
        uri = integration.mlflow.tracking_uri or settings.mlflow_tracking_uri
        if not uri or uri not in (settings.mlflow_tracking_uri, *settings.mlflow_allowed_uris):
            message = f"The operator has allowed no MLflow server `{uri}`: leave `tracking_uri` out, or ask for it."
            raise InvalidRequest(message, code="tracking_uri_not_allowed", param=f"{param}.mlflow.tracking_uri")
        secrets_of_projects.require(session, project_id, integration.mlflow.secrets.values(), f"{param}.mlflow.secrets")


def hyperparameters(spec: TrainingSpec) -> dict[str, Any]:
    """OpenAI's three numbers, as they stand after resolution."""
    base_rate = FULL_LEARNING_RATE if spec.adapter.type == "full" else LORA_LEARNING_RATE
    epochs = spec.training.num_train_epochs
    return {
        "n_epochs": int(epochs) if epochs == int(epochs) else epochs,
        "batch_size": spec.global_batch_size,
        "learning_rate_multiplier": round(spec.training.learning_rate / base_rate, 10),
    }


def check_resources(session: Session, spec: TrainingSpec) -> str:
    """The accelerator the job will run on; refused where no registered node could ever hold one node's part of it."""
    largest = nodes.largest_slots(session)
    wanted = spec.resources.accelerator
    accelerator = ("gpu" if "gpu" in largest or not largest else "cpu") if wanted == "auto" else wanted
    if spec.parallelism.nnodes > 1:
        raise InvalidRequest(
            "Jobs over several nodes are not offered yet: set spec.parallelism.nnodes to 1.",
            code="resources_unsatisfiable",
            param="spec.parallelism.nnodes",
        )
    if largest and accelerator not in largest:
        raise InvalidRequest(
            f"No registered node offers '{accelerator}': set spec.resources.accelerator to '{next(iter(largest))}'.",
            code="resources_unsatisfiable",
            param="spec.resources.accelerator",
        )
    if accelerator == "gpu" and largest and spec.parallelism.nproc_per_node > largest["gpu"]:
        raise InvalidRequest(
            f"The largest node has {largest['gpu']} GPU(s): set spec.parallelism.nproc_per_node to that or less.",
            code="resources_unsatisfiable",
            param="spec.parallelism.nproc_per_node",
        )
    return accelerator


def _split_batch(batch_size: int, world_size: int, micro_batch: int | None) -> dict[str, int]:
    """Rows per step -> rows per forward pass and passes per step, the same on every rank."""
    per_rank, rest = divmod(batch_size, world_size)
    if rest or per_rank == 0 or (micro_batch is not None and per_rank % micro_batch):
        unit = world_size * (micro_batch or 1)
        raise InvalidRequest(
            f"batch_size {batch_size} does not divide over the ranks: set it to a multiple of {unit}.",
            code="invalid_hyperparameters",
            param="method.supervised.hyperparameters.batch_size",
        )
    chosen = micro_batch or next(n for n in range(LARGEST_AUTO_MICRO_BATCH, 0, -1) if per_rank % n == 0)
    return {"per_device_train_batch_size": chosen, "gradient_accumulation_steps": per_rank // chosen}


def _refuse_both(training: dict[str, Any], ours: str, openais: str) -> None:
    if ours in training:
        raise InvalidRequest(
            f"hyperparameters.{openais} and spec.training.{ours} say the same thing: set one of them.",
            code="invalid_hyperparameters",
            param=f"spec.training.{ours}",
        )
