"""Jobs as users see them: create, cancel, pause, resume. Here the API's words become a TrainingSpec."""

import secrets
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from app import db
from app.config import get_settings
from app.db import now
from app.errors import Conflict, InvalidRequest, NotFound
from app.files import rows
from app.files import service as files
from app.ids import new_id
from app.jobs import continuation, events, history, sources, validating, waiting
from app.jobs.events import NewEvent
from app.jobs.history import End
from app.jobs.schemas import IntegrationRequest, JobCreate, MlflowIntegration, WandbIntegration
from app.jobs.spec import PREFERENCE_METHODS, TrainingSpec, default_learning_rate
from app.jobs.status import TERMINAL, WAITING, Status, switch_status
from app.jobs.tables import Job
from app.keys import service as keys
from app.nodes import service as nodes
from app.nodes.demand import GB, Demand
from app.nodes.service import Offer
from app.recipes import service as recipes
from app.secrets import service as secrets_of_projects

# The largest micro-batch chosen for a user who only says how many rows an optimizer step takes.
LARGEST_AUTO_MICRO_BATCH = 8
# The variable that W&B's client reads; also the secret that is meant where a job names none.
WANDB_API_KEY = "WANDB_API_KEY"
# OpenAI answers `cancelled` and `paused`. A running job needs a heartbeat and the rest of its step for that; 5 s do for most.
STOP_PATIENCE_S = 5.0
STOP_POLL_S = 0.1


def create_job(session: Session, project_id: str, body: JobCreate) -> Job:
    """Check everything that can be checked now, write the job and its first event, and wake the scheduler.

    Raises InvalidRequest naming the `param` to change.
    """
    body = continuation.spelled_out(session, project_id, body)
    _check_integrations(session, project_id, body.integrations)
    _check_data(session, project_id, body, skips_bad_rows=body.spec.data.on_bad_rows == "skip")
    spec = resolve_spec(session, body)
    check_quotas(session, project_id, spec)
    secrets_of_projects.require(session, project_id, spec.secrets.values(), "spec.secrets")
    job = Job(
        id=new_id("ftjob-"),
        project_id=project_id,
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
        **waiting.requirements(spec),
        result_files=[],
        answers=[],
    )
    job.status = validating.first_status(session, job)
    session.add(job)
    session.flush()
    events.append(session, job.id, [NewEvent(f"Created fine-tuning job: {job.id}")])
    session.refresh(job)
    return job


def spec_of(session: Session, project_id: str, body: JobCreate) -> TrainingSpec:
    """The spec of a job that nobody creates, and whose files may have errors. Raises InvalidRequest as for a real one."""
    body = continuation.spelled_out(session, project_id, body)
    _check_data(session, project_id, body, skips_bad_rows=True)
    spec = resolve_spec(session, body)
    secrets_of_projects.require(session, project_id, spec.secrets.values(), "spec.secrets")
    return spec


def _check_data(session: Session, project_id: str, body: JobCreate, *, skips_bad_rows: bool) -> None:
    sources.check_data_source(session, project_id, body.training_file, "training_file", skips_bad_rows=skips_bad_rows)
    if body.validation_file is not None:
        sources.check_data_source(session, project_id, body.validation_file, "validation_file", skips_bad_rows=skips_bad_rows)


def cancel_job(project_id: str, job_id: str) -> None:
    """End a waiting job at once; let a running one save and stop, and wait a little so that the answer says `cancelled`.

    Raises NotFound, and Conflict for a job that ended otherwise. Again on a cancelled job: nothing changes.
    """
    with db.write() as session:
        job = get_job(session, project_id, job_id)
        _refuse_ended(job, "cancelled", allowed=Status.CANCELLED)
        if job.status in WAITING:
            told = NewEvent("Fine-tuning job cancelled")
            switch_status(session, job_id, Status.CANCELLED, told, Job.status == job.status, finished_at=now())
            _take_back(session, job, End.CANCELLED, told)
        elif job.status == Status.RUNNING and job.cancel_requested_at is None:
            events.append(session, job_id, [NewEvent("Cancelling: the job saves and stops")], cancel_requested_at=now())
    _wait_while_running(job_id)


