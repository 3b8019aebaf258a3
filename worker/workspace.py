"""The directory of one attempt on one node: the paths and line formats that the supervisor and the trainer agree on.

    <root>/<job>/<attempt>/              on the first node of a job; on others <root>/<job>/<attempt>/node-N/
        spec.json            the resolved TrainingSpec                         written by the supervisor
        reports.json         Reports: the trackers that the trainer itself tells  written by the supervisor
        data/train.jsonl     canonical rows, one JSON object a line            written by the supervisor
        data/train.lines     the line that each of them stood on where it came from   written by the supervisor
        data/validation.jsonl   the same, where the job has a validation file  written by the supervisor
        initial/             another job's weights, where `training.from` names some   written by the supervisor
        stop                 a StopRequest; the trainer saves and stops at the end of its step
        reserve              room on the disk to say in that it is full          written by each node's first rank
        progress             written anew at whatever moves a training on; not there outside of one
        metrics.jsonl        MetricsLine per logged step                       written by rank 0
        checkpoints.jsonl    CheckpointLine per complete checkpoint            written by rank 0
        log.jsonl            LogLine: facts for the job's event list           written by rank 0
        checkpoints/checkpoint-N/   resumable state
        tensorboard/         TensorBoard's event files, where the job asks for them
        export/adapter/ or export/model/   the artifact, in standard PEFT or transformers layout
        probe.safetensors    input_ids [1, T] and the live model's fp32 logits [1, T, V]
        result.json          Result: written last; without it the run did not finish
        facts.json           base files, libraries, hardware: what the manifest needs of the run
        verification.json    Verification: written by worker.trainer.verify in a fresh process
        hub.json             HubPush: written by worker.hub, where the result goes to the Hub
        failure.json         Failure: a cause the trainer knows a name for; the first rank to fail writes it
        error.json           torch elastic's record of the first failing rank
        trainer.log          stdout and stderr of all ranks

Every `.jsonl` file is append-only, one whole line a write. Every other file is written beside and renamed.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# In a checkpoint's folder once every rank has written its part and all of it is on the disk.
CHECKPOINT_MARKER = "complete.json"


@dataclass(frozen=True)
class Workspace:
    """Paths below the directory of one attempt."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def reports(self) -> Path:
        return self.root / "reports.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def train_data(self) -> Path:
        return self.root / "data" / "train.jsonl"

    @property
    def validation_data(self) -> Path:
        return self.root / "data" / "validation.jsonl"

    @property
    def initial(self) -> Path:
        return self.root / "initial"

    @property
    def stop(self) -> Path:
        return self.root / "stop"

    @property
    def reserve(self) -> Path:
        return self.root / "reserve"

    @property
    def progress(self) -> Path:
        return self.root / "progress"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoint_lines(self) -> Path:
        return self.root / "checkpoints.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def probe(self) -> Path:
        return self.root / "probe.safetensors"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def facts(self) -> Path:
        return self.root / "facts.json"

    @property
    def verification(self) -> Path:
        return self.root / "verification.json"

    @property
    def hub(self) -> Path:
        return self.root / "hub.json"

    @property
    def failure(self) -> Path:
        return self.root / "failure.json"

    @property
    def error(self) -> Path:
        return self.root / "error.json"

    @property
    def trainer_log(self) -> Path:
        return self.root / "trainer.log"


@dataclass(frozen=True)
class Run:
    """Which attempt of which job a directory belongs to, and which of the job's nodes it is for."""

    job_id: str
    attempt: int
    node_rank: int = 0

    @property
    def mark(self) -> str:
        """What every process of it carries in its environment."""
        return f"{self.job_id}.{self.attempt}.{self.node_rank}"

    def folder(self, workspaces: Path) -> Path:
        """Its directory; a node beside the first has one of its own, also where all share a file system."""
        root = workspaces / self.job_id / str(self.attempt)
        return root / f"node-{self.node_rank}" if self.node_rank else root


@dataclass(frozen=True)
class StopRequest:
    """Why the trainer should save and stop at the end of its step."""

    reason: str


@dataclass(frozen=True)
class Reports:
    """Trackers that the trainer itself tells. `wandb` holds project, entity, name and tags, as OpenAI's wire has them."""

    run_id: str
    """The same in every attempt, so that a tracker knows the run again."""
    tensorboard: bool = False
    wandb: dict[str, Any] | None = None


@dataclass(frozen=True)
class MetricsLine:
    """One logged step. `values` uses our names: loss, grad_norm, learning_rate, mean_token_accuracy, eval_loss, ..."""

    step: int
    total_steps: int
    epoch: float
    values: dict[str, float | None]
    """Figures by name; None stands for a figure that was not finite."""
    trained_tokens: int
    """Tokens that carried loss since the job's first step, over all ranks."""
    tokens_per_second: float | None
    """Tokens of the rows (trained or not) per second over all ranks since the last line."""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class CheckpointLine:
    """A complete checkpoint at `step`; `path` is relative to the workspace."""

    step: int
    path: str
    metrics: dict[str, float | None]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class LogLine:
    """A fact a user should see among the job's events."""

    message: str
    level: Literal["info", "warn", "error"] = "info"
    data: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Result:
    """How a run ended. `outcome` is "stopped" after a StopRequest, with the last step saved as a checkpoint."""

    outcome: Literal["finished", "stopped"]
    step: int
    total_steps: int
    trained_tokens: int
    train_loss: float | None


@dataclass(frozen=True)
class Failure:
    """Why a run cannot go on, in words a user can act on. `code` is one of the stable failure codes of docs/api.md."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class Verification:
    """What the reload of the exported files showed. Differences are over the probe's logits in fp32; None: not finite."""

    ok: bool
    message: str
    max_difference_from_live: float | None
    max_difference_from_base: float | None
    tolerance: float
    num_tensors: int
    merged_difference_from_live: float | None = None
    """Of the merged export, where there is one. With bfloat16 weights that is the cost of rounding, and so is the next."""
    merged_rounding: float | None = None
    """What rounding alone costs: base and adapter merged afresh, rounded to the exported type, against the live model."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Per `evaluation.prompts` entry: {"messages": [...], "base": str, "tuned": str}."""


@dataclass(frozen=True)
class HubPush:
    """What became of the push to the Hugging Face Hub. `code` is stable; `url` is that of the commit."""

    ok: bool
    message: str
    code: str | None = None
    url: str | None = None
    commit: str | None = None


def lines_of(rows: Path) -> Path:
    """Beside a file of canonical rows: the line that each row stood on in the file it came from, one number a line."""
    return rows.with_suffix(".lines")


def write_json(path: Path, value: Any) -> None:
    """Write a dataclass or plain value as JSON: whole under a temporary name, synced, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(_plain(value), file, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """The value in a JSON file; FileNotFoundError where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line in one write, so that a reader never sees a part of it as whole."""
    line = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
