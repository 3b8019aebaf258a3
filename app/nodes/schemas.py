"""Nodes on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel
from sqlalchemy import Row

from app.nodes.tables import Node


class NodeOut(BaseModel):
    """A machine that runs jobs. `slots` are its GPUs, or its CPU slots where it has none."""

    id: str
    object: Literal["node"] = "node"
    address: str
    accelerator: str
    slots: int
    free_slots: int
    gpus: list[Any]
    facts: dict[str, Any]
    heartbeat_at: int
    created_at: int

    @classmethod
    def of(cls, node: Node | Row[Any]) -> Self:
        return cls(
            id=node.id,
            address=node.address,
            accelerator=node.accelerator,
            slots=node.slots,
            free_slots=node.free_slots,
            gpus=node.gpus,
            facts=node.facts,
            heartbeat_at=int(node.heartbeat_at),
            created_at=int(node.created_at),
        )
