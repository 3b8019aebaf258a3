"""The placements of one attempt as a gang: which nodes are alive, where their ranks meet, how each one's part ended.

One with a single node is a gang, too. All times are by the database's clock, as the nodes' own may differ by minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Update, exists, func, select, update
from sqlalchemy.orm import Session

from app.config import get_settings
from app.db import now
from app.nodes.tables import Node, Placement


@dataclass(frozen=True)
class Member:
    """One node's part in an attempt."""

    node_rank: int
    node: str
    address: str
    rendezvous_port: int | None
    """Where the ranks of all nodes meet; on node rank 0 only, once it is ready for them."""
    failure: dict[str, Any] | None
    """Why its part ended, where it ended badly."""
    stopped_at: float | None
    """When its part ended; None while it goes on, or when nobody knows."""


def members(session: Session, job_id: str, attempt: int) -> Sequence[Member]:
    """Every node of an attempt, by rank."""
    columns = (Placement.node_rank, Placement.node_id, Node.address, Placement.rendezvous_port)
    parts = select(*columns, Placement.failure, Placement.stopped_at).join(Node, Node.id == Placement.node_id)
    rows = session.execute(parts.where(*_of(job_id, attempt)).order_by(Placement.node_rank))
    return [Member(*row) for row in rows]


def publish_port(session: Session, job_id: str, attempt: int, port: int) -> None:
    """Tell the other nodes where their ranks are awaited."""
    session.execute(_own(job_id, attempt, 0).values(rendezvous_port=port))


def beat(session: Session, job_id: str, attempt: int, node_rank: int) -> bool:
    """This node's part goes on; False where it is not this node's any more."""
    alive = _own(job_id, attempt, node_rank).values(heartbeat_at=now()).returning(Placement.node_rank)
    return session.execute(alive).one_or_none() is not None


def stop(
    session: Session, job_id: str, attempt: int, node_rank: int, failure: dict[str, Any] | None, age_s: float = 0.0
) -> bool:
    """This node's processes are gone, for `failure` if there is one, which came `age_s` ago. Its slots stay taken until the
    whole attempt has ended. False where the part is not this node's any more, or has been stopped before."""
    told = _own(job_id, attempt, node_rank).values(state="stopped", failure=failure, stopped_at=now() - age_s)
    return session.execute(told.returning(Placement.node_rank)).one_or_none() is not None


def oldest_beat_of_others(job_id: str, attempt: int) -> ColumnElement[float | None]:
    """When the most silent of the nodes beside node rank 0 was last heard of; NULL where there is none.

    One that has not taken up its part yet counts from when it was asked to; one that has stopped need not be heard of.
    """
    heard = func.min(func.coalesce(Placement.heartbeat_at, Placement.placed_at))
    others = (Placement.node_rank > 0, Placement.state.in_(["placed", "claimed"]))
    return select(heard).where(*_of(job_id, attempt), *others).scalar_subquery()


def is_broken(session: Session, job_id: str, attempt: int, node_rank: int) -> bool:
    """Whether another node's part has failed, or node rank 0 has ended: nothing is left to do for this one."""
    ended = Placement.failure.is_not(None) | (Placement.node_rank == 0)
    others = (Placement.node_rank != node_rank, Placement.state == "stopped")
    return session.scalar(select(exists().where(*_of(job_id, attempt), *others, ended))) or False


def num_others_running(session: Session, job_id: str, attempt: int) -> int:
    """How many other nodes may still run something of the attempt, as node rank 0 sees it. One that has been silent for a
    whole lease has stopped its processes by itself."""
    heard = Placement.heartbeat_at > now() - get_settings().lease_s
    others = (Placement.node_rank > 0, Placement.state == "claimed", heard)
    return session.scalar(select(func.count()).select_from(Placement).where(*_of(job_id, attempt), *others)) or 0


def _of(job_id: str, attempt: int) -> tuple[ColumnElement[bool], ...]:
    return (Placement.job_id == job_id, Placement.attempt == attempt)


def _own(job_id: str, attempt: int, node_rank: int) -> Update:
    """A change of a part that is this node's."""
    held = (Placement.node_rank == node_rank, Placement.state == "claimed")
    return update(Placement).where(*_of(job_id, attempt), *held).execution_options(synchronize_session=False)
