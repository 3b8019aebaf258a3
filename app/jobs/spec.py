"""The frozen training spec: everything a run depends on, checked once when the job is created.

A request gives any part of it as `spec`; the job object shows it with every default filled in, and the trainer reads that
resolved form from its directory. Names are Hugging Face's where Hugging Face has one. Imports nothing of ours, so the
trainer can use it without the service.
"""

from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Method = Literal["supervised", "dpo", "kto", "orpo", "cpt"]
PREFERENCE_METHODS = {"dpo", "kto", "orpo"}
# Usual starting points. Preference methods move weights that already answer well, and need far less.
LORA_LEARNING_RATE, FULL_LEARNING_RATE = 2e-4, 2e-5
LORA_PREFERENCE_RATE, FULL_PREFERENCE_RATE = 1e-5, 1e-6


def _real_day(value: str) -> str:
    date.fromisoformat(value)
    return value


ChatMessage = dict[str, Any]
Rank = Annotated[int, Field(ge=1, le=1024)]


def _credential(name: str) -> str:
    if name.startswith("TUNEYARD_"):
        raise ValueError("TUNEYARD_ variables are the service's own")
    return name


# Only names that stand for a credential: others change how a process runs.
EnvironmentName = Annotated[
    str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,55}_(TOKEN|KEY|PASSWORD|SECRET)$"), AfterValidator(_credential)
]
ShortText = Annotated[str, Field(min_length=1, max_length=64)]
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class Section(BaseModel):
    """A part of the spec: unknown fields are errors, values never change after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class ModelSection(Section):
    """Which base weights, and how they are loaded."""

    name_or_path: str = Field(
        default="", max_length=512, description="Hub id or path of the base model. Taken from the job's `model`; leave it out."
    )
    revision: str | None = Field(
        default=None, max_length=128, description="Branch, tag or commit of a Hub model. Default: the Hub's main branch."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="Type of the base weights in memory. bfloat16 halves the memory of float32; LoRA weights stay float32.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        default="auto",
        description="Attention implementation. `auto` takes the fastest the model supports on the hardware. "
        "gpt-oss's `eager` attends packed rows one by one, and a job's events call that `by_row`.",
    )


class AdapterSection(Section):
    """What is trained: a low-rank adapter (Hu et al. 2021, arXiv:2106.09685) or all weights."""

    type: Literal["lora", "qlora", "full"] = Field(
        default="lora",
        description="`lora` trains a small adapter in a fraction of the memory; `qlora` does so on a base in 4 bits "
        "(bitsandbytes, GPU only); `full` trains every weight.",
    )
    r: int = Field(default=16, ge=1, le=1024, description="Rank of the adapter.")
    alpha: int = Field(default=32, ge=1, le=4096, description="Scale: the adapter's output is multiplied by alpha / r.")
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Dropout on the adapter's input. Must be 0 when `target_parameters` are set."
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Linear modules to adapt: `all-linear` (every one but the head) or a list of module name endings.",
    )
    target_parameters: list[str] = Field(
        default=[],
        max_length=64,
        description="Parameters to adapt that are no modules, such as MoE experts: `mlp.experts.gate_up_proj`.",
    )
    rank_pattern: dict[str, Rank] = Field(
        default={}, description="A rank of its own for some modules or parameters: name ending -> rank."
    )
    low_rank_experts: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Adapted experts: compute with the two factors instead of a second copy of the weights; the numbers are "
        "the same. `auto`: on CPU, where it is proven; on GPUs only when asked.",
    )

    @property
    def is_full(self) -> bool:
        """Every weight is trained, and there is no adapter."""
        return self.type == "full"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_parameters and self.type == "qlora":
            raise ValueError("parameters in 4 bits cannot be adapted: set adapter.type to lora, or leave target_parameters out")
        if self.target_parameters and self.dropout > 0:
            raise ValueError("dropout must be 0 when target_parameters are adapted: set adapter.dropout to 0")
        if not self.target_modules and not self.target_parameters:
            raise ValueError("nothing to adapt: set adapter.target_modules or adapter.target_parameters")
        return self


class DataSection(Section):
    """How rows become tokens."""

    max_length: int = Field(
        default=2048,
        ge=8,
        le=1_048_576,
        description="Longest row in tokens. No longer than the base model can read, whatever the default or the recipe.",
    )
    on_long_rows: Literal["refuse", "skip", "truncate", "split"] = Field(
        default="truncate",
        description="A row over max_length: refuse the data set, skip the row (counted), cut its end (counted), or split plain "
        "text into several rows (the default of `cpt`). A row whose cut leaves nothing to learn is always refused.",
    )
    on_bad_rows: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="A row that cannot be learned from: refuse the data set, or leave the row out (counted on the job and in "
        "its events). A data set of which nothing is left is always refused.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Several rows in one sequence, without attention between them. `auto`: where that is exact for the model.",
    )
    loss_on: Literal["assistant", "all"] = Field(
        default="assistant",
        description="Which tokens carry loss: the assistant's (thinking and end token included), or all of them.",
    )
    thinking: Literal["auto", "inline", "drop"] = Field(
        default="auto",
        description="The `thinking` of assistant messages. `auto`: the template's own field where it has one, else `inline`: "
        "`<think>...</think>` before the answer. `drop`: left out (counted).",
    )
    chat_template: str | None = Field(
        default=None, max_length=131_072, description="Jinja chat template to train with. Default: the base model's."
    )
    template_date: Annotated[str, AfterValidator(_real_day)] | None = Field(
        default=None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="The day that chat templates print (gpt-oss does), so that a resumed or repeated run sees the same rows. "
        "Default: the day the job is created.",
    )


class TrainingSection(Section):
    """The optimization."""

    from_: str | None = Field(
        default=None,
        alias="from",
        max_length=640,
        description="Go on from another job's weights: a tuned model, a checkpoint of one, a checkpoint's id, or a job's (its "
        "result, else its newest checkpoint). Optimizer, schedule and steps begin anew. The adapter's shape is that job's.",
    )
    learning_rate: float = Field(
        default=LORA_LEARNING_RATE,
        gt=0.0,
        le=1.0,
        description="Peak learning rate. Default 2e-4 for LoRA, 2e-5 for full weights; with `dpo`, `kto` and `orpo` 1e-5 and "
        "1e-6.",
    )
    lr_scheduler_type: Literal["linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup"] = Field(
        default="cosine", description="How the learning rate falls after the warm-up."
    )
    min_lr_rate: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="With `cosine_with_min_lr`: the lowest learning rate as a share of the peak (default 0.1).",
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0.0, le=1.0, description="Share of the steps in which the learning rate rises."
    )
    weight_decay: float = Field(default=0.0, ge=0.0, le=1.0, description="AdamW weight decay.")
    per_device_train_batch_size: int = Field(default=4, ge=1, le=1024, description="Rows per rank and forward pass.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=1024, description="Forward passes per optimizer step.")
    num_train_epochs: float = Field(
        default=3.0, gt=0.0, le=1000.0, description="Passes over the data, unless max_steps is set."
    )
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000, description="Optimizer steps; overrides num_train_epochs.")
    max_grad_norm: float = Field(
        default=1.0, gt=0.0, le=1000.0, description="Gradient norm above which gradients are scaled down."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, about 1.35 x the time."
    )
    router_aux_loss_coef: float = Field(
        default=0.0, ge=0.0, le=10.0, description="Weight of a MoE router's balancing loss. 0: only the language-model loss."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr_rate is not None and self.lr_scheduler_type != "cosine_with_min_lr":
            raise ValueError("min_lr_rate only applies to cosine_with_min_lr: set training.lr_scheduler_type to that")
        return self


class PreferenceSection(Section):
    """Settings of `dpo`, `kto` and `orpo`."""

    beta: float = Field(
        default=0.1,
        gt=0.0,
        le=2.0,
        description="`dpo`, `kto`: how strongly the model is held to the reference, the model before training. "
        "`orpo`: weight of the odds ratio.",
    )
    desirable_weight: float = Field(default=1.0, gt=0.0, le=100.0, description="`kto`: weight of rows with label true.")
    undesirable_weight: float = Field(
        default=1.0,
        gt=0.0,
        le=100.0,
        description="`kto`: weight of rows with label false. With fewer of one kind, raise its weight until both "
        "sums are alike.",
    )


class ParallelismSection(Section):
    """How the run is spread over processes."""

    strategy: Literal["ddp", "fsdp2"] = Field(
        default="ddp", description="`ddp`: a whole model per rank. `fsdp2`: parameters sharded over the ranks (fully_shard)."
    )
    nnodes: int = Field(default=1, ge=1, le=512, description="Nodes.")
    nproc_per_node: int = Field(default=1, ge=1, le=64, description="Ranks per node; on GPU nodes one GPU each.")


class EarlyStopping(Section):
    """Stop a run that no longer gets better on the validation file."""

    patience: int = Field(default=3, ge=1, le=1000, description="Evaluations in a row without a new best before the run stops.")
    min_delta: float = Field(default=0.0, ge=0.0, le=1000.0, description="A new best is lower than the last by more than this.")


class EvaluationSection(Section):
    """What is measured beside the training loss."""

    eval_steps: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Steps between evaluations on the validation file. Default: once per epoch.",
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="Stop when `eval_loss` stops falling: `{}` for the defaults. Needs a validation file."
    )
    keep_best: bool = Field(
        default=False,
        description="Keep the checkpoint of the lowest `eval_loss`, and export it instead of the last. Needs a validation "
        "file.",
    )
    per_device_eval_batch_size: int = Field(default=4, ge=1, le=1024, description="Rows per rank and evaluation pass.")
    prompts: list[list[ChatMessage]] = Field(
        default=[], max_length=32, description="Chats to answer after training, by the base and by the tuned model."
    )
    max_new_tokens: int = Field(default=128, ge=1, le=4096, description="Longest answer to a prompt, in tokens.")


class CheckpointsSection(Section):
    """Resumable state during the run."""

    save_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Steps between checkpoints. Default: once per epoch."
    )
    keep: int = Field(default=2, ge=1, le=1000, description="Newest checkpoints kept; older ones are deleted.")


class HubSection(Section):
    """A repository on the Hugging Face Hub that the result is pushed to."""

    repo_id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=96,
        description="`OWNER/NAME`; made where there is none.",
    )
    private: bool = Field(
        default=True, description="A new repository is private, and one that is public is left alone. `false`: public."
    )
    branch: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        max_length=128,
        description="Branch to commit to; made where there is none. Default: the repository's main branch.",
    )
    what: Literal["auto", "adapter", "merged"] = Field(
        default="auto",
        description="`adapter`, or the `merged` weights (with `export.merged`). `auto`: the adapter; with full weights those.",
    )


class ExportSection(Section):
    """What is handed over at the end."""

    merged: bool = Field(default=False, description="LoRA: also export the base with the adapter merged in.")
    max_shard_size_gb: float = Field(
        default=5.0, gt=0.0, le=100.0, description="Largest safetensors file of full weights, in GB."
    )
    hub: HubSection | None = Field(
        default=None,
        description="Push the proven result to the Hugging Face Hub. Needs `secrets.HF_TOKEN`, a token that may write there.",
    )


class ResourcesSection(Section):
    """What the job needs of the nodes, and when it must give it back."""

    accelerator: Literal["auto", "gpu", "cpu"] = Field(
        default="auto",
        description="`gpu`: one GPU per rank. `cpu`: one CPU slot of a node without GPUs per node. "
        "`auto`: `gpu` where any registered node has GPUs or none has registered yet, else `cpu`; a job shows which.",
    )
    time_limit_s: int = Field(
        default=7 * 24 * 3600, ge=1, le=90 * 24 * 3600, description="Seconds the job may run, all attempts together."
    )
    step_timeout_s: int = Field(
        default=3600,
        ge=5,
        le=24 * 3600,
        description="Seconds without a step, an evaluated batch or a saved checkpoint after which the run counts as "
        "stalled: its stacks go into the log, and it goes on from its last checkpoint. Reading data, loading "
        "and exporting do not count.",
    )
    collective_timeout_s: int = Field(
        default=1800,
        ge=5,
        le=24 * 3600,
        description="Seconds that a rank waits for the others in a collective operation. Longer than the slowest of them "
        "ever needs, such as to write a checkpoint.",
    )
    priority: int = Field(default=0, ge=-100, le=100, description="Higher is placed first.")
    gpu_memory_gb: float | None = Field(
        default=None, gt=0, le=10_000, description="Least memory of each GPU, in GB (10^9 bytes)."
    )
    gpu_model: ShortText | None = Field(
        default=None, description="Part of the name of each GPU, such as `H200`; upper and lower case are the same."
    )
    labels: dict[ShortText, ShortText] = Field(
        default={}, max_length=16, description="Labels that each node must carry, as its `TUNEYARD_NODE_LABELS` says."
    )
    max_wait_s: int | None = Field(
        default=None, ge=1, le=366 * 24 * 3600, description="Seconds in the queue after which the job fails. Default: no limit."
    )
    wait_for_nodes: bool = Field(
        default=False, description="Accept the job though no registered nodes could hold it: it waits for ones that can."
    )


class TrainingSpec(Section):
    """Everything a run depends on. In a request every field is optional; in a job every field is filled in."""

    recipe: str | None = Field(
        default=None,
        max_length=128,
        description="A preset of `GET /v1/recipes`, whose values stand where the request gives none.",
    )
    method: Method = Field(
        default="supervised",
        description="`supervised`; `dpo`, `kto`, `orpo`: preferences; `cpt`: continued pretraining on plain text. The job's "
        "`method` says the same for those that OpenAI has.",
    )
    seed: int = Field(default=42, ge=0, le=2_147_483_647, description="Seed of data order, dropout and adapter weights.")
    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    preference: PreferenceSection = PreferenceSection()
    parallelism: ParallelismSection = ParallelismSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    export: ExportSection = ExportSection()
    resources: ResourcesSection = ResourcesSection()
    secrets: dict[EnvironmentName, SecretName] = Field(
        default={},
        max_length=16,
        description="Environment variable of the job's processes -> name of a secret. Variables end in `_TOKEN`, `_KEY`, "
        "`_PASSWORD` or `_SECRET`; `HF_TOKEN` opens gated models and pushes to the Hub.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_method(cls, value: Any) -> Any:
        """Where a default depends on the method or the adapter, it is written out."""
        if not isinstance(value, dict):
            return value
        adapter, method = value.get("adapter"), value.get("method") or "supervised"
        kind = adapter.get("type") if isinstance(adapter, dict) else None
        value = _with_default(value, "training", "learning_rate", default_learning_rate(method, kind))
        return _with_default(value, "data", "on_long_rows", "split") if method == "cpt" else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "kto" and self.training.per_device_train_batch_size < 2:
            raise ValueError("kto compares the rows of a batch: set training.per_device_train_batch_size to 2 or more")
        if self.adapter.type == "qlora" and self.parallelism.strategy == "fsdp2":
            raise ValueError("a base in 4 bits is not sharded: set parallelism.strategy to ddp, or adapter.type to lora")
        if self.adapter.type == "qlora" and self.export.merged:
            raise ValueError("an adapter is not merged into 4 bits: set export.merged to false")
        if self.export.hub is not None:
            self._check_hub(self.export.hub)
        if self.method in PREFERENCE_METHODS and self.data.loss_on == "all":
            raise ValueError(f"{self.method} learns from answers only: leave data.loss_on at assistant")
        if self.method == "orpo" and self.training.router_aux_loss_coef > 0:
            raise ValueError("orpo has no router loss: set training.router_aux_loss_coef to 0")
        if self.method in PREFERENCE_METHODS and self.data.packing == "on":
            raise ValueError(f"{self.method} does not pack rows: set data.packing to auto or off")
        if self.method in PREFERENCE_METHODS and self.data.on_long_rows == "split":
            raise ValueError("only plain text can be split: set data.on_long_rows to truncate, skip or refuse")
        return self

    def _check_hub(self, hub: HubSection) -> None:
        if hub.what != "auto" and self.adapter.is_full:
            raise ValueError("full weights are pushed as they are: leave export.hub.what out")
        if hub.what == "merged" and not self.export.merged:
            raise ValueError("nothing is merged: set export.merged to true, or leave export.hub.what out")

    @classmethod
    def stored(cls, value: dict[str, Any]) -> Self:
        """A spec from a job's row: fields of another version are passed over, as they were checked when the job was created."""
        return cls.model_validate(value, extra="ignore")

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.parallelism.nnodes * self.parallelism.nproc_per_node

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step, over all ranks."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps * self.world_size

    @property
    def slots_per_node(self) -> int:
        """What the job takes of each node: one GPU per rank, or one CPU slot."""
        return self.parallelism.nproc_per_node if self.resources.accelerator == "gpu" else 1


def default_learning_rate(method: str, adapter: str | None) -> float:
    """The starting point where nobody gives a learning rate."""
    if method in PREFERENCE_METHODS:
        return FULL_PREFERENCE_RATE if adapter == "full" else LORA_PREFERENCE_RATE
    return FULL_LEARNING_RATE if adapter == "full" else LORA_LEARNING_RATE


def longest_row(config: dict[str, Any]) -> int | None:
    """The tokens that a model of this config.json reads at once, scaled positions counted; None where it does not say."""
    try:
        text = config.get("text_config") or config
        trained = int(text["max_position_embeddings"])
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        return max(trained, int(rope.get("original_max_position_embeddings", trained) * rope.get("factor", 1)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _with_default(value: dict[str, Any], section: str, name: str, default: Any) -> dict[str, Any]:
    given = value.get(section) or {}
    return value | {section: {name: default} | given} if isinstance(given, dict) else value
