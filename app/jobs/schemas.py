"""Jobs on the wire: OpenAI's fields, and ours beside them."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from sqlalchemy import Row

from app.config import get_settings
from app.jobs.figures import in_openais_words
from app.jobs.history import End
from app.jobs.spec import SecretName, TrainingSpec
from app.jobs.tables import Artifact, Checkpoint, Event, Job
from app.recipes import service as recipes
from app.schemas import RequestModel

MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_DEPTH = 64  # a tool's JSON schema in a prompt is the deepest thing anybody sends


def _auto_is_absent(value: Any) -> Any:
    return None if value == "auto" else value


def _valid_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_METADATA_PAIRS:
        raise ValueError(f"at most {MAX_METADATA_PAIRS} pairs")
    for key, text in value.items():
        if not 0 < len(key) <= MAX_METADATA_KEY:
            raise ValueError(f"keys have 1 to {MAX_METADATA_KEY} characters")
        if len(text) > MAX_METADATA_VALUE:
            raise ValueError(f"values have at most {MAX_METADATA_VALUE} characters")
    return value


def _valid_suffix(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
        raise ValueError("only letters, digits, `.`, `_` and `-`: it becomes part of the model's name")
    return value


AutoInt = Annotated[
    int | None, BeforeValidator(_auto_is_absent), WithJsonSchema({"anyOf": [{"type": "integer"}, {"const": "auto"}]})
]
AutoFloat = Annotated[
    float | None, BeforeValidator(_auto_is_absent), WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "auto"}]})
]
TrackerVariable = Literal[
    "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY"
]
Metadata = Annotated[dict[str, str], AfterValidator(_valid_metadata)]


class Hyperparameters(RequestModel):
    """OpenAI's three. Left out or "auto": what the spec says, else the service's default."""

    n_epochs: AutoInt = Field(default=None, ge=1, le=50, description="Passes over the data, 1 to 50.")
    batch_size: AutoInt = Field(default=None, ge=1, le=256, description="Rows per optimizer step over all ranks, 1 to 256.")
    learning_rate_multiplier: AutoFloat = Field(default=None, gt=0, le=1000, description="Factor on the default learning rate.")


class DpoHyperparameters(Hyperparameters):
    """OpenAI's three, and DPO's own."""

    beta: AutoFloat = Field(default=None, gt=0, le=2, description="How strongly the model is held to the base, to 2.")


class Supervised(RequestModel):
    """Settings of supervised fine-tuning."""

    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(RequestModel):
    """Settings of direct preference optimization."""

    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class MethodRequest(RequestModel):
    """How the model is trained. A type without its block has the defaults."""

    type: Literal["supervised", "dpo"] = Field(
        default="supervised", description="`supervised` or `dpo`; `spec.method` has more (`kto`, `orpo`, `cpt`)."
    )
    supervised: Supervised | None = None
    dpo: Dpo | None = None

    @property
    def blocks(self) -> list[str]:
        """Which methods the request has settings of."""
        return [name for name in ("supervised", "dpo") if getattr(self, name) is not None]

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The hyperparameters of the method's own block."""
        block: Supervised | Dpo | None = self.dpo if self.type == "dpo" else self.supervised
        return block.hyperparameters if block is not None else Hyperparameters()


class WandbRequest(RequestModel):
    """A Weights & Biases run. The API key is a named secret; it is never sent here."""

    project: str = Field(min_length=1, max_length=128)
    name: str | None = Field(default=None, min_length=1, max_length=128, description="Default: the job's id.")
    entity: str | None = Field(default=None, min_length=1, max_length=128, description="Team or user. Default: the key's own.")
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[], max_length=50)


class WandbIntegration(RequestModel):
    """Weights & Biases."""

    type: Literal["wandb"]
    wandb: WandbRequest


class TensorBoardIntegration(RequestModel):
    """TensorBoard: its event files are among the job's artifacts."""

    type: Literal["tensorboard"]


class MlflowRequest(RequestModel):
    """A run in MLflow with every figure of every step, the result, and where asked a registered model."""

    experiment: str = Field(min_length=1, max_length=256, description="Made where there is none of this name.")
    run_name: str | None = Field(default=None, min_length=1, max_length=256, description="Default: the job's id.")
    tags: Metadata = Field(default={}, description="Pairs of text.")
    tracking_uri: str | None = Field(
        default=None, max_length=512, description="A server that the operator allowed. Default: the operator's own."
    )
    register_as: str | None = Field(
        default=None, pattern=r"^[^./:\s]+\.[^./:\s]+\.[^./:\s]+$", max_length=256, description="`catalog.schema.model`."
    )
    secrets: dict[TrackerVariable, SecretName] = Field(
        default={}, max_length=4, description="Environment variable of the MLflow client -> name of a secret."
    )


class MlflowIntegration(RequestModel):
    """MLflow."""

    type: Literal["mlflow"]
    mlflow: MlflowRequest


IntegrationRequest = Annotated[MlflowIntegration | WandbIntegration | TensorBoardIntegration, Field(discriminator="type")]