def pause_job(project_id: str, job_id: str) -> None:
    """Hold a waiting job back; let a running one save and stop. It keeps no slots until it is resumed.

    Raises NotFound, and Conflict for a job that has ended. Again on a paused job: nothing changes.
    """
    with db.write() as session:
        job = get_job(session, project_id, job_id)
        _refuse_ended(job, "paused")
        if job.status in (Status.VALIDATING, Status.QUEUED):
            told = NewEvent("Fine-tuning job paused")
            switch_status(session, job_id, Status.PAUSED, told, Job.status == job.status)
            _take_back(session, job, End.PAUSED, told)
        elif job.status == Status.RUNNING and job.pause_requested_at is None:
            events.append(session, job_id, [NewEvent("Pausing: the job saves and stops")], pause_requested_at=now())
    _wait_while_running(job_id)


def resume_job(project_id: str, job_id: str) -> None:
    """Queue a paused or failed job again; it goes on from its last checkpoint. On a job that waits or runs: nothing changes.

    Raises NotFound, and Conflict for a job that succeeded, was cancelled or is still pausing, or whose data is gone.
    """
    with db.write() as session:
        job = get_job(session, project_id, job_id)
        _refuse_ended(job, "resumed", allowed=Status.FAILED)
        if job.status == Status.RUNNING and job.pause_requested_at is not None:
            raise Conflict(f"Job {job_id} is still pausing: resume it once it is paused.", code="job_pausing")
        if job.status == Status.PAUSED:
            again = validating.next_status(session, job)
            switch_status(session, job_id, again, NewEvent("Fine-tuning job resumed"), Job.status == Status.PAUSED)
        elif job.status == Status.FAILED:
            _begin_anew(session, job)


def _begin_anew(session: Session, job: Job) -> None:
    """What a failure used up, tries and time, counts from nothing; the rows and the checkpoints are those there are."""
    require_sources(session, job, "resumed")
    check_quotas(session, job.project_id, TrainingSpec.stored(job.spec))
    told = NewEvent("Fine-tuning job resumed after its failure", data={"error": job.error})
    forgotten = {"error": None, "finished_at": None, "cancel_requested_at": None, "pause_requested_at": None}
    changes = {"num_starts": 0, "run_seconds": 0.0, **forgotten}
    switch_status(session, job.id, validating.next_status(session, job), told, Job.status == Status.FAILED, **changes)


def require_sources(session: Session, job: Job | Row[Any], what: str) -> None:
    """Conflict where a job's rows are no longer there, InvalidRequest where its base model is not."""
    sources.resolve_base_model(job.model)
    initial = TrainingSpec.stored(job.spec).training.from_
    if initial is not None and not continuation.has_weights(session, job.project_id, initial):
        message = f"Job {job.id} cannot be {what}, the weights it goes on from are gone: create a new job from others."
        raise Conflict(message, code="initial_weights_gone", param=continuation.FROM)
    skips = TrainingSpec.stored(job.spec).data.on_bad_rows == "skip"
    for param in ("training_file", "validation_file"):
        if (source := getattr(job, param)) is None:
            continue
        try:
            sources.check_data_source(session, job.project_id, source, param, skips_bad_rows=skips)
        except InvalidRequest as error:
            message = f"Job {job.id} cannot be {what}, its {param} is gone: create a new job with another one."
            raise Conflict(message, code="training_data_gone", param=param) from error


def _take_back(session: Session, job: Job, how: End, told: NewEvent) -> None:
    """A job that leaves the queue may have been placed: no supervisor finds it any more."""
    history.end(session, job.id, job.attempt, how, told.message)
    nodes.release(session, job.id, job.attempt)


def _refuse_ended(job: Job, what: str, *, allowed: Status | None = None) -> None:
    if job.status in TERMINAL and job.status != allowed:
        raise Conflict(f"Job {job.id} has already {job.status}: it cannot be {what} any more.", code="job_ended")


def _wait_while_running(job_id: str) -> None:
    """Until the supervisor has stopped the job, or patience ends."""
    deadline = time.monotonic() + STOP_PATIENCE_S
    while _status(job_id) == Status.RUNNING and time.monotonic() < deadline:
        time.sleep(STOP_POLL_S)


def _status(job_id: str) -> str:
    with db.read() as connection:
        status: str = connection.execute(select(Job.status).where(Job.id == job_id)).scalar_one()
    return status


def get_job(session: Session, project_id: str, job_id: str) -> Job:
    """The job of this project, locked for the transaction; NotFound also for another project's."""
    job = session.scalar(select(Job).where(Job.id == job_id, Job.project_id == project_id).with_for_update())
    if job is None:
        raise NotFound(f"No such fine-tuning job: {job_id}", code="job_not_found", param="fine_tuning_job_id")
    return job


