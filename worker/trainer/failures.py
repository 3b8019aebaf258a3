"""Causes a run can stop for that have a name, and how the first rank to meet one leaves it in the workspace."""

import errno
import json
import os
import resource
from dataclasses import asdict, dataclass

import torch

from app.jobs.spec import TrainingSpec
from worker.workspace import Failure, Workspace

RESERVED_BYTES = 1 << 16
SHORT_ROW = 512  # tokens; below that, shorter rows save little


class TrainerError(Exception):
    """A cause the user can act on; `code` is one of the stable failure codes."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.failure = Failure(code=code, message=message, param=param)


@dataclass
class Situation:
    """What a run was doing, for a failure that depends on it."""

    phase: str = "loading the model"
    spec: TrainingSpec | None = None


NOW = Situation()
"""This process's; a rank runs one job."""


def reserve_room(workspace: Workspace) -> None:
    """Take what a failure needs on the disk now: on one that is full it could not be told that it is."""
    workspace.reserve.write_bytes(bytes(RESERVED_BYTES))


def record_failure(workspace: Workspace, error: BaseException) -> None:
    """Leave the failure of the first rank that has a name for its cause; later ones only met its consequences."""
    failure = named_cause(error)
    if failure is None:
        return
    workspace.reserve.unlink(missing_ok=True)
    mine = workspace.root / f".failure-{os.getpid()}.json"
    mine.write_text(json.dumps(asdict(failure), ensure_ascii=False), encoding="utf-8")
    try:
        os.link(mine, workspace.failure)  # fails where the file exists: whole or not at all, and the first one wins
    except FileExistsError:
        pass
    finally:
        mine.unlink()


def named_cause(error: BaseException) -> Failure | None:
    """The failure an exception stands for, None where nobody has named it."""
    if isinstance(error, TrainerError):
        return error.failure
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory("gpu_out_of_memory", error)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return out_of_memory("host_out_of_memory", error)
    if _is_disk_full(error):
        return Failure(
            code="disk_full",
            message="The disk of the workspace is full. Free space on the node, or lower checkpoints.keep.",
            param="checkpoints.keep",
        )
    return None


def out_of_memory(code: str, error: BaseException) -> Failure:
    """When it happened, with which sizes, and the one setting to change next."""
    on_gpu = code == "gpu_out_of_memory"
    param, advice = next_setting(NOW, on_gpu=on_gpu)
    sizes = ""
    if NOW.spec is not None:
        batch, longest = NOW.spec.training.per_device_train_batch_size, NOW.spec.data.max_length
        sizes = f", batch {batch}, length {longest}"
    where, peak = ("GPU", _gpu_peak_gb()) if on_gpu else ("host", host_peak_gb())
    message = f"The {where} ran out of memory while {NOW.phase} (peak {peak:.1f} GB{sizes}). {advice} {_first_line(error)}"
    return Failure(code=code, message=message.strip(), param=param)


def next_setting(now: Situation, *, on_gpu: bool) -> tuple[str, str]:
    """What costs least of what is left to try: the same result first, then less of the data, then fewer trained weights."""
    spec = now.spec
    if spec is None:
        return "model", "Use a smaller model."
    training, several = spec.training, spec.parallelism.nproc_per_node > 1
    is_training = now.phase == "training"
    if is_training and training.per_device_train_batch_size > 1:
        halve = "Halve training.per_device_train_batch_size and double training.gradient_accumulation_steps: the same result."
        return "training.per_device_train_batch_size", halve
    if is_training and not training.activation_checkpointing:
        return "training.activation_checkpointing", "Set training.activation_checkpointing to true: slower, the same result."
    if several and spec.parallelism.strategy == "ddp":
        return "parallelism.strategy", "Set parallelism.strategy to fsdp2: each rank then holds a part of the model."
    if is_training and spec.data.max_length > SHORT_ROW:
        return "data.max_length", f"Lower data.max_length from {spec.data.max_length}."
    if spec.adapter.is_full:
        return "adapter.type", "Set adapter.type to lora: an adapter needs no optimizer state for the base."
    if not on_gpu and several:
        return "parallelism.nproc_per_node", "Lower parallelism.nproc_per_node: each rank has a process of its own."
    return "model", "Use a smaller model, or a node with more memory."


def host_peak_gb() -> float:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _gpu_peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def _is_disk_full(error: BaseException) -> bool:
    """torch and safetensors report a full disk as errors of their own, by its text."""
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "No space left on device" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
