"""The scheduler at scale: what a decision costs as queue and cluster grow, who waits how long, and who gets what.

    python -m benchmarks.placement_scale [--nodes 1000] [--jobs 10000] [--seed 0]

Decisions: the service's own code on a real PostgreSQL and a real broker, with nodes and jobs as rows and no worker behind them.
The baseline looks at each waiting job in a transaction of its own, as the scheduler did before it planned in memory.

Waits and shares: the same planner on a simulated clock, every job queued at the start, against two baselines on the same jobs:
`fifo` starts jobs in order and stops at the first that does not fit; `greedy` starts, in order, whatever fits.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import func, insert, select

from app import db, migrate, queue
from app.config import get_settings
from app.jobs import attempts, waiting
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.keys import service as keys
from app.keys.tables import Project
from app.nodes import placement, planning
from app.nodes.demand import Demand
from app.nodes.planning import Machine, Running, Share, Snapshot, Waiting
from app.nodes.tables import Node, Placement
from tests import servers

GPUS = 8
HOUR = 3600.0
DEFAULT_LIMIT_S = 7 * 24 * HOUR
TICK_S = 120.0  # of simulated time
WEIGHTS = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}
# (nodes, GPUs on each): how often
WIDTHS = {(1, 1): 25, (1, 2): 15, (1, 4): 10, (1, 8): 30, (2, 8): 8, (4, 8): 7, (16, 8): 4, (64, 8): 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    measure_decisions(given.nodes, given.jobs)
    simulate(given.nodes, given.jobs, given.seed)


# What a decision costs.


def measure_decisions(most_nodes: int, most_jobs: int) -> None:
    print(
        "Decisions on PostgreSQL, in ms. idle: a pass over a full cluster, nothing to place; cpu: of it, in this process; plan:"
    )
    print("of it, without the database. write: every position moved. placed: per placement when 20 jobs have ended, the whole")
    print("pass counted. baseline: a pass that asks for each waiting job in turn.")
    print(f"{'nodes':>6}{'queue':>7}{'idle':>8}{'cpu':>7}{'plan':>7}{'write':>7}{'placed':>8}{'baseline':>10}{'ratio':>7}")
    small_nodes, small_jobs = max(most_nodes // 10, 1), max(most_jobs // 10, 1)
    sizes = [(small_nodes, small_jobs), (small_nodes, most_jobs), (most_nodes, small_jobs), (most_nodes, most_jobs)]
    for nodes, jobs in sizes:
        with service():
            fill(nodes, jobs)
            placement.place_all()
            idle, cpu = timed(placement.place_all), timed(placement.place_all, time.process_time)
            plan = timed(partial(planning.plan, placement._snapshot()), time.process_time, 1)
            parts = f"{idle:>8.1f}{cpu:>7.1f}{plan:>7.1f}{rewrite_positions():>7.1f}"
            placed, baseline = place_after_ends(20), one_by_one(jobs)
            print(f"{nodes:>6}{jobs:>7}{parts}{placed:>8.1f}{baseline:>10.0f}{baseline / idle:>6.0f}x", flush=True)


@contextmanager
def service() -> Iterator[None]:
    """An empty database, and a broker, as those of this process."""
    with servers.postgres() as postgres, servers.valkey() as broker, tempfile.TemporaryDirectory() as folder:
        url = postgres.create_database()
        os.environ |= {"TUNEYARD_DATABASE_URL": url, "TUNEYARD_BROKER_URL": broker, "TUNEYARD_DATA_DIR": folder}
        os.environ["TUNEYARD_NODE_TIMEOUT_S"] = "1e9"
        for cached in (get_settings, db.get_engine):
            cached.cache_clear()
        queue.celery.conf.broker_url = broker
        migrate.upgrade(url)
        yield
        db.get_engine().dispose()


def fill(nodes: int, jobs: int) -> None:
    """A cluster whose every GPU is taken by jobs of four, and a queue of mixed widths behind them."""
    chance = random.Random(0)
    with db.write() as session:
        at = session.scalars(select(db.now())).one()
        session.add_all([Project(id=name, name=name, weight=weight) for name, weight in WEIGHTS.items()])
        session.flush()
        session.execute(insert(Node), [node_row(number, at) for number in range(nodes)])
        rows = [job_row(f"running-{number}", (1, 4), chance, at, "running") for number in range(2 * nodes)]
        session.execute(insert(Job), rows)
        session.execute(insert(Placement), [placement_row(number, at) for number in range(2 * nodes)])
        session.execute(insert(Job), [job_row(f"queued-{i}", width_of(chance), chance, at + i, "queued") for i in range(jobs)])
        session.connection().exec_driver_sql("ANALYZE")


def node_row(number: int, at: float) -> dict[str, Any]:
    gpus = [{"uuid": f"n{number}-{gpu}", "name": "NVIDIA H200", "memory_bytes": 150_754_820_096} for gpu in range(GPUS)]
    slots = {"accelerator": "gpu", "slots": GPUS, "free_slots": 0, "gpus": gpus, "quarantined": [], "is_draining": False}
    return {"id": f"n{number}", "address": "10.0.0.1", "facts": {}, "labels": {}, "heartbeat_at": at, **slots}


def job_row(job_id: str, width: tuple[int, int], chance: random.Random, at: float, status: str) -> dict[str, Any]:
    parallelism = {"nnodes": width[0], "nproc_per_node": width[1]}
    spec = TrainingSpec.model_validate({"parallelism": parallelism, "resources": {"accelerator": "gpu"}})
    fixed: dict[str, Any] = {"model": "m", "training_file": "f", "seed": 0, "method": {"type": "supervised"}}
    return fixed | {
        "id": job_id,
        "project_id": chance.choice(list(WEIGHTS)),
        "status": status,
        "spec": spec.model_dump(mode="json"),
        "integrations": [],
        "priority": 0,
        "accelerator": "gpu",
        "result_files": [],
        "answers": [],
        "attempt": int(status == "running"),
        "created_at": at,
        "estimated_finish": at + chance.uniform(600, 8 * HOUR) if status == "running" else None,
        **waiting.requirements(spec),
    }


def placement_row(number: int, at: float) -> dict[str, Any]:
    uuids = [f"n{number // 2}-{gpu}" for gpu in range(4 * (number % 2), 4 * (number % 2) + 4)]
    held = {"node_id": f"n{number // 2}", "slots": 4, "gpu_uuids": uuids, "state": "claimed"}
    return {"job_id": f"running-{number}", "attempt": 1, "node_rank": 0, "placed_at": at - HOUR, **held}


def place_after_ends(count: int) -> float:
    """Milliseconds per placement when running jobs have ended: the pass and its transactions, divided by what was placed."""
    with db.write() as session:
        ended = session.scalars(select(Job.id).where(Job.status == "running").order_by(Job.id).limit(count)).all()
        for job_id in ended:
            attempts.cancel(session, job_id, 1)
    began = time.perf_counter()
    placed = placement.place_all()
    assert placed > 0
    return 1000 * (time.perf_counter() - began) / placed


def rewrite_positions() -> float:
    """Milliseconds to write the whole queue anew, as when everyone moves up."""
    plan = planning.plan(placement._snapshot())
    for line in plan.lines:
        line.position += 1
    began = time.perf_counter()
    with db.write() as session:
        waiting.explain(session, plan.lines)
    return 1000 * (time.perf_counter() - began)


def one_by_one(jobs: int) -> float:
    """Milliseconds of a pass that locks each waiting job and asks for its nodes, measured on some of them and scaled."""
    with db.read() as connection:
        some = connection.execute(select(Job.id, Job.spec).where(Job.status == "queued").limit(200)).all()
    began = time.perf_counter()
    for job_id, stored in some:
        with db.write() as session:
            spec = TrainingSpec.stored(stored)
            session.execute(select(Job.id).where(Job.id == job_id).with_for_update(skip_locked=True))
            session.execute(select(func.count()).where(Placement.job_id == job_id, Placement.state != "released"))
            fitting = select(Node).where(Node.accelerator == "gpu", Node.free_slots >= spec.slots_per_node)
            session.execute(fitting.order_by(Node.free_slots, Node.id).limit(spec.parallelism.nnodes)).all()
            session.scalar(select(func.max(Node.free_slots)))
    return 1000 * (time.perf_counter() - began) * jobs / len(some)


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter, times: int = 3) -> float:
    """The least of some runs, in milliseconds: others on the machine only add to it."""
    taken = []
    for _ in range(times):
        began = clock()
        action()
        taken.append(1000 * (clock() - began))
    return min(taken)


# Who waits how long, and who gets what.


@dataclass
class SimulatedJob:
    """A job, how long it really runs, and what its owner and its trainer say of that."""

    waiting: Waiting
    runs_s: float
    estimate_s: float
    started_at: float | None = None
    node_ids: tuple[str, ...] = ()

    @property
    def ends_at(self) -> float:
        assert self.started_at is not None
        return self.started_at + self.runs_s


Policy = Callable[[float, list[SimulatedJob], list[SimulatedJob], dict[str, int]], list[tuple[str, list[str]]]]


def simulate(nodes: int, jobs: int, seed: int) -> None:
    print(f"\nAll {jobs} jobs queued at once on {nodes} nodes of {GPUS} GPUs, simulated, seed {seed}.")
    print(
        "Mean hours of waiting by a job's GPUs; when the last one ends; how busy the GPUs are while most queue; each project's"
    )
    print("share of the GPUs while all projects queue.")
    widths = sorted({a * b for a, b in WIDTHS if a <= nodes})
    names = "  ".join(f"{name:>3}" for name in WEIGHTS)
    print(f"{'':<9}" + "".join(f"{width:>7}" for width in widths) + f"{'all':>8}{'ends at':>9}{'busy':>7}   {names}")
    waits = {}
    for name, policy in (("fifo", fifo), ("greedy", greedy), ("tuneyard", Planned())):
        made = make_jobs(nodes, jobs, seed)
        began = time.perf_counter()
        run(made, nodes, policy)
        hours = {width: mean_wait(job for job in made if job.waiting.demand.all_slots == width) for width in widths}
        waits[name] = mean_wait(iter(made)), max(job.ends_at for job in made) / HOUR, hours[widths[-1]]
        shown = "".join(f"{hours[width]:>7.1f}" for width in widths)
        shares = "  ".join(f"{share:>3.0%}" for share in shares_while_all_queue(made).values())
        rest = f"{waits[name][0]:>8.1f}{waits[name][1]:>9.1f}{busy(made, nodes):>7.0%}   {shares}"
        print(f"{name:<9}{shown}{rest}   ({time.perf_counter() - began:.0f} s)", flush=True)
    total = sum(WEIGHTS.values())
    print(
        f"{'weights':<9}{'':>{7 * len(widths) + 24}}   " + "  ".join(f"{weight / total:>3.0%}" for weight in WEIGHTS.values())
    )
    ours, fifos, greedys = waits["tuneyard"], waits["fifo"], waits["greedy"]
    print(f"Against fifo: mean wait x {ours[0] / fifos[0]:.2f}, end x {ours[1] / fifos[1]:.2f}.", end=" ")
    print(f"Against greedy: the widest jobs' wait x {ours[2] / greedys[2]:.2f}, end x {ours[1] / greedys[1]:.2f}.")


def make_jobs(nodes: int, count: int, seed: int) -> list[SimulatedJob]:
    """Runs of minutes to many hours; a third of the owners leave the time limit at its default, estimates err by a fifth."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        width, per_node = width_of(chance, nodes)
        runs_s = min(max(chance.lognormvariate(8.0, 1.0), 300.0), 24 * HOUR)
        limit_s = DEFAULT_LIMIT_S if chance.random() < 1 / 3 else runs_s * chance.uniform(1.0, 3.0)
        demand = Demand("gpu", width, per_node, None, None, ())
        job = Waiting(f"j{number:06}", chance.choice(list(WEIGHTS)), 0, float(number - count), demand, limit_s)
        made.append(SimulatedJob(job, runs_s, runs_s * chance.uniform(0.8, 1.2)))
    return made