def resolve_spec(session: Session, body: JobCreate) -> TrainingSpec:
    """The request as a complete spec: `spec` as given, OpenAI's fields laid over it, automatic values chosen."""
    requested, base = body.spec.with_recipe, sources.resolve_base_model(body.model)
    _refuse_contradictions(body, base)
    resources = dict(requested.get("resources", {})) | {"accelerator": check_resources(session, body.spec)}
    # Templates that print the day must print the same one in every attempt.
    data = {"template_date": datetime.now(UTC).date().isoformat()} | dict(requested.get("data", {}))
    resolved = requested | {
        "method": _choose_method(body),
        "training": _training(body),
        "preference": _preference(body),
        "model": dict(requested.get("model", {})) | {"name_or_path": base},
        "resources": resources,
        "data": data,
        "evaluation": dict(requested.get("evaluation", {})) | {"prompts": _prompts(body.spec)},
        "secrets": _secrets(body),
        "seed": body.seed if body.seed is not None else requested.get("seed", secrets.randbelow(2**31)),
    }
    spec = _validated(resolved)
    _refuse_what_cannot_run(spec, body)
    return spec


def _refuse_contradictions(body: JobCreate, base: str) -> None:
    """What the request says of the base model and the seed, where it cannot all be true."""
    said = body.spec.given
    model, data = said.get("model") or {}, said.get("data") or {}
    if model.get("name_or_path") not in (None, "", body.model, base):
        message = f"The base model is the job's `model`, {base}: leave spec.model.name_or_path out."
        raise InvalidRequest(message, code="base_model_mismatch", param="spec.model.name_or_path")
    if model.get("revision") is not None and sources.is_folder(base):
        message = "A folder has no revisions, only a Hub model does: leave spec.model.revision out."
        raise InvalidRequest(message, code="revision_of_a_folder", param="spec.model.revision")
    if body.seed is not None and said.get("seed") not in (None, body.seed):
        message = f"`seed` is {body.seed} and spec.seed is {said['seed']}: give only one of them."
        raise InvalidRequest(message, code="invalid_hyperparameters", param="spec.seed")
    context = sources.context_length(base)
    if data.get("max_length") is not None and context is not None and body.spec.data.max_length > context:
        message = f"The model reads at most {context} tokens at once: set spec.data.max_length to that or less."
        raise InvalidRequest(message, code="context_length_exceeded", param="spec.data.max_length")


def _check_integrations(session: Session, project_id: str, integrations: list[IntegrationRequest]) -> None:
    settings = get_settings()
    for index, integration in enumerate(integrations):
        param = f"integrations[{index}]"
        if not isinstance(integration, MlflowIntegration):
            if any(other.type == integration.type for other in integrations[:index]):
                message = f"One `{integration.type}` is enough: a run has one reporter of each kind."
                raise InvalidRequest(message, code="duplicate_integration", param=param)
            continue
        uri = integration.mlflow.tracking_uri or settings.mlflow_tracking_uri
        if not uri or uri not in (settings.mlflow_tracking_uri, *settings.mlflow_allowed_uris):
            message = f"The operator has allowed no MLflow server `{uri}`: leave `tracking_uri` out, or ask for it."
            raise InvalidRequest(message, code="tracking_uri_not_allowed", param=f"{param}.mlflow.tracking_uri")
        secrets_of_projects.require(session, project_id, integration.mlflow.secrets.values(), f"{param}.mlflow.secrets")


def hyperparameters(spec: TrainingSpec) -> dict[str, Any]:
    """OpenAI's numbers, as they stand after resolution."""
    epochs = spec.training.num_train_epochs
    shown = {
        "n_epochs": int(epochs) if epochs == int(epochs) else epochs,
        "batch_size": spec.global_batch_size,
        "learning_rate_multiplier": round(spec.training.learning_rate / _base_rate(spec.method, spec), 10),
    }
    return shown | ({"beta": spec.preference.beta} if spec.method in PREFERENCE_METHODS else {})


