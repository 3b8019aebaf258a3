"""Whether the model can fit at all, seen before its weights are read: a lower bound that no setting of a batch can change."""

import psutil
import torch

from app.jobs.spec import TrainingSpec
from worker.trainer.failures import Situation, TrainerError, next_setting
from worker.trainer.model import num_weights

GB = 1e9
# Weights in float32, their gradients, and AdamW's two moments.
COPIES_OF_TRAINED = 4


def require_memory(spec: TrainingSpec) -> None:
    """Raises TrainerError(gpu_out_of_memory or host_out_of_memory) where a device cannot hold its part of the weights.

    MXFP4 checkpoints count as what they become: four times what they take on the disk.
    """
    if spec.adapter.type == "qlora":
        return
    on_gpu = torch.cuda.is_available()
    # A whole frozen model is mapped from one file by all ranks of a host; anything else each rank has for itself.
    is_mapped = not spec.adapter.is_full and spec.parallelism.strategy == "ddp"
    copies = 1 if on_gpu or is_mapped else spec.parallelism.nproc_per_node
    needed = copies * rank_bytes(spec)
    there = torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total
    if needed <= there:
        return
    dtype = "float32" if spec.adapter.is_full else spec.model.dtype
    param, advice = next_setting(Situation(spec=spec), on_gpu=on_gpu)
    what = "its gradients and the optimizer's state included" if spec.adapter.is_full else "without anything beside it"
    where = f"A GPU here has {there / GB:.3g} GB" if on_gpu else f"The host has {there / GB:.3g} GB"
    message = f"{where}, and the model takes at least {needed / GB:.3g} GB of it in {dtype}, {what}. {advice}"
    raise TrainerError("gpu_out_of_memory" if on_gpu else "host_out_of_memory", message, param)


def rank_bytes(spec: TrainingSpec) -> int:
    """The least that one rank holds."""
    per_weight = (
        torch.float32.itemsize * COPIES_OF_TRAINED if spec.adapter.is_full else getattr(torch, spec.model.dtype).itemsize
    )
    shards = spec.world_size if spec.parallelism.strategy == "fsdp2" else 1
    return num_weights(spec.model) * per_weight // shards
