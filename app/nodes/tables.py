"""Nodes and what is placed on them."""

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.jobs.tables import Job


class Node(Base):
    """A machine that runs jobs. `slots` are its GPUs, or its CPU slots where it has none."""

    __tablename__ = "nodes"
    __table_args__ = (CheckConstraint("free_slots >= 0 AND free_slots <= slots", name="free_slots_in_range"),)

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    """The node's name; its queue is `node.<id>`."""
    address: Mapped[str] = mapped_column(String(256))
    accelerator: Mapped[str] = mapped_column(String(8))
    slots: Mapped[int]
    free_slots: Mapped[int]
    gpus: Mapped[list[Any]]
    """Per GPU: {"uuid", "name", "memory_bytes"}."""
    facts: Mapped[dict[str, Any]]
    """CPU count, RAM, disk, driver and library versions."""
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict)
    is_draining: Mapped[bool] = mapped_column(default=False)
    """An operator said: no new jobs."""
    quarantined: Mapped[list[Any]] = mapped_column(default=list)
    """UUIDs of GPUs that kept memory after a job: never free, until an operator resumes the node."""
    distrusted_until: Mapped[float] = mapped_column(default=0.0)
    """Jobs go elsewhere until then if they can: it did not start one that was placed on it."""
    heartbeat_at: Mapped[float]
    created_at: Mapped[float] = mapped_column(default=now())


class Placement(Base):
    """One node's part in one attempt of a job."""

    __tablename__ = "placements"
    __table_args__ = (
        Index("ix_placements_node_state", "node_id", "state"),
        # What is held is looked for at every tick, among a history that only grows.
        Index("ix_placements_state", "state"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey(Job.id), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node_rank: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    slots: Mapped[int]
    gpu_uuids: Mapped[list[Any]]
    state: Mapped[str] = mapped_column(String(16))
    """placed (nobody has taken it yet) -> claimed (a supervisor runs it) -> released (the slots are free again). Of a job
    over several nodes one may be `stopped` in between: its processes are gone, and it waits for the others."""
    supervisor_pid: Mapped[int | None]
    placed_at: Mapped[float] = mapped_column(default=now())
    claimed_at: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    """When its supervisor was last heard of."""
    rendezvous_port: Mapped[int | None]
    """On node rank 0: where the ranks of all nodes meet."""
    failure: Mapped[dict[str, Any] | None]
    """Why this node's part ended, where it ended badly; see worker/gang.py."""
    stopped_at: Mapped[float | None]
    released_at: Mapped[float | None]