def _choose_method(body: JobCreate) -> str:
    """OpenAI's `method`, or `spec.method` for what OpenAI does not have."""
    asked, method = body.spec.given.get("method"), body.method
    if method is None:
        return body.spec.method
    if wrong := [name for name in method.blocks if name != method.type]:
        raise InvalidRequest(
            f"method.type is '{method.type}': leave the block `{wrong[0]}` out.",
            code="invalid_hyperparameters",
            param=f"method.{wrong[0]}",
        )
    if asked is not None and asked != method.type:
        raise InvalidRequest(
            f"spec.method is '{asked}' and method.type is '{method.type}': give only one of them.",
            code="invalid_hyperparameters",
            param="spec.method",
        )
    return method.type


def _training(body: JobCreate) -> dict[str, Any]:
    """The section `training` with OpenAI's hyperparameters in it."""
    given, chosen = body.given_hyperparameters, dict(body.spec.with_recipe.get("training", {}))
    said: dict[str, Any] = body.spec.given.get("training") or {}
    method = _choose_method(body)
    base_rate = _base_rate(method, body.spec)
    if "learning_rate" not in said:
        chosen["learning_rate"] = base_rate
    if (epochs := given.get("n_epochs")) is not None:
        _refuse_both(said, "num_train_epochs", "n_epochs")
        _refuse_both(said, "max_steps", "n_epochs")
        chosen["num_train_epochs"] = float(epochs)
    if (multiplier := given.get("learning_rate_multiplier")) is not None:
        _refuse_both(said, "learning_rate", "learning_rate_multiplier")
        chosen["learning_rate"] = base_rate * multiplier
    if (batch_size := given.get("batch_size")) is not None:
        _refuse_both(said, "gradient_accumulation_steps", "batch_size")
        param = f"method.{method}.hyperparameters.batch_size"
        chosen |= _split_batch(int(batch_size), body.spec.world_size, said.get("per_device_train_batch_size"), param)
    return chosen


def _base_rate(method: str, spec: TrainingSpec) -> float:
    """What a learning rate multiplier multiplies: the recipe's learning rate, else the default of method and adapter."""
    recipe = recipes.find(spec.recipe or "")
    rate = recipe.spec.get("training", {}).get("learning_rate") if recipe else None
    return float(rate) if rate is not None else default_learning_rate(method, spec.adapter.type)


def _preference(body: JobCreate) -> dict[str, Any]:
    """The section `preference` with OpenAI's beta in it."""
    section, beta = dict(body.spec.with_recipe.get("preference", {})), body.given_hyperparameters.get("beta")
    if beta is None:
        return section
    if "beta" in (body.spec.given.get("preference") or {}):
        raise InvalidRequest(
            "method.dpo.hyperparameters.beta and spec.preference.beta say the same thing: set one of them.",
            code="invalid_hyperparameters",
            param="spec.preference.beta",
        )
    return section | {"beta": beta}


def _secrets(body: JobCreate) -> dict[str, str]:
    """The section `secrets`: OpenAI's users name no key for W&B, so there the project's secret of that name is meant."""
    uses_wandb = any(isinstance(integration, WandbIntegration) for integration in body.integrations)
    return ({WANDB_API_KEY: WANDB_API_KEY} if uses_wandb else {}) | dict(body.spec.with_recipe.get("secrets", {}))


