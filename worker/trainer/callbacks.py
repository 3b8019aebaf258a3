"""What a run tells and obeys: metrics, complete checkpoints, the stop request, and the check that the loss is a number."""

import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from app.jobs.spec import TrainingSpec
from worker.trainer.evaluation import best, evaluations
from worker.trainer.failures import TrainerError, host_peak_gb
from worker.trainer.methods import device
from worker.trainer.trainers import Trainer
from worker.workspace import (
    CHECKPOINT_MARKER,
    CheckpointLine,
    LogLine,
    MetricsLine,
    Workspace,
    append_line,
    read_json,
    write_json,
)

# TRL's names of what we pass on; all are ours too. The rest are timings that we measure ourselves.
PREFERENCES = (
    *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")),
    *(f"{figure}/{name}" for figure in ("logps", "logits") for name in ("chosen", "rejected")),
    *("kl", "nll_loss", "log_odds_ratio", "log_odds_chosen"),
)
METRICS = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "entropy", "aux_loss", *PREFERENCES)
EVAL_METRICS = tuple(f"eval_{name}" for name in ("loss", "mean_token_accuracy", "entropy", *PREFERENCES))
MUST_BE_FINITE = ("loss", "grad_norm")


Values = dict[str, float | None]


class Reporter(TrainerCallback):
    """Appends a line per logged step, and fails the job at the first step whose figures are not numbers."""

    def __init__(self, workspace: Workspace, trainer: Trainer) -> None:
        self.workspace = workspace
        self.trainer = trainer
        self.last: Values = {}
        self.losses: list[float] = []
        self._tokens_seen = 0
        self._seen_at = self._began_at = time.monotonic()
        self._step_time_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._seen_at = time.monotonic()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began_at = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step_time_s = time.monotonic() - self._began_at

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs["logs"]
        values = {name: _finite(logs[name]) for name in METRICS + EVAL_METRICS if name in logs}
        if not values:
            return
        self.last |= values
        if "loss" in values:
            values |= {"step_time_s": self._step_time_s} | peak_memory(device(self.trainer))
        if state.is_world_process_zero:
            line = self._append(state, values, logs.get("num_tokens"))
            # For the reporters that come after this one, and from a checkpoint for those of a later attempt.
            ours = values | {"trained_tokens": line.trained_tokens, "tokens_per_second": line.tokens_per_second}
            logs |= {name: value for name, value in ours.items() if value is not None}
            state.log_history[-1] |= logs
        for name in MUST_BE_FINITE:
            if name in values and values[name] is None:
                raise TrainerError(
                    "loss_not_finite",
                    f"{name} was not finite at step {state.global_step}. Lower training.learning_rate, or train in float32.",
                    "training.learning_rate",
                )
        if (loss := values.get("loss")) is not None:
            self.losses.append(loss)

    def _append(self, state: TrainerState, values: Values, num_tokens: float | None) -> MetricsLine:
        line = MetricsLine(
            step=state.global_step,
            total_steps=state.max_steps,
            epoch=state.epoch or 0.0,
            values=values,
            trained_tokens=self.trainer.num_trained_tokens,
            tokens_per_second=self._rate(num_tokens),
        )
        append_line(self.workspace.metrics, line)
        return line

    def _rate(self, num_tokens: float | None) -> float | None:
        """TRL counts the tokens of this process's life; evaluation lines carry no count."""
        if num_tokens is None:
            return None
        now = time.monotonic()
        rate = (num_tokens - self._tokens_seen) / max(now - self._seen_at, 1e-9)
        self._tokens_seen, self._seen_at = int(num_tokens), now
        return rate


class Progress(TrainerCallback):
    """Shows the node's supervisor that training moves on: it can tell a slow run from a stalled one by nothing else."""

    def __init__(self, workspace: Workspace) -> None:
        self.path = workspace.progress
        self._is_writer = is_first_rank_of_node()
        self._count = 0

    def _moved(self, *_: Any, **__: Any) -> None:
        if self._is_writer:
            self._count += 1
            self.path.write_text(str(self._count))

    on_train_begin = on_step_begin = on_substep_end = on_step_end = _moved
    on_prediction_step = on_evaluate = on_save = on_log = _moved

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._is_writer:
            self.path.unlink(missing_ok=True)


