"""The scheduler: gives each job every slot it needs on every node it needs, or nothing, in one transaction per job.

`planning.py` decides on a snapshot; here is what it decides on, and what becomes of it. Where another transaction was faster,
a decision comes to nothing, and the next tick decides again.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Row, Select, func, select, update
from sqlalchemy.orm import Session

from app import db, queue
from app.config import get_settings
from app.db import now
from app.jobs import attempts, waiting
from app.jobs.tables import Job
from app.keys import service as keys
from app.nodes import planning
from app.nodes import service as nodes
from app.nodes.demand import parse
from app.nodes.planning import Decision, Machine, Running, Share, Snapshot, Waiting
from app.nodes.tables import Node, Placement

log = logging.getLogger(__name__)

# Seconds after which an unclaimed placement's wake-up is taken for lost and sent again; a supervisor needs 1 to 3 to start.
RESEND_EVERY_S = 10.0
# Of jobs that an older version wrote without one.
DEFAULT_LIMIT_S = 7 * 24 * 3600
SCHEDULER_LOCK = 0x74756E65


def place_all() -> int:
    """Place every waiting job that may start now, and let the others say why they wait; how many were placed."""
    placed, goes_on = 0, True
    while goes_on:
        with _turn() as is_ours:
            started, goes_on = _place_some() if is_ours else (0, False)
        placed += started
    return placed


def _place_some() -> tuple[int, bool]:
    """Carry one plan out; how many jobs it placed, and whether the next plan may place more."""
    plan = planning.plan(_snapshot())
    started = sum(_try_place(decision) for decision in plan.decisions)
    if not plan.is_cut_off:
        _tell(plan)
    return started, plan.is_cut_off and started > 0


@contextmanager
def _turn() -> Iterator[bool]:
    """One scheduler at a time, on PostgreSQL: several would make the same plan. A writer of SQLite is alone anyway."""
    if db.get_engine().dialect.name != "postgresql":
        yield True
        return
    # The lock of a transaction: a scheduler that hangs, or whose host is gone, loses it after the server's idle timeout.
    with db.write() as session:
        yield bool(session.scalar(select(func.pg_try_advisory_xact_lock(SCHEDULER_LOCK))))


def _tell(plan: planning.Plan) -> None:
    with db.write() as session:
        waiting.explain(session, plan.lines)
    with db.write() as session:  # apart: whoever starts a job locks it before its line in the queue
        waiting.keep_nodes_for(session, plan.heads)
    for job_id, victim_id in plan.preemptions:
        with db.write() as session:
            waiting.make_room(session, job_id, victim_id)


def _snapshot() -> Snapshot:
    """A handful of queries, however long the queue is."""
    settings = get_settings()
    with db.write() as session:
        waiting.read_new_specs(session)
        waiting.give_up_overdue(session)
    with db.read() as connection:
        at = connection.execute(select(now())).scalar_one()
        queued = waiting.waiting(connection)
        held = connection.execute(_held()).all() if queued else []
        machines = [_machine(row, at) for row in connection.execute(_ready_nodes(at))] if queued else []
        shares = {row.id: _share(row, at) for row in keys.shares(connection)} if queued else {}
    running = _running(held, at)
    for job in running:
        _count(shares[job.project_id], job, at)
    holding = {row.job_id for row in held}
    return Snapshot(
        now=at,
        machines=machines,
        running=running,
        waiting=[_waiting(row) for row in queued if row.id not in holding],
        shares=shares,
        rules=planning.Rules(settings.reservation_patience_s, settings.preemption, settings.stop_grace_s),
    )


def _ready_nodes(at: float) -> Select[Any]:
    of_slots: list[Any] = [Node.id, Node.accelerator, Node.slots, Node.free_slots, Node.quarantined, Node.distrusted_until]
    ready = (Node.heartbeat_at > at - get_settings().node_timeout_s, Node.is_draining.is_(False))
    return select(*of_slots, Node.gpus, Node.labels).where(*ready)


def _held() -> Select[Any]:
    columns: list[Any] = [Placement.job_id, Placement.node_id, Placement.slots, Placement.placed_at]
    of_job: list[Any] = [Job.project_id, Job.priority, Job.accelerator, Job.estimated_finish, Job.time_limit_s, Job.run_seconds]
    joined = select(*columns, *of_job, Job.preempted_by).join(Job, Job.id == Placement.job_id)
    return joined.where(Placement.state != "released")


def _machine(row: Row[Any], at: float) -> Machine:
    return Machine(
        id=row.id,
        accelerator=row.accelerator,
        capacity=row.slots - len(row.quarantined),
        free=row.free_slots,
        gpus=row.gpus,
        labels=row.labels,
        is_trusted=row.distrusted_until < at,
    )


def _running(held: Sequence[Row[Any]], at: float) -> list[Running]:
    """Attempts with their nodes; they end when their trainer says so, else at their time limit."""
    found: dict[str, Running] = {}
    for row in held:
        if row.job_id in found:
            found[row.job_id].machines.append(row.node_id)
            continue
        limit = at + max(_limit_s(row), 0.0)
        found[row.job_id] = Running(
            job_id=row.job_id,
            project_id=row.project_id,
            priority=row.priority,
            accelerator=row.accelerator,
            ends_at=limit if row.estimated_finish is None else min(row.estimated_finish, limit),
            started_at=row.placed_at,
            slots=row.slots,
            machines=[row.node_id],
            is_leaving=row.preempted_by is not None,
        )
    return list(found.values())


def _waiting(row: Row[Any]) -> Waiting:
    return Waiting(
        id=row.id,
        project_id=row.project_id,
        priority=row.priority,
        created_at=row.created_at,
        demand=parse(row.demand),
        limit_s=max(_limit_s(row), 1.0),
        reserved_at=row.reserved_at,
    )


def _limit_s(row: Row[Any]) -> float:
    return float((row.time_limit_s or DEFAULT_LIMIT_S) - row.run_seconds)


def _share(row: Row[Any], at: float) -> Share:
    return Share(
        weight=row.weight,
        usage=row.usage * keys.decay(at - row.usage_at),
        max_running_jobs=row.max_running_jobs,
        max_gpus=row.max_gpus,
    )


def _count(share: Share, job: Running, at: float) -> None:
    """What a running job has used so far, and what it is going to use."""
    slots = job.slots * len(job.machines)
    share.usage += slots * (keys.fair_use(at - job.started_at) + planning.FORESIGHT_S)
    share.running_jobs += 1
    share.gpus += slots if job.accelerator == "gpu" else 0


def _try_place(decision: Decision) -> bool:
    """Carry a decision out if the job still waits and its nodes still have the room."""
    with db.write() as session:
        if not waiting.lock(session, decision.job_id):
            return False
        chosen = _lock_nodes(session, decision)
        if chosen:
            _place(session, decision, chosen)
        return bool(chosen)


def _lock_nodes(session: Session, decision: Decision) -> list[Node]:
    """The nodes of the decision by their rank, locked; none where one of them has no room any more."""
    suitable = select(Node).where(
        Node.id.in_(decision.node_ids),
        Node.free_slots >= decision.demand.slots,
        Node.is_draining.is_(False),
        Node.heartbeat_at > now() - get_settings().node_timeout_s,
    )
    # Nothing waits for a lock, so that nothing waits for it in a circle.
    found = {node.id: node for node in session.scalars(suitable.with_for_update(skip_locked=True))}
    return [found[node_id] for node_id in decision.node_ids] if len(found) == len(decision.node_ids) else []


def _place(session: Session, decision: Decision, chosen: Sequence[Node]) -> None:
    job_id, slots = decision.job_id, decision.demand.slots
    attempt = attempts.begin(session, job_id)
    # torch elastic numbers the nodes by their addresses, as text: ours must agree.
    for node_rank, node in enumerate(sorted(chosen, key=lambda node: node.address)):
        session.add(
            Placement(
                job_id=job_id,
                attempt=attempt,
                node_rank=node_rank,
                node_id=node.id,
                slots=slots,
                gpu_uuids=_free_gpus(session, node)[:slots],
                state="placed",
            )
        )
        session.execute(update(Node).where(Node.id == node.id).values(free_slots=Node.free_slots - slots))
        queue.send_after_commit(session, "launch", job_id, attempt, node_rank, queue=queue.node_queue(node.id))
    log.info("placed job %s attempt %d on %s", job_id, attempt, ", ".join(node.id for node in chosen))


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


def ask_distrusted_nodes() -> None:
    """Ask the nodes that did not start a job whether they hear wake-ups again, as they do after an outage of the broker."""
    with db.write() as session:
        for name in nodes.distrusted(session):
            queue.send_after_commit(session, "hear", queue=queue.node_queue(name))


def is_unclaimed(job_id: str, attempt: int, node_rank: int) -> bool:
    """Whether a placement still waits for its supervisor: nobody has taken it up, and it was not given back."""
    part = (Placement.job_id == job_id, Placement.attempt == attempt, Placement.node_rank == node_rank)
    with db.read() as connection:
        return connection.execute(select(Placement.state).where(*part)).scalar_one_or_none() == "placed"


def claim(job_id: str, attempt: int, node_rank: int, pid: int) -> Placement | None:
    """Start or join the attempt, and take up its placement for the supervisor `pid`; None where another delivery did, or it is
    gone."""
    taken = (
        update(Placement)
        .where(
            Placement.job_id == job_id,
            Placement.attempt == attempt,
            Placement.node_rank == node_rank,
            Placement.state == "placed",
        )
        .values(state="claimed", supervisor_pid=pid, claimed_at=now(), heartbeat_at=now())
        .returning(Placement)
        .execution_options(synchronize_session=False)
    )
    with db.write() as session:
        # A job's row is locked before its placements and nodes, here as elsewhere, so that none waits for another in a circle.
        runs = attempts.start(session, job_id, attempt) or attempts.get_running(session, job_id, attempt) is not None
        placement = session.scalar(taken) if runs else None
        if placement is None:
            session.rollback()  # a placement that was given back must not leave a job that runs nowhere
        else:
            nodes.trust(session, placement.node_id)
        return placement


def _free_gpus(session: Session, node: Node) -> list[str]:
    if not node.gpus:
        return []
    taken = nodes.in_use(session, node.id) | {*node.quarantined}
    return [gpu["uuid"] for gpu in node.gpus if gpu["uuid"] not in taken]