def _validated(resolved: dict[str, Any]) -> TrainingSpec:
    """What does not go together shows only when OpenAI's fields, the recipe and the spec are one."""
    try:
        return TrainingSpec.model_validate(resolved)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(["spec", *(str(part) for part in fault["loc"])])
        message = fault["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"`{where}`: {message}.", code="invalid_hyperparameters", param=where) from error


def _refuse_what_cannot_run(spec: TrainingSpec, body: JobCreate) -> None:
    """Settings that are fine by themselves, and not on this node or with this data."""
    if spec.adapter.type == "qlora" and spec.resources.accelerator == "cpu":
        raise InvalidRequest(
            "QLoRA needs a GPU (bitsandbytes): set spec.adapter.type to 'lora'.", code="gpu_required", param="spec.adapter.type"
        )
    if spec.export.hub is not None and "HF_TOKEN" not in spec.secrets:
        raise InvalidRequest(
            "A push to the Hub needs a token: keep one with POST /v1/secrets, and name it in spec.secrets.HF_TOKEN.",
            code="secret_required",
            param="spec.secrets.HF_TOKEN",
        )
    compared = spec.evaluation.keep_best or spec.evaluation.early_stopping is not None
    if compared and body.validation_file is None:
        name = "keep_best" if spec.evaluation.keep_best else "early_stopping"
        raise InvalidRequest(
            f"spec.evaluation.{name} compares losses on a validation file: give `validation_file`.", param="validation_file"
        )


def _prompts(spec: TrainingSpec) -> list[list[rows.Message]]:
    """The prompts as every chat template can print them: a bad one would be met only after hours of training."""
    try:
        given = enumerate(spec.evaluation.prompts)
        return [rows.prompt(messages, f"spec.evaluation.prompts[{index}]") for index, messages in given]
    except rows.Unusable as error:
        raise InvalidRequest(error.message, code=error.code, param=error.path) from error


def check_resources(session: Session, spec: TrainingSpec) -> str:
    """The accelerator the job will run on; refused where no set of registered nodes could ever hold it."""
    offers = nodes.offers(session)
    offered, wanted = {offer.accelerator for offer in offers}, spec.resources.accelerator
    accelerator = ("gpu" if "gpu" in offered or not offered else "cpu") if wanted == "auto" else wanted
    if offers and not spec.resources.wait_for_nodes:
        resources = spec.resources.model_copy(update={"accelerator": accelerator})
        _refuse_impossible(Demand.of(spec.model_copy(update={"resources": resources})), offers)
    return accelerator


def check_quotas(session: Session, project_id: str, spec: TrainingSpec) -> None:
    """Refuse a job whose project has nothing left, or could never start it; others wait for their turn."""
    if spec.resources.accelerator == "gpu":
        keys.check_gpus(session, project_id, spec.world_size)
        keys.check_gpu_hours(session, project_id, partial(nodes.gpu_hours_this_month, session, project_id))
    keys.check_storage(session, project_id, partial(files.stored_bytes, session, project_id), 1)


def _refuse_impossible(demand: Demand, offers: list[Offer]) -> None:
    """Say what is missing on all nodes together, and the most that could be had."""
    left = [offer for offer in offers if offer.accelerator == demand.accelerator]
    if not left:
        message = (
            f"No registered node offers '{demand.accelerator}': set spec.resources.accelerator to '{offers[0].accelerator}'"
        )
        raise _unsatisfiable(message, "spec.resources.accelerator")
    found = sorted({f"{name}={value}" for offer in left for name, value in offer.labels.items()})
    if not (left := [offer for offer in left if demand.has_labels(offer.labels)]):
        message = f"No registered node carries these labels, only {', '.join(found) or 'none'}: change spec.resources.labels"
        raise _unsatisfiable(message, "spec.resources.labels")
    models = sorted({gpu["name"] for offer in left for gpu in offer.gpus})
    if not (left := [offer for offer in left if demand.has_model(offer.gpus)]):
        message = f"No registered node has GPUs of this model, only {', '.join(models)}: change spec.resources.gpu_model"
        raise _unsatisfiable(message, "spec.resources.gpu_model")
    memory_gb = max((gpu["memory_bytes"] / GB for offer in left for gpu in offer.gpus), default=0.0)
    if not (left := [offer for offer in left if demand.has_memory(offer.gpus)]):
        message = f"The largest GPU has {memory_gb:.1f} GB: set spec.resources.gpu_memory_gb to that or less"
        raise _unsatisfiable(message, "spec.resources.gpu_memory_gb")
    most = max(offer.slots for offer in left)
    if not (left := [offer for offer in left if offer.slots >= demand.slots]):
        message = f"The largest node has {most} {demand.kind}(s): set spec.parallelism.nproc_per_node to that or less"
        raise _unsatisfiable(message, "spec.parallelism.nproc_per_node")
    if len(left) < demand.nodes:
        message = f"Only {len(left)} registered node(s) have {demand.words}: set spec.parallelism.nnodes to that or less"
        raise _unsatisfiable(message, "spec.parallelism.nnodes")


def _unsatisfiable(message: str, param: str) -> InvalidRequest:
    again = ", or spec.resources.wait_for_nodes to true if such nodes will come."
    return InvalidRequest(message + again, code="resources_unsatisfiable", param=param)


def _split_batch(batch_size: int, world_size: int, micro_batch: int | None, param: str) -> dict[str, int]:
    """Rows per step -> rows per forward pass and passes per step, the same on every rank."""
    per_rank, rest = divmod(batch_size, world_size)
    if rest or per_rank == 0 or (micro_batch is not None and per_rank % micro_batch):
        unit = world_size * (micro_batch or 1)
        raise InvalidRequest(
            f"batch_size {batch_size} does not divide over the ranks: set it to a multiple of {unit}.",
            code="invalid_hyperparameters",
            param=param,
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