class Sharding(TrainerCallback):
    """Says what FSDP2 has sharded, read from the model itself once it is wrapped."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs["model"]
        layers = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        if not layers or not state.is_world_process_zero:
            return
        inner = (getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers)
        wrapped = sorted({type(layer).__name__.removeprefix("FSDP") for layer in inner})
        parts = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
        facts = {"fsdp_version": 2, "wrapped": wrapped, "num_wrapped": len(layers), "sharded_parameters": parts}
        append_line(self.workspace.log, LogLine(f"FSDP2 shards {len(layers)} {', '.join(wrapped)}", data=facts))


class Stopper(TrainerCallback):
    """Saves and stops at the end of a step when any node's workspace or a signal asks, all ranks at the same step."""

    def __init__(self, workspace: Workspace, trainer: Trainer) -> None:
        self.workspace = workspace
        self.trainer = trainer
        self.stopped = False
        self._signalled = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self._signalled = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        asked = self._signalled or (state.is_local_process_zero and self.workspace.stop.exists())
        if self._any_rank(asked) and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def _any_rank(self, asked: bool) -> bool:
        (highest,) = highest_over_ranks([float(asked)], device(self.trainer))
        return highest > 0


class Checkpoints(TrainerCallback):
    """Marks a checkpoint complete once all ranks have written it, says so, and deletes the oldest ones."""

    def __init__(
        self, workspace: Workspace, spec: TrainingSpec, trainer: Trainer, reporter: Reporter, fingerprint: str
    ) -> None:
        self.workspace = workspace
        self.spec = spec
        self.trainer = trainer
        self.reporter = reporter
        self.fingerprint = fingerprint
        self._told_step: int | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = self.workspace.checkpoints / f"checkpoint-{state.global_step}"
        if dist.is_initialized():
            dist.barrier()
        if is_over_nodes():
            gather_on_first_node(folder, args.local_process_index)
        if not state.is_world_process_zero:
            return
        mark_complete(folder, state.global_step, self.trainer.num_trained_tokens, self.spec, self.fingerprint)
        if state.global_step == self._told_step:
            return  # a stop at the end of an epoch saves the step twice
        self._told_step = state.global_step
        line = CheckpointLine(state.global_step, str(folder.relative_to(self.workspace.root)), dict(self.reporter.last))
        append_line(self.workspace.checkpoint_lines, line)
        complete = [checkpoint for checkpoint in find_checkpoints(self.workspace) if checkpoint.is_complete]
        chosen = best(evaluations(state)) if self.spec.evaluation.keep_best else None
        for old in complete[: -self.spec.checkpoints.keep]:
            if chosen is None or old.step != chosen.step:
                (old.folder / CHECKPOINT_MARKER).unlink()  # first, so that nobody takes a half-deleted one for whole
                shutil.rmtree(old.folder)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, complete or not."""

    folder: Path
    step: int

    @property
    def is_complete(self) -> bool:
        """Marked, and no file since lost or cut."""
        try:
            sizes = self.marker()["files"]
        except (FileNotFoundError, ValueError, KeyError):
            return False
        return all(
            (self.folder / name).is_file() and (self.folder / name).stat().st_size == size for name, size in sizes.items()
        )

    def marker(self) -> dict[str, Any]:
        marker: dict[str, Any] = read_json(self.folder / CHECKPOINT_MARKER)
        return marker


def find_checkpoints(workspace: Workspace) -> list[Checkpoint]:
    """Every checkpoint folder, oldest step first."""
    steps = ((path, path.name.removeprefix("checkpoint-")) for path in workspace.checkpoints.glob("checkpoint-*"))
    return sorted((Checkpoint(path, int(step)) for path, step in steps if step.isdigit()), key=lambda item: item.step)


def mark_complete(folder: Path, step: int, trained_tokens: int, spec: TrainingSpec, fingerprint: str) -> None:
    """Put everything on the disk, then say that it is there."""
    sizes = {}
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        sizes[str(path.relative_to(folder))] = path.stat().st_size
    marker = {
        "step": step,
        "trained_tokens": trained_tokens,
        "world_size": spec.world_size,
        "strategy": spec.parallelism.strategy,
        "data": fingerprint,
        "files": sizes,
    }
    write_json(folder / CHECKPOINT_MARKER, marker)


def gather_on_first_node(folder: Path, local_rank: int) -> None:
    """Bring what the ranks of other nodes have written to the first node, the one that stores checkpoints; every rank must
    ask. Each rank writes only the state of its random numbers there, some ten kilobytes."""
    is_elsewhere = os.environ["GROUP_RANK"] != "0"
    own = {path.name: path.read_bytes() for path in _files(folder)} if is_elsewhere and local_rank == 0 else {}
    gathered: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    if is_first_rank():
        for files in gathered:
            for name, content in files.items():
                (folder / name).write_bytes(content)
    if own:
        shutil.rmtree(folder)


def check_same_start(checkpoint: Checkpoint | None, where: torch.device) -> None:
    """Every node looks for the checkpoint to go on from by itself: all must have found the same; every rank must ask."""
    step = float(checkpoint.step) if checkpoint else 0.0
    latest, earliest = highest_over_ranks([step, -step], where)
    if latest != -earliest:
        text = f"One node goes on from step {-earliest:.0f} and another from step {latest:.0f}."
        raise TrainerError("resume_not_exact", text)


def resume_point(workspace: Workspace, spec: TrainingSpec, fingerprint: str) -> Checkpoint | None:
    """The newest complete checkpoint; incomplete ones are deleted, one of another run is refused."""
    for checkpoint in reversed(find_checkpoints(workspace)):
        if checkpoint.is_complete:
            _check_same_run(checkpoint, spec, fingerprint)
            return checkpoint
        if is_first_rank():
            line = LogLine(f"checkpoint at step {checkpoint.step} is incomplete", "warn", {"step": checkpoint.step})
            append_line(workspace.log, line)
            shutil.rmtree(checkpoint.folder)  # its old marker must not vouch for files that are written there again
    return None


def peak_memory(where: torch.device) -> Values:
    """The most memory that any rank has held so far, in GB, and under `..._min_gb` what the rank with the least has."""
    peaks = {"peak_memory_host": host_peak_gb()}
    if where.type == "cuda":
        peaks["peak_memory_gpu_allocated"] = torch.cuda.max_memory_allocated(where) / 1e9
        peaks["peak_memory_gpu_reserved"] = torch.cuda.max_memory_reserved(where) / 1e9
    own = list(peaks.values())
    extremes = highest_over_ranks(own + [-value for value in own], where)
    highest, lowest = extremes[: len(own)], [-value for value in extremes[len(own) :]]
    names = [f"{name}_gb" for name in peaks] + [f"{name}_min_gb" for name in peaks]
    return dict(zip(names, highest + lowest, strict=True))


def highest_over_ranks(values: list[float], where: torch.device) -> list[float]:
    """Each value's maximum over all ranks; every rank must ask."""
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, device=where)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def is_over_nodes() -> bool:
    """Whether ranks run on several nodes."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def is_first_rank() -> bool:
    """The rank that writes the workspace's shared files."""
    return os.environ.get("RANK", "0") == "0"


def is_first_rank_of_node() -> bool:
    """The rank that writes what each node's workspace has of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _check_same_run(checkpoint: Checkpoint, spec: TrainingSpec, fingerprint: str) -> None:
    marker = checkpoint.marker()
    asked = {"world_size": spec.world_size, "strategy": spec.parallelism.strategy, "data": fingerprint}
    different = [name for name, value in asked.items() if marker[name] != value]
    if different:
        raise TrainerError(
            "resume_not_exact",
            f"The checkpoint at step {checkpoint.step} is of a run with another {' and '.join(different)}, so going on from it "
            "would not be the same training.",
        )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKPOINT_MARKER)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