def width_of(chance: random.Random, nodes: int = 1000) -> tuple[int, int]:
    possible = {width: often for width, often in WIDTHS.items() if width[0] <= nodes}
    return chance.choices(list(possible), list(possible.values()))[0]


def run(jobs: list[SimulatedJob], nodes: int, policy: Policy) -> None:
    """Let time pass until every job has started."""
    by_id = {job.waiting.id: job for job in jobs}
    free = {f"n{number:04}": GPUS for number in range(nodes)}
    queued, running, now = list(jobs), list[SimulatedJob](), 0.0
    while queued:
        for job in [job for job in running if job.ends_at <= now]:
            for node_id in job.node_ids:
                free[node_id] += job.waiting.demand.slots
        running = [job for job in running if job.ends_at > now]
        while decisions := policy(now, queued, running, free):
            for job_id, node_ids in decisions:
                job = by_id[job_id]
                job.started_at, job.node_ids = now, tuple(node_ids)
                running.append(job)
                for node_id in node_ids:
                    free[node_id] -= job.waiting.demand.slots
                    assert free[node_id] >= 0
            queued = [job for job in queued if job.started_at is None]
            if len(decisions) < planning.MOST_AT_ONCE:
                break
        now += TICK_S


class Planned:
    """The service's planner, and what the database would remember for it: what projects have used, who is first in line."""

    def __call__(
        self, now: float, queued: list[SimulatedJob], running: list[SimulatedJob], free: dict[str, int]
    ) -> list[tuple[str, list[str]]]:
        if not hasattr(self, "ended"):
            self.ended = dict.fromkeys(WEIGHTS, 0.0)
            self.seen: dict[str, SimulatedJob] = {}
        self._charge_ended(now, running)
        shares = {name: Share(weight, self.ended[name]) for name, weight in WEIGHTS.items()}
        held = [self._running(job) for job in running]
        for one in held:
            placement._count(shares[one.project_id], one, now)
        machines = [Machine(name, "gpu", GPUS, slots) for name, slots in free.items()]
        made = planning.plan(Snapshot(now, machines, held, [job.waiting for job in queued], shares))
        for job in queued:
            if job.waiting.id in made.heads and job.waiting.reserved_at is None:
                job.waiting.reserved_at = now
        return [(decision.job_id, decision.node_ids) for decision in made.decisions]

    def _charge_ended(self, now: float, running: list[SimulatedJob]) -> None:
        living = {job.waiting.id: job for job in running}
        for job in [job for job_id, job in self.seen.items() if job_id not in living]:
            use = keys.fair_use(job.runs_s) * keys.decay(now - job.ends_at)
            self.ended[job.waiting.project_id] += job.waiting.demand.all_slots * use
        passed = now - getattr(self, "at", now)
        self.ended = {name: use * keys.decay(passed) for name, use in self.ended.items()} if passed else self.ended
        self.seen, self.at = living, now

    def _running(self, job: SimulatedJob) -> Running:
        assert job.started_at is not None
        about = (job.waiting.id, job.waiting.project_id, 0, "gpu")
        ends_at = job.started_at + min(job.estimate_s, job.waiting.limit_s)
        return Running(*about, ends_at, job.started_at, job.waiting.demand.slots, list(job.node_ids))


