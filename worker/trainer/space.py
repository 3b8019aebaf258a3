"""Whether the node's disk can hold what a run will write, seen before the first step: not after hours of it."""

import shutil

from torch import nn

from app.jobs.spec import TrainingSpec
from worker.trainer.callbacks import find_checkpoints
from worker.trainer.failures import TrainerError
from worker.workspace import Workspace

GB = 1e9
# AdamW keeps two moments for each trained weight.
COPIES_IN_CHECKPOINT = 3
# The export in the workspace, and once more as it is fetched back from storage to be proven.
COPIES_OF_EXPORT = 2


def require_space(workspace: Workspace, spec: TrainingSpec, model: nn.Module) -> None:
    """Raises TrainerError(disk_full) with the numbers where checkpoints and export will not fit."""
    checkpoint, export = checkpoint_bytes(model), export_bytes(model, spec)
    there = len(find_checkpoints(workspace))
    # One more than are kept: the oldest goes when the newest is whole.
    num_checkpoints = spec.checkpoints.keep + 1 + int(spec.evaluation.keep_best)
    needed = checkpoint * max(num_checkpoints - there, 1) + COPIES_OF_EXPORT * export
    free = shutil.disk_usage(workspace.root).free
    if needed <= free:
        return
    fitting = (free - COPIES_OF_EXPORT * export) // max(checkpoint, 1) - 1 - int(spec.evaluation.keep_best)
    advice = f"Set checkpoints.keep to {fitting}, or free space on the node" if fitting >= 1 else "Free space on the node"
    message = (
        f"The run will write {needed / GB:.3g} GB: {num_checkpoints} checkpoints of {checkpoint / GB:.3g} GB and "
        f"{COPIES_OF_EXPORT} times the result of {export / GB:.3g} GB. The node's disk has {free / GB:.3g} GB left. {advice}."
    )
    raise TrainerError("disk_full", message, "checkpoints.keep" if fitting >= 1 else None)


def checkpoint_bytes(model: nn.Module) -> int:
    """Of one checkpoint: the trained weights and the optimizer's state for them, of all ranks together."""
    return COPIES_IN_CHECKPOINT * _bytes(model, only_trained=True)


def export_bytes(model: nn.Module, spec: TrainingSpec) -> int:
    """Of the result: the adapter, the whole model, or with `export.merged` both."""
    if spec.adapter.is_full:
        return _bytes(model, only_trained=False)
    return _bytes(model, only_trained=True) + (_bytes(model, only_trained=False) if spec.export.merged else 0)


def _bytes(model: nn.Module, *, only_trained: bool) -> int:
    weights = {weight for weight in model.parameters() if weight.requires_grad or not only_trained}
    return sum(weight.numel() * weight.element_size() for weight in weights)
