"""Nodes: registration, heartbeats, and what they offer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select, update
from sqlalchemy.orm import Session

from app import queue
from app.config import get_settings
from app.db import now
from app.nodes.tables import Node, Placement


@dataclass(frozen=True)
class NodeReport:
    """What a machine says of itself. `slots` are its GPUs, or its CPU slots where it has none."""

    name: str
    address: str
    accelerator: str
    slots: int
    gpus: list[dict[str, Any]]
    facts: dict[str, Any]


def register(session: Session, report: NodeReport) -> None:
    """Add the node, or bring its facts up to date; what runs on it keeps its slots."""
    node = session.get(Node, report.name, with_for_update=True)
    held = session.scalar(_held_slots(report.name)) or 0
    values = {
        "address": report.address,
        "accelerator": report.accelerator,
        "slots": max(report.slots, held),
        "free_slots": max(report.slots - held, 0),
        "gpus": report.gpus,
        "facts": report.facts,
    }
    if node is None:
        session.add(Node(id=report.name, heartbeat_at=0.0, **values))
        session.flush()
    else:
        session.execute(update(Node).where(Node.id == report.name).values(**values))
    heartbeat(session, report.name)
    queue.send_after_commit(session, "place")


def heartbeat(session: Session, name: str) -> bool:
    """The node is alive; False where it is not registered, as after a restored backup."""
    alive = update(Node).where(Node.id == name).values(heartbeat_at=now()).returning(Node.id)
    return session.execute(alive.execution_options(synchronize_session=False)).one_or_none() is not None


def list_nodes(connection: Connection) -> Sequence[RowMapping]:
    """Every node, with `is_fresh` by the age of its heartbeat."""
    fresh = Node.heartbeat_at > now() - get_settings().node_timeout_s
    return connection.execute(select(Node.__table__, fresh.label("is_fresh")).order_by(Node.id)).mappings().all()


def largest_slots(session: Session) -> dict[str, int]:
    """Per accelerator the slots of the largest registered node."""
    rows = session.execute(select(Node.accelerator, func.max(Node.slots)).group_by(Node.accelerator).order_by(Node.accelerator))
    return {accelerator: slots for accelerator, slots in rows}


def holding(session: Session, job_id: str) -> int:
    """How many placements a job holds, taken up by a supervisor or not."""
    held = select(func.count()).where(Placement.job_id == job_id, Placement.state != "released")
    return session.scalar(held) or 0


def claimed_here(connection: Connection, name: str) -> Sequence[RowMapping]:
    """What this node is said to run: `job_id`, `attempt`, `supervisor_pid`."""
    columns = (Placement.job_id, Placement.attempt, Placement.supervisor_pid)
    claimed = select(*columns).where(Placement.node_id == name, Placement.state == "claimed")
    return connection.execute(claimed).mappings().all()


def history(connection: Connection, job_id: str) -> list[dict[str, Any]]:
    """Where and when each attempt of a job ran, oldest first."""
    columns = (Placement.attempt, Placement.node_rank, Placement.node_id.label("node"), Placement.slots)
    times = (Placement.claimed_at.label("started_at"), Placement.released_at.label("ended_at"))
    placed = select(*columns, *times).where(Placement.job_id == job_id).order_by(Placement.attempt, Placement.node_rank)
    return [dict(row) for row in connection.execute(placed).mappings()]


def release(session: Session, job_id: str, attempt: int) -> None:
    """Give back all slots of an attempt. Called when its processes are gone, or are fenced off and stopping."""
    held = (
        update(Placement)
        .where(Placement.job_id == job_id, Placement.attempt == attempt, Placement.state != "released")
        .values(state="released", released_at=now())
        .returning(Placement.node_id, Placement.slots)
        .execution_options(synchronize_session=False)
    )
    for node_id, slots in session.execute(held).all():
        session.execute(update(Node).where(Node.id == node_id).values(free_slots=Node.free_slots + slots))
    queue.send_after_commit(session, "place")


def _held_slots(name: str) -> Any:
    return select(func.sum(Placement.slots)).where(Placement.node_id == name, Placement.state != "released")