def fifo(
    now: float, queued: list[SimulatedJob], running: list[SimulatedJob], free: dict[str, int], *, stop: bool = True
) -> list[tuple[str, list[str]]]:
    left, decisions = dict(free), list[tuple[str, list[str]]]()
    failed: set[Demand] = set()
    for job in queued:
        demand = job.waiting.demand
        if demand in failed:
            continue
        fitting = sorted((slots, name) for name, slots in left.items() if slots >= demand.slots)[: demand.nodes]
        if len(fitting) < demand.nodes:
            if stop:
                break
            failed.add(demand)
            continue
        for _, name in fitting:
            left[name] -= demand.slots
        decisions.append((job.waiting.id, [name for _, name in fitting]))
        if len(decisions) == planning.MOST_AT_ONCE:
            break
    return decisions


def greedy(
    now: float, queued: list[SimulatedJob], running: list[SimulatedJob], free: dict[str, int]
) -> list[tuple[str, list[str]]]:
    return fifo(now, queued, running, free, stop=False)


def mean_wait(jobs: Iterator[SimulatedJob]) -> float:
    """In hours."""
    return statistics.fmean((job.started_at or 0.0) / HOUR for job in jobs)


def busy(jobs: list[SimulatedJob], nodes: int) -> float:
    """The part of all GPU-time that was used until nine tenths of the jobs had started: later there is too little to run."""
    until = sorted(job.started_at or 0.0 for job in jobs)[int(0.9 * len(jobs))]
    return sum(used_until(job, until) for job in jobs) / (nodes * GPUS * until)


def shares_while_all_queue(jobs: list[SimulatedJob]) -> dict[str, float]:
    """Each project's part of the GPU-time used until the first project has nothing queued any more."""
    last = {name: max(job.started_at or 0.0 for job in jobs if job.waiting.project_id == name) for name in WEIGHTS}
    until = min(last.values())
    used = {name: sum(used_until(job, until) for job in jobs if job.waiting.project_id == name) for name in WEIGHTS}
    return {name: use / sum(used.values()) for name, use in used.items()}


def used_until(job: SimulatedJob, until: float) -> float:
    assert job.started_at is not None
    return job.waiting.demand.all_slots * max(min(job.ends_at, until) - job.started_at, 0.0)


if __name__ == "__main__":
    main()
