"""The scheduler: gives the next job every slot it needs on every node it needs, or nothing, in one transaction.

Any number may run at once: rows are locked, nothing waits for a lock, and a job that seems not to fit under contention
is looked at again by the next tick.
"""

import logging
from collections.abc import Sequence

from pydantic import ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app import db, queue
from app.config import get_settings
from app.db import now
from app.jobs import attempts
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.nodes import service as nodes
from app.nodes.tables import Node, Placement

log = logging.getLogger(__name__)

# Seconds after which an unclaimed placement's wake-up is taken for lost and sent again; a supervisor needs 1 to 3 to start.
RESEND_EVERY_S = 10.0


def place_all() -> int:
    """Place every waiting job that fits, in the order they are served; how many were placed."""
    with db.write() as session:
        waiting = attempts.waiting(session)
    return sum(_try_place(job_id) for job_id in waiting)


def _try_place(job_id: str) -> bool:
    """A transaction per job: one that cannot be read keeps nobody else waiting, and no lock is held for long."""
    try:
        with db.write() as session:
            job = attempts.lock_waiting(session, job_id)
            if job is None:
                return False
            spec = TrainingSpec.stored(job.spec)
            chosen = _fitting_nodes(session, spec)
            if not chosen:
                attempts.explain_wait(session, job, _why_not(session, spec))
                return False
            _place(session, job, spec, chosen)
            return True
    except ValidationError:
        log.exception("job %s has a spec that this version cannot read", job_id)
        return False


def _fitting_nodes(session: Session, spec: TrainingSpec) -> Sequence[Node]:
    """As many fresh nodes with room as the job needs, fullest first so that large gaps stay whole; none where too few."""
    fitting = (
        select(Node)
        .where(
            Node.accelerator == spec.resources.accelerator,
            Node.free_slots >= spec.slots_per_node,
            Node.heartbeat_at > now() - get_settings().node_timeout_s,
            Node.is_draining.is_(False),
        )
        .order_by(Node.free_slots, Node.id)
        .limit(spec.parallelism.nnodes)
        .with_for_update(skip_locked=True)
    )
    chosen = session.scalars(fitting).all()
    return chosen if len(chosen) == spec.parallelism.nnodes else []


def _why_not(session: Session, spec: TrainingSpec) -> str:
    """Why the job cannot start now, in words for its owner."""
    kind = "GPU" if spec.resources.accelerator == "gpu" else "CPU slot"
    ready = select(func.max(Node.free_slots)).where(
        Node.accelerator == spec.resources.accelerator,
        Node.heartbeat_at > now() - get_settings().node_timeout_s,
        Node.is_draining.is_(False),
    )
    most_free = session.scalar(ready)
    if most_free is None:
        return f"No node with a {kind} reports: start one with `tuneyard node`, or see GET /v1/nodes."
    return f"Needs {spec.slots_per_node} free {kind}(s) on one node; the node with the most has {most_free}."


def _place(session: Session, job: Job, spec: TrainingSpec, chosen: Sequence[Node]) -> None:
    attempt = attempts.begin(session, job.id)
    for node_rank, node in enumerate(chosen):
        session.add(
            Placement(
                job_id=job.id,
                attempt=attempt,
                node_rank=node_rank,
                node_id=node.id,
                slots=spec.slots_per_node,
                gpu_uuids=_free_gpus(session, node)[: spec.slots_per_node],
                state="placed",
            )
        )
        session.execute(update(Node).where(Node.id == node.id).values(free_slots=Node.free_slots - spec.slots_per_node))
        queue.send_after_commit(session, "launch", job.id, attempt, node_rank, queue=queue.node_queue(node.id))
    log.info("placed job %s attempt %d on %s", job.id, attempt, ", ".join(node.id for node in chosen))


def resend_lost_launches() -> None:
    """Wake the nodes of placements nobody has claimed; give back those unclaimed for a whole lease."""
    age = (now() - Placement.placed_at).label("age")
    unclaimed = select(Placement.job_id, Placement.attempt, Placement.node_rank, Placement.node_id, age)
    with db.write() as session:
        found = session.execute(unclaimed.where(Placement.state == "placed")).all()
        for job_id, attempt, node_rank, node_id, seconds in found:
            if RESEND_EVERY_S < seconds <= get_settings().lease_s and seconds % RESEND_EVERY_S < queue.TICK_S:
                queue.send_after_commit(session, "launch", job_id, attempt, node_rank, queue=queue.node_queue(node_id))
    for job_id, attempt, *_, seconds in found:
        if seconds > get_settings().lease_s:
            with db.write() as session:
                attempts.give_back_unclaimed(session, job_id, attempt)


def claim(job_id: str, attempt: int, node_rank: int, pid: int) -> Placement | None:
    """Start the attempt and take up its placement for the supervisor `pid`; None where another delivery did, or it is gone."""
    taken = (
        update(Placement)
        .where(
            Placement.job_id == job_id,
            Placement.attempt == attempt,
            Placement.node_rank == node_rank,
            Placement.state == "placed",
        )
        .values(state="claimed", supervisor_pid=pid, claimed_at=now())
        .returning(Placement)
        .execution_options(synchronize_session=False)
    )
    with db.write() as session:
        # A job's row is locked before its placements and nodes, here as elsewhere, so that none waits for another in a circle.
        placement = session.scalar(taken) if attempts.start(session, job_id, attempt) else None
        if placement is None:
            session.rollback()  # a placement that was given back must not leave a job that runs nowhere
        return placement


def _free_gpus(session: Session, node: Node) -> list[str]:
    taken = nodes.in_use(session, node.id) | {*node.quarantined}
    return [gpu["uuid"] for gpu in node.gpus if gpu["uuid"] not in taken]