class SpecRequest(TrainingSpec):
    """Any part of the training spec; what is left out gets the recipe's value, or its default."""

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _on_recipe(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        spec = handler(_on_its_recipe(value))
        spec._given = value
        return spec

    @property
    def given(self) -> dict[str, Any]:
        """Only what the request itself says."""
        return self._given

    @property
    def with_recipe(self) -> dict[str, Any]:
        """What the request or its recipe says, for merging with OpenAI's own fields."""
        return self.model_dump(exclude_unset=True)


class JobCreate(RequestModel):
    """A request for a job. An explicit null is the same as leaving the field out: the SDK sends both."""

    model: str = Field(
        min_length=1,
        max_length=512,
        description="Base model: a Hub id, or a path below an allowed root; or a tuned model to go on from.",
    )
    training_file: str = Field(
        min_length=1,
        max_length=1024,
        description="File id, `hf://datasets/OWNER/NAME?split=train`, or `file://` below a root an operator allowed.",
    )
    validation_file: str | None = Field(default=None, min_length=1, max_length=1024, description="The same, for evaluation.")
    method: MethodRequest | None = None
    hyperparameters: Hyperparameters = Field(
        default=Hyperparameters(),
        json_schema_extra={"deprecated": True},  # pydantic's own flag would warn us at every look at it
        description="Use `method.supervised.hyperparameters`.",
    )
    suffix: Annotated[str, AfterValidator(_valid_suffix)] | None = Field(
        default=None, min_length=1, max_length=64, description="Part of the new model's name."
    )
    seed: int | None = Field(default=None, ge=0, le=2_147_483_647, description="Default: one is drawn, and shown in the job.")
    metadata: Metadata | None = Field(default=None, description="Up to 16 pairs of text, for searching.")
    integrations: list[IntegrationRequest] = Field(default=[], max_length=5)
    spec: SpecRequest = Field(default_factory=SpecRequest, description="Everything OpenAI's fields cannot say.")

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        refuse_unstorable(value)
        return _without_nulls(value)

    @model_validator(mode="after")
    def _check_hyperparameters(self) -> Self:
        if self.method is None:
            return self
        old, new = self.hyperparameters, self.method.hyperparameters
        for name in Hyperparameters.model_fields:
            values = {getattr(old, name), getattr(new, name)} - {None}
            if len(values) > 1:
                text = f"differs from method.{self.method.type}.hyperparameters.{name}: give it only there"
                raise PydanticCustomError("ambiguous", text, {"param": f"hyperparameters.{name}"})
        return self

    @property
    def given_hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters, wherever they stand: old code sends them at the top level."""
        old = self.hyperparameters.model_dump(exclude_none=True)
        return old | (self.method.hyperparameters.model_dump(exclude_none=True) if self.method else {})


class JobError(BaseModel):
    """Why a job failed; `code` is stable."""

    code: str
    message: str
    param: str | None = None


class Progress(BaseModel):
    """How far a job is."""

    step: int | None
    total_steps: int | None
    tokens_per_second: float | None


class Queue(BaseModel):
    """Why a queued job is not running yet, as the scheduler saw it a moment ago."""

    position: int | None = Field(description="1 is served next, 0 is being started; null until the scheduler has looked.")
    reason: str
    blocking_resource: str | None = Field(
        description="`gpus`, `cpu_slots`, `nodes`, `reservation` (kept for a job ahead), `quota.running_jobs`, `quota.gpus`."
    )
    estimated_start: int | None = Field(description="If all that runs or is ahead takes as long as it may; null if unknown.")

    @classmethod
    def of(cls, job: Job | Row[Any]) -> Self:
        if getattr(job, "wait_reason", None) is None:  # a new job, or an entity as it was just created
            reason = "The scheduler has not looked at the job yet."
            return cls(position=None, reason=reason, blocking_resource=None, estimated_start=None)
        assert not isinstance(job, Job)
        return cls(
            position=job.wait_position,
            reason=job.wait_reason,
            blocking_resource=job.wait_blocking_resource,
            estimated_start=_seconds(job.wait_estimated_start),
        )


class JobOut(BaseModel):
    """OpenAI's job object, with ours beside it: `spec`, `progress`, `answers`, `queue`, `attempt`, `rerun_of`, `tracking`,
    `data_rows`."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobError | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: dict[str, Any]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: str
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    estimated_finish: int | None
    integrations: list[Any]
    metadata: dict[str, str] | None
    method: dict[str, Any]
    suffix: str | None
    spec: TrainingSpec
    progress: Progress
    answers: list[Any]
    queue: Queue | None
    attempt: int
    started_at: int | None
    rerun_of: str | None
    tracking: list[Any]
    data_rows: dict[str, Any]

    @classmethod
    def of(cls, job: Job | Row[Any]) -> Self:
        return cls(
            id=job.id,
            created_at=int(job.created_at),
            error=job.error and JobError.model_validate(job.error),
            fine_tuned_model=job.fine_tuned_model,
            finished_at=_seconds(job.finished_at),
            hyperparameters=job.method.get(job.method["type"], {}).get("hyperparameters", {}),
            model=job.model,
            organization_id=get_settings().organization_id,
            result_files=job.result_files,
            seed=job.seed,
            status=wire_status(job.status, job.cancel_requested_at, job.pause_requested_at),
            trained_tokens=job.trained_tokens,
            training_file=job.training_file,
            validation_file=job.validation_file,
            estimated_finish=_seconds(job.estimated_finish),
            integrations=job.integrations,
            metadata=job.job_metadata,
            method=job.method,
            suffix=job.suffix,
            spec=TrainingSpec.stored(job.spec),
            progress=Progress(step=job.step, total_steps=job.total_steps, tokens_per_second=job.tokens_per_second),
            answers=job.answers,
            queue=Queue.of(job) if job.status == "queued" else None,
            attempt=job.attempt,
            started_at=_seconds(job.started_at),
            rerun_of=job.rerun_of,
            tracking=job.tracking or [],
            data_rows=job.data_rows or {},
        )


class EventOut(BaseModel):
    """OpenAI's event object; `seq` counts from 1 within the job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: dict[str, Any] | None
    seq: int

    @classmethod
    def of(cls, event: Event | Row[Any]) -> Self:
        return cls(
            id=event.id,
            created_at=int(event.created_at),
            level=event.level,
            message=event.message,
            type=event.type,
            data=event.data,
            seq=event.seq,
        )


class CheckpointOut(BaseModel):
    """OpenAI's checkpoint object. Only complete, stored checkpoints are listed."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, checkpoint: Checkpoint | Row[Any]) -> Self:
        figures = in_openais_words(checkpoint.metrics)
        return cls(
            id=checkpoint.id,
            created_at=int(checkpoint.created_at),
            fine_tuning_job_id=checkpoint.job_id,
            fine_tuned_model_checkpoint=checkpoint.model_id,
            step_number=checkpoint.step,
            metrics={"step": checkpoint.step, **figures},
        )


class ArtifactOut(BaseModel):
    """One file of a job's result."""

    name: str
    object: Literal["fine_tuning.job.artifact"] = "fine_tuning.job.artifact"
    bytes: int
    sha256: str
    uri: str
    created_at: int

    @classmethod
    def of(cls, artifact: Artifact | Row[Any], uri: str) -> Self:
        return cls(
            name=artifact.name, bytes=artifact.bytes, sha256=artifact.sha256, uri=uri, created_at=int(artifact.created_at)
        )


class AttemptNode(BaseModel):
    """A node's part in an attempt."""

    node: str
    node_rank: int
    slots: int


class AttemptOut(BaseModel):
    """One try at running a job; `end` is null while it goes on."""

    object: Literal["fine_tuning.job.attempt"] = "fine_tuning.job.attempt"
    attempt: int
    nodes: list[AttemptNode]
    placed_at: int
    started_at: int | None
    ended_at: int | None
    first_step: int | None
    last_step: int | None
    end: End | None
    code: str | None
    message: str | None

    @classmethod
    def of(cls, attempt: dict[str, Any]) -> Self:
        times = {name: _seconds(attempt[name]) for name in ("placed_at", "started_at", "ended_at")}
        return cls.model_validate(attempt | times)


class MetricsOut(BaseModel):
    """A job's figures as columns for a chart: all have the length of `step`; null where a step lacks a figure."""

    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    total_points: int = Field(description="Logged steps in the range; more than the columns hold where points were left out.")
    columns: dict[str, list[float | None]]


def wire_status(status: str, cancel_requested_at: float | None, pause_requested_at: float | None) -> str:
    """A job that was asked to stop says so until it has."""
    if status != "running":
        return status
    if cancel_requested_at is not None:
        return "cancelling"
    return "pausing" if pause_requested_at is not None else status


def refuse_unstorable(value: Any, path: str = "", depth: int = 0) -> None:
    """What no database or file can hold must be named here: later it would only be a failed statement."""
    if depth > MAX_DEPTH:
        raise PydanticCustomError("unstorable", "is nested too deeply", {"param": path.partition(".")[0]})
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_unstorable(str(key), path, depth)
            refuse_unstorable(inner, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            refuse_unstorable(inner, f"{path}[{index}]", depth + 1)
    elif isinstance(value, str) and ("\x00" in value or not _is_utf8(value)):
        raise PydanticCustomError("unstorable", "holds a NUL character or half of a surrogate pair", {"param": path})
    elif isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("unstorable", "must be a finite number", {"param": path})


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _on_its_recipe(value: dict[str, Any]) -> dict[str, Any]:
    name = value.get("recipe")
    if not isinstance(name, str):
        return value
    recipe = recipes.find(name)
    if recipe is None:
        text = f"there is no recipe '{name[:64]}'. Choose one of: {recipes.choices()}"
        raise PydanticCustomError("unknown_recipe", "{text}", {"text": text, "param": "spec.recipe"})
    return recipes.laid_over(recipe, value)


def _without_nulls(value: Any) -> Any:
    """The same without fields that are null. Lists stay as they are: a chat message may say null."""
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(value)
