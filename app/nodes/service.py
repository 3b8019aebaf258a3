"""Nodes: registration, heartbeats, and what they offer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, case, func, select, update
from sqlalchemy.orm import Session

from app import queue
from app.config import get_settings
from app.db import now
from app.errors import NotFound
from app.jobs.tables import Job
from app.keys import service as keys
from app.keys.service import fair_use
from app.nodes.tables import Node, Placement

DISTRUST_LEASES = 5


@dataclass(frozen=True)
class NodeReport:
    """What a machine says of itself. `slots` are its GPUs, or its CPU slots where it has none."""

    name: str
    address: str
    accelerator: str
    slots: int
    gpus: list[dict[str, Any]]
    facts: dict[str, Any]
    labels: dict[str, str] = field(default_factory=dict)


def register(session: Session, report: NodeReport) -> None:
    """Add the node, or bring its facts up to date; what runs on it keeps its slots."""
    node = session.get(Node, report.name, with_for_update=True)
    held = session.scalar(_held_slots(report.name)) or 0
    kept_back = _quarantined_and_idle(session, node, report.gpus) if node else 0
    values = {
        "address": report.address,
        "accelerator": report.accelerator,
        "slots": max(report.slots, held),
        "free_slots": max(report.slots - held - kept_back, 0),
        "gpus": report.gpus,
        "facts": report.facts,
        "labels": report.labels,
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


def drain(session: Session, name: str) -> None:
    """No new jobs for the node; what runs there goes on. Raises NotFound."""
    _locked(session, name).is_draining = True
    session.flush()


def resume(session: Session, name: str) -> None:
    """The node takes jobs again, also on the GPUs that were kept back. Raises NotFound."""
    node = _locked(session, name)
    node.free_slots += _quarantined_and_idle(session, node, node.gpus)
    node.is_draining, node.quarantined = False, []
    session.flush()
    queue.send_after_commit(session, "place")


def quarantine(session: Session, name: str, gpu_uuids: Sequence[str]) -> None:
    """Keep GPUs back whose memory did not come back: called while their placement still holds them."""
    node = _locked(session, name)
    node.quarantined = sorted({*node.quarantined, *gpu_uuids})
    session.flush()


def get_node(connection: Connection, name: str) -> RowMapping:
    """One node, as in `list_nodes`. Raises NotFound."""
    node = connection.execute(_nodes().where(Node.id == name)).mappings().one_or_none()
    if node is None:
        raise _not_found(name)
    return node


def list_nodes(connection: Connection) -> Sequence[RowMapping]:
    """Every node, with `is_fresh` by the age of its heartbeat."""
    return connection.execute(_nodes().order_by(Node.id)).mappings().all()


@dataclass(frozen=True)
class Offer:
    """What a registered node could give a job, whether it can now or not."""

    accelerator: str
    slots: int
    gpus: list[dict[str, Any]]
    labels: dict[str, str]


def offers(session: Session) -> list[Offer]:
    """Of every registered node."""
    rows = session.execute(select(Node.accelerator, Node.slots, Node.gpus, Node.labels).order_by(Node.accelerator))
    return [Offer(*row) for row in rows]


def holding(session: Session, job_id: str) -> int:
    """How many placements a job holds, taken up by a supervisor or not."""
    held = select(func.count()).where(Placement.job_id == job_id, Placement.state != "released")
    return session.scalar(held) or 0


def claimed_here(connection: Connection, name: str) -> Sequence[RowMapping]:
    """What this node is said to run: `job_id`, `attempt`, `node_rank`, `supervisor_pid`, `gpu_uuids`.

    Node rank 0 has more to do when its own part is over: it waits for the others, and writes the end.
    """
    columns = (Placement.job_id, Placement.attempt, Placement.node_rank, Placement.supervisor_pid, Placement.gpu_uuids)
    runs = (Placement.state == "claimed") | ((Placement.state == "stopped") & (Placement.node_rank == 0))
    claimed = select(*columns).where(Placement.node_id == name, runs)
    return connection.execute(claimed).mappings().all()


def is_claimed(connection: Connection, job_id: str, attempt: int, node_rank: int) -> bool:
    """Whether a node still runs this part of an attempt by right."""
    part = (Placement.job_id == job_id, Placement.attempt == attempt, Placement.node_rank == node_rank)
    claimed = select(Placement.job_id).where(*part, Placement.state == "claimed")
    return connection.execute(claimed.limit(1)).one_or_none() is not None


def history(connection: Connection, job_id: str) -> dict[int, list[dict[str, Any]]]:
    """Per attempt of a job where it ran: `node`, `node_rank` and `slots`, by node rank."""
    columns = (Placement.attempt, Placement.node_rank, Placement.node_id, Placement.slots)
    placed = select(*columns).where(Placement.job_id == job_id).order_by(Placement.attempt, Placement.node_rank)
    found: dict[int, list[dict[str, Any]]] = {}
    for attempt, node_rank, node, slots in connection.execute(placed):
        found.setdefault(attempt, []).append({"node": node, "node_rank": node_rank, "slots": slots})
    return found


def gpu_hours_this_month(session: Session, project_id: str) -> float:
    """What a project's jobs held of GPUs since the month began in UTC, those that run included."""
    at = session.scalars(select(now())).one()
    month = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    began = case((Placement.placed_at < month, month), else_=Placement.placed_at)
    held = select(func.sum(Placement.slots * (func.coalesce(Placement.released_at, at) - began)))
    of_project = held.join(Job, Job.id == Placement.job_id).where(Job.project_id == project_id, Job.accelerator == "gpu")
    seconds = session.scalar(of_project.where(func.coalesce(Placement.released_at, at) > month))
    return float(seconds or 0.0) / 3600


