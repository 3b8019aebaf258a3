"""FSDP2 on CPU ranks: accelerate turns FSDP on only for GPU-like process groups, and trains plain DDP without a word otherwise.

PyTorch's `fully_shard` runs on CPU with gloo. This lets a machine without GPUs run the very strategy that the GPUs will
run, through the same code: only the state's first initialisation is helped, nothing after it.
"""

from typing import Any

from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]


def allow_fsdp_on_cpu() -> None:
    """Make an FSDP plugin count on CPU ranks too. To be called before the training arguments are made."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
