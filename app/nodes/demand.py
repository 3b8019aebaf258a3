"""What a job asks of the nodes, in a form that can be compared, stored and matched."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from app.jobs.spec import TrainingSpec

GB = 1e9


@dataclass(frozen=True)
class Demand:
    """`nodes` different nodes with `slots` free slots each, all of which are as asked. Jobs of equal demands share a fate."""

    accelerator: str
    nodes: int
    slots: int
    gpu_memory_gb: float | None
    gpu_model: str | None
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, spec: TrainingSpec) -> Self:
        """What the job's spec asks for."""
        asked = spec.resources
        return cls(
            accelerator=asked.accelerator,
            nodes=spec.parallelism.nnodes,
            slots=spec.slots_per_node,
            gpu_memory_gb=asked.gpu_memory_gb,
            gpu_model=asked.gpu_model,
            labels=tuple(sorted(asked.labels.items())),
        )

    @property
    def all_slots(self) -> int:
        """On all nodes together."""
        return self.nodes * self.slots

    @property
    def key(self) -> str:
        """The demand as text, for a column; `parse` reads it."""
        return json.dumps(vars(self), sort_keys=True)

    @property
    def kind(self) -> str:
        """A slot, in words."""
        return "GPU" if self.accelerator == "gpu" else "CPU slot"

    @property
    def words(self) -> str:
        """What each node must be, in words."""
        parts = [f"{self.slots} {self.kind}(s)"]
        if self.gpu_model is not None:
            parts.append(f"model {self.gpu_model}")
        if self.gpu_memory_gb is not None:
            parts.append(f"{self.gpu_memory_gb:g} GB each")
        parts += [f"label {name}={value}" for name, value in self.labels]
        return ", ".join(parts)

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with `labels` carries all that are asked for."""
        return all(labels.get(name) == value for name, value in self.labels)

    def has_model(self, gpus: Sequence[dict[str, Any]]) -> bool:
        """Whether every GPU's name holds the model's."""
        return self.gpu_model is None or all(self.gpu_model.lower() in gpu["name"].lower() for gpu in gpus)

    def has_memory(self, gpus: Sequence[dict[str, Any]]) -> bool:
        """Whether every GPU has the memory."""
        return self.gpu_memory_gb is None or all(gpu["memory_bytes"] >= self.gpu_memory_gb * GB for gpu in gpus)


@lru_cache(maxsize=1024)
def parse(key: str) -> Demand:
    """The demand of a stored `key`."""
    values = json.loads(key)
    return Demand(**values | {"labels": tuple((name, value) for name, value in values["labels"])})
