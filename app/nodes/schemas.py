"""Nodes on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel
from sqlalchemy import RowMapping


class NodeOut(BaseModel):
    """A machine that runs jobs. `slots` are its GPUs, or its CPU slots where it has none."""

    id: str
    object: Literal["node"] = "node"
    status: Literal["ready", "lost"]
    address: str
    accelerator: str
    slots: int
    free_slots: int
    gpus: list[Any]
    facts: dict[str, Any]
    heartbeat_at: int
    created_at: int

    @classmethod
    def of(cls, node: RowMapping) -> Self:
        return cls(
            id=node["id"],
            status="ready" if node["is_fresh"] else "lost",
            address=node["address"],
            accelerator=node["accelerator"],
            slots=node["slots"],
            free_slots=node["free_slots"],
            gpus=node["gpus"],
            facts=node["facts"],
            heartbeat_at=int(node["heartbeat_at"]),
            created_at=int(node["created_at"]),
        )
