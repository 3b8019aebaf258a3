"""Nodes on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel
from sqlalchemy import RowMapping

NodeStatus = Literal["ready", "draining", "quarantined", "lost"]


class NodeOut(BaseModel):
    """A machine that runs jobs. `slots` are its GPUs, or its CPU slots where it has none.

    `lost`: silent for too long. `draining`: no new jobs. `quarantined`: every GPU is kept back, as `gpus` says of each.
    """

    id: str
    object: Literal["node"] = "node"
    status: NodeStatus
    address: str
    accelerator: str
    slots: int
    free_slots: int
    gpus: list[Any]
    facts: dict[str, Any]
    labels: dict[str, str]
    heartbeat_at: int
    created_at: int

    @classmethod
    def of(cls, node: RowMapping) -> Self:
        return cls(
            id=node["id"],
            status=_status(node),
            address=node["address"],
            accelerator=node["accelerator"],
            slots=node["slots"],
            free_slots=node["free_slots"],
            gpus=[gpu | {"quarantined": gpu["uuid"] in node["quarantined"]} for gpu in node["gpus"]],
            facts=node["facts"],
            labels=node["labels"],
            heartbeat_at=int(node["heartbeat_at"]),
            created_at=int(node["created_at"]),
        )


def _status(node: RowMapping) -> NodeStatus:
    if not node["is_fresh"]:
        return "lost"
    if node["is_draining"]:
        return "draining"
    uuids = {gpu["uuid"] for gpu in node["gpus"]}
    return "quarantined" if uuids and uuids <= {*node["quarantined"]} else "ready"
