"""Causes a run can stop for that have a name, and how the first rank to meet one leaves it in the workspace."""

import errno
import json
import os
from dataclasses import asdict

import torch

from worker.workspace import Failure, Workspace


class TrainerError(Exception):
    """A cause the user can act on; `code` is one of the stable failure codes."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.failure = Failure(code=code, message=message, param=param)


def record_failure(workspace: Workspace, error: BaseException) -> None:
    """Leave the failure of the first rank that has a name for its cause; later ones only met its consequences."""
    failure = named_cause(error)
    if failure is None:
        return
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
        return Failure(
            code="gpu_out_of_memory",
            message=f"The GPU ran out of memory. Lower training.per_device_train_batch_size or data.max_length, or set "
            f"training.activation_checkpointing. {_first_line(error)}",
            param="training.per_device_train_batch_size",
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return Failure(
            code="host_out_of_memory",
            message=f"The host ran out of memory. Use a smaller model or fewer ranks per node. {_first_line(error)}",
            param="parallelism.nproc_per_node",
        )
    if _is_disk_full(error):
        return Failure(
            code="disk_full",
            message="The disk of the workspace is full. Free space on the node, or lower checkpoints.keep.",
            param="checkpoints.keep",
        )
    return None


def _is_disk_full(error: BaseException) -> bool:
    """torch and safetensors report a full disk as errors of their own, by its text."""
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "No space left on device" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