def release(session: Session, job_id: str, attempt: int) -> None:
    """Give back all slots of an attempt. Called when its processes are gone, or are fenced off and stopping."""
    held = (
        update(Placement)
        .where(Placement.job_id == job_id, Placement.attempt == attempt, Placement.state != "released")
        .values(state="released", released_at=now())
        .returning(Placement.node_id, Placement.slots, Placement.gpu_uuids, now() - Placement.placed_at)
        .execution_options(synchronize_session=False)
    )
    slot_seconds = 0.0
    # In order, so that two gangs that share nodes do not wait for each other in a circle.
    for node_id, slots, gpu_uuids, seconds in sorted(session.execute(held), key=itemgetter(0)):
        slot_seconds += slots * fair_use(seconds)
        node = session.get_one(Node, node_id, with_for_update=True, populate_existing=True)
        node.free_slots += slots - len({*gpu_uuids} & {*node.quarantined})
        session.flush()
    if slot_seconds:
        keys.charge(session, session.scalars(select(Job.project_id).where(Job.id == job_id)).one(), slot_seconds)
    queue.send_after_commit(session, "place")


def distrust(session: Session, job_id: str, attempt: int) -> None:
    """Nodes that did not take up what was placed on them get nothing for some leases, as long as others could."""
    silent = select(Placement.node_id).where(
        Placement.job_id == job_id, Placement.attempt == attempt, Placement.state == "placed"
    )
    until = now() + DISTRUST_LEASES * get_settings().lease_s
    for name in sorted(session.scalars(silent)):  # in the order in which `release` takes them
        session.execute(update(Node).where(Node.id == name).values(distrusted_until=until))


def distrusted(session: Session) -> Sequence[str]:
    """The nodes that get nothing now because they did not take up what was placed on them."""
    return session.scalars(select(Node.id).where(Node.distrusted_until > now()).order_by(Node.id)).all()


def trust(session: Session, name: str) -> None:
    """The node has started a job, or hears wake-ups again."""
    session.execute(update(Node).where(Node.id == name, Node.distrusted_until > 0).values(distrusted_until=0.0))


def in_use(session: Session, name: str) -> set[str]:
    """The GPUs of a node that placements hold."""
    held = select(Placement.gpu_uuids).where(Placement.node_id == name, Placement.state != "released")
    return {uuid for uuids in session.scalars(held) for uuid in uuids}


def _nodes() -> Select[Any]:
    fresh = Node.heartbeat_at > now() - get_settings().node_timeout_s
    return select(Node.__table__, fresh.label("is_fresh"))


def _locked(session: Session, name: str) -> Node:
    node = session.get(Node, name, with_for_update=True, populate_existing=True)
    if node is None:
        raise _not_found(name)
    return node


def _not_found(name: str) -> NotFound:
    return NotFound(f"There is no node `{name}`: GET /v1/nodes lists them.", code="node_not_found", param="node_id")


def _quarantined_and_idle(session: Session, node: Node, gpus: list[dict[str, Any]]) -> int:
    """How many of the GPUs are kept back and held by no job any more: those of a job count as its own."""
    return len({gpu["uuid"] for gpu in gpus} & {*node.quarantined} - in_use(session, node.id))


def _held_slots(name: str) -> Any:
    return select(func.sum(Placement.slots)).where(Placement.node_id == name, Placement.state != "released")
