"""Who is served next, and where: the scheduler's decisions on a snapshot in memory, without a database.

Priority first, then fair share over projects, then age. The first job that does not fit gets a reservation: the nodes that are
free for it soonest, at the time the running jobs are to be done. Others go ahead of it only where they do not delay it (EASY
backfill): they end before, by their own time limit, or take what it leaves. A job keeps its place at the head once it has it,
and after `Rules.patience_s` its nodes take nobody else at all: no stream of small jobs and no wrong estimate starves it.

Jobs of equal demand share a fate, and free slots only shrink within a plan: each demand is looked for once after it failed.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from app.nodes.demand import Demand

# A plan goes no further ahead of the database than this: more are placed by the next one, in the order of then.
MOST_AT_ONCE = 100
# What a job that begins is taken to use, in seconds of its slots: without it one project would take all that is free at once.
FORESIGHT_S = 3600.0
# A running job that is past its estimate: soon, again and again. Its time limit bounds how often.
OVERDUE_S = 60.0


@dataclass(slots=True)
class Machine:
    """A node that takes jobs, as it stands in the plan. `capacity`: its slots without those that are kept back."""

    id: str
    accelerator: str
    capacity: int
    free: int
    gpus: Sequence[dict[str, Any]] = ()
    labels: dict[str, str] = field(default_factory=dict)
    is_trusted: bool = True
    """False for a while after it did not start what was placed on it."""
    releases: list[tuple[float, int]] = field(default_factory=list)
    """When running jobs give slots back, by their estimates: (unix seconds, slots)."""
    has_head: bool = False
    """A job that waits with a reservation could run here."""
    promised_to: str | None = None
    """The head that is to run here."""
    promised_at: float = math.inf
    """When the head takes its slots here; infinite where it does not."""
    spare: int = 0
    """Slots that the head leaves over from then on."""
    is_closed: bool = False
    """The head has waited long enough: nobody else comes in."""

    def admits(self, slots: int, ends_at: float) -> bool:
        """Whether a job fits now and delays no head."""
        if self.free < slots:
            return False
        if self.promised_at == math.inf:
            return True
        return not self.is_closed and (ends_at <= self.promised_at or slots <= self.spare)

    def take(self, slots: int, ends_at: float) -> None:
        """Book the slots for a job."""
        self.free -= slots
        if ends_at > self.promised_at:
            self.spare -= slots
        self.releases.append((ends_at, slots))

    def free_at(self, slots: int, now: float) -> float:
        """When so many slots are free, by the estimates; infinite if never."""
        free, at = self.free, now
        for ends_at, released in sorted(self.releases):
            if free >= slots:
                break
            free, at = free + released, ends_at
        return at if free >= slots else math.inf


@dataclass(slots=True)
class Running:
    """An attempt that holds slots on nodes."""

    job_id: str
    project_id: str
    priority: int
    accelerator: str
    ends_at: float
    started_at: float
    slots: int
    """On each node."""
    machines: list[str]
    is_leaving: bool = False
    """It was asked to make room."""


@dataclass(slots=True)
class Waiting:
    """A job without a placement. `limit_s`: how long it may still run."""

    id: str
    project_id: str
    priority: int
    created_at: float
    demand: Demand
    limit_s: float
    reserved_at: float | None = None
    """Since when it is at the head."""


@dataclass(slots=True)
class Share:
    """A project as the scheduler sees it. `usage`: slot-seconds of the past, decayed, and what its running jobs will use."""

    weight: float = 1.0
    usage: float = 0.0
    running_jobs: int = 0
    gpus: int = 0
    max_running_jobs: int | None = None
    max_gpus: int | None = None

    def charge(self, demand: Demand) -> None:
        """Count a job that begins."""
        self.usage += demand.all_slots * FORESIGHT_S


@dataclass(frozen=True)
class Rules:
    """What an operator decides."""

    patience_s: float = 3600.0
    preemption: bool = False
    grace_s: float = 60.0


@dataclass(slots=True)
class Snapshot:
    """Everything a plan depends on, at one moment of the database's clock."""

    now: float
    machines: list[Machine]
    running: list[Running]
    waiting: list[Waiting]
    shares: dict[str, Share]
    rules: Rules = Rules()


@dataclass(frozen=True)
class Decision:
    """Start this job on these nodes, in order of their rank."""

    job_id: str
    demand: Demand
    node_ids: list[str]


@dataclass(slots=True)
class Line:
    """Where a waiting job stands, and why."""

    job_id: str
    position: int
    reason: str
    blocking_resource: str
    estimated_start: float | None = None


@dataclass(slots=True)
class Plan:
    """What to do now. A plan that is cut off has no lines: the next one goes on from the database as it is then."""

    decisions: list[Decision] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    """Jobs with a reservation."""
    preemptions: list[tuple[str, str]] = field(default_factory=list)
    """(job that needs the slots, job that is to make room)."""
    is_cut_off: bool = False


def plan(snapshot: Snapshot) -> Plan:
    """Decide on every waiting job, in the order they are served."""
    return _Planner(snapshot).run()


def in_order(snapshot: Snapshot, uncharged: set[str]) -> Iterator[Waiting]:
    """The jobs as they are served. A project is charged for each of its jobs as it comes up, so that projects take turns by
    their weights; not for those that the caller puts into `uncharged`, as they cannot run now."""
    by_priority = sorted(snapshot.waiting, key=lambda job: (-job.priority, job.created_at, job.id))
    for _, group in groupby(by_priority, key=lambda job: job.priority):
        yield from _taking_turns(list(group), snapshot.shares, uncharged)


def _taking_turns(jobs: list[Waiting], shares: dict[str, Share], uncharged: set[str]) -> Iterator[Waiting]:
    heads = sorted((job for job in jobs if job.reserved_at is not None), key=lambda job: job.reserved_at or 0.0)
    for job in heads:
        yield job
        if job.id not in uncharged:
            shares[job.project_id].charge(job.demand)
    queues: dict[str, Iterator[Waiting]] = {}
    for project_id, own in _by_project(jobs).items():
        queues[project_id] = iter(own)
    turns = [(_standing(shares[project_id]), project_id) for project_id in queues]
    heapq.heapify(turns)
    while turns:
        _, project_id = heapq.heappop(turns)
        following = next(queues[project_id], None)
        if following is None:
            continue
        yield following
        if following.id not in uncharged:
            shares[project_id].charge(following.demand)
        heapq.heappush(turns, (_standing(shares[project_id]), project_id))


def _by_project(jobs: list[Waiting]) -> dict[str, list[Waiting]]:
    found: dict[str, list[Waiting]] = {}
    for job in jobs:
        if job.reserved_at is None:
            found.setdefault(job.project_id, []).append(job)
    return found


def _standing(share: Share) -> float:
    return share.usage / share.weight


@dataclass(slots=True)
class _Fate:
    """What is known of a demand within the plan."""

    machines: list[Machine]
    failed_limit_s: float = math.inf
    """Jobs that may run as long or longer do not fit either."""
    reason: str = ""
    blocking_resource: str = ""
    can_ever: bool = True


class _Planner:
    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now
        self.snapshot = snapshot
        self.fates: dict[Demand, _Fate] = {}
        self.plan = Plan()
        self.uncharged: set[str] = set()
        by_id = {machine.id: machine for machine in snapshot.machines}
        for running in snapshot.running:
            for node_id in running.machines:
                if node_id in by_id:
                    by_id[node_id].releases.append((self._ends_at(running), running.slots))

    def run(self) -> Plan:
        for job in in_order(self.snapshot, self.uncharged):
            if len(self.plan.decisions) == MOST_AT_ONCE:
                self.plan.is_cut_off = True
                self.plan.lines.clear()
                return self.plan
            self._decide(job)
        self._estimate_starts()
        return self.plan

    def _decide(self, job: Waiting) -> None:
        share = self.snapshot.shares[job.project_id]
        if quota := _over_quota(share, job.demand):
            self.uncharged.add(job.id)
            self._wait(job, *quota)
            return
        fate = self._fate(job.demand)
        if not fate.can_ever:
            self.uncharged.add(job.id)
        elif job.limit_s < fate.failed_limit_s:
            if chosen := self._choose(job, fate):
                self._start(job, share, chosen)
                return
            self._fail(job, fate)
        self._wait(job, fate.reason, fate.blocking_resource)

    def _fate(self, demand: Demand) -> _Fate:
        if demand not in self.fates:
            self.fates[demand] = self._first_look(demand)
        return self.fates[demand]

    def _first_look(self, demand: Demand) -> _Fate:
        alike = [machine for machine in self.snapshot.machines if machine.accelerator == demand.accelerator]
        able = [machine for machine in alike if _suits(machine, demand)]
        if len(able) < demand.nodes:
            if not alike:
                reason = f"No node with a {demand.kind} reports: start one with `tuneyard node`, or see GET /v1/nodes."
            else:
                reason = f"Needs {demand.nodes} node(s) with {demand.words}; {len(able)} such node(s) are ready."
            return _Fate([], -math.inf, reason, "nodes", can_ever=False)
        trusted = [machine for machine in able if machine.is_trusted]
        return _Fate(trusted if len(trusted) >= demand.nodes else able)

    def _choose(self, job: Waiting, fate: _Fate) -> list[Machine]:
        """The fullest that admit the job, so that large gaps stay whole; none where they are too few."""
        slots, ends_at = job.demand.slots, self.now + job.limit_s
        fitting = [machine for machine in fate.machines if machine.admits(slots, ends_at)]
        if len(fitting) < job.demand.nodes:
            return []
        return heapq.nsmallest(job.demand.nodes, fitting, key=lambda one: (one.promised_at != math.inf, one.free, one.id))

    def _start(self, job: Waiting, share: Share, chosen: list[Machine]) -> None:
        for machine in chosen:
            machine.take(job.demand.slots, self.now + job.limit_s)
        share.running_jobs += 1
        share.gpus += _gpus(job.demand)
        self.plan.decisions.append(Decision(job.id, job.demand, [machine.id for machine in chosen]))

    def _fail(self, job: Waiting, fate: _Fate) -> None:
        """Note why nobody of this demand fits, and keep nodes for the first one."""
        demand = job.demand
        free = sum(machine.free >= demand.slots for machine in fate.machines)
        if free >= demand.nodes:
            fate.failed_limit_s = job.limit_s
            heads = " and ".join(sorted({one.promised_to for one in fate.machines if one.promised_to})[:3])
            fate.reason = f"Fits now, but would delay {heads}, first in line: a short spec.resources.time_limit_s may pass it."
            fate.blocking_resource = "reservation"
            return
        fate.failed_limit_s = -math.inf
        fate.blocking_resource = "gpus" if demand.accelerator == "gpu" else "cpu_slots"
        if demand.nodes == 1:
            most = max(machine.free for machine in fate.machines)
            fate.reason = f"Needs {demand.slots} free {demand.kind}(s) on one node; the node with the most has {most}."
        else:
            fate.reason = f"Needs {demand.slots} free {demand.kind}(s) on each of {demand.nodes} nodes; {free} have that now."
        if not any(machine.has_head for machine in fate.machines):
            self._reserve(job, fate)

    def _reserve(self, job: Waiting, fate: _Fate) -> None:
        rules, slots = self.snapshot.rules, job.demand.slots
        is_closed = job.reserved_at is not None and self.now - job.reserved_at > rules.patience_s
        kept, starts_at = self._soonest(job, fate, is_closed=is_closed)
        if rules.preemption and starts_at > self.now + rules.grace_s and (victims := self._victims(job, fate)):
            self.plan.preemptions += [(job.id, victim.job_id) for victim in victims if not victim.is_leaving]
            for victim in victims:
                self._let_go(victim)
            kept, starts_at = self._soonest(job, fate, is_closed=False)
        if starts_at == math.inf:
            return
        for machine in kept:
            machine.promised_to, machine.promised_at = job.id, starts_at
            released = sum(given for ends_at, given in machine.releases if ends_at <= starts_at)
            machine.spare = machine.free + released - slots
            machine.is_closed = is_closed
        for machine in fate.machines:
            machine.has_head = True
        self.plan.heads.append(job.id)

    def _soonest(self, job: Waiting, fate: _Fate, *, is_closed: bool) -> tuple[list[Machine], float]:
        """The nodes to keep for the head, and when they are all free for it by the estimates.

        Closed, the estimates have been wrong for long: those are kept that lack least. As nobody comes in, they lack less
        with every job that ends, and none that fills up can take their place.
        """
        slots = job.demand.slots

        def rank(machine: Machine) -> tuple[float, float, str]:
            lacking = float(max(slots - machine.free, 0))
            soon = machine.free_at(slots, self.now)
            # Of those that are free now the fullest, as in a placement; of the others the emptiest.
            return (lacking, soon, machine.id) if is_closed else (soon, lacking or machine.free - slots, machine.id)

        kept = sorted(fate.machines, key=rank)[: job.demand.nodes]
        return kept, max(machine.free_at(slots, self.now) for machine in kept)

    def _victims(self, job: Waiting, fate: _Fate) -> list[Running]:
        """Running jobs of lower priority that must go so that the job can start, the lowest and newest first; none where
        even that does not help."""
        able = {machine.id: machine for machine in fate.machines}
        room = {machine.id: machine.free for machine in fate.machines}
        chosen: list[Running] = []
        lower = [one for one in self.snapshot.running if one.priority < job.priority]
        for victim in sorted(lower, key=lambda one: (not one.is_leaving, one.priority, -one.started_at, one.job_id)):
            if sum(free >= job.demand.slots for free in room.values()) >= job.demand.nodes:
                break
            if not any(node_id in able for node_id in victim.machines):
                continue
            chosen.append(victim)
            for node_id in victim.machines:
                if node_id in room:
                    room[node_id] += victim.slots
        enough = sorted(
            (node_id for node_id, free in room.items() if free >= job.demand.slots), key=lambda one: -able[one].free
        )
        if len(enough) < job.demand.nodes:
            return []
        needed = set(enough[: job.demand.nodes])
        return [victim for victim in chosen if needed & set(victim.machines)]

    def _let_go(self, victim: Running) -> None:
        """From now on the plan counts on the victim's slots."""
        by_id = {machine.id: machine for machine in self.snapshot.machines}
        for node_id in victim.machines:
            if node_id in by_id:
                by_id[node_id].releases.remove((self._ends_at(victim), victim.slots))
        victim.is_leaving = True
        for node_id in victim.machines:
            if node_id in by_id:
                by_id[node_id].releases.append((self._ends_at(victim), victim.slots))

    def _ends_at(self, running: Running) -> float:
        if running.is_leaving:
            return self.now + self.snapshot.rules.grace_s
        return max(running.ends_at, self.now + OVERDUE_S)

    def _wait(self, job: Waiting, reason: str, blocking_resource: str) -> None:
        self.plan.lines.append(Line(job.id, len(self.plan.lines) + 1, reason, blocking_resource))

    def _estimate_starts(self) -> None:
        """When each job can start if all before it, running or waiting, take as long as they may: slots are counted over all
        nodes of a kind, so a job that needs them on one node may start later, and one that passes others earlier."""
        jobs = {job.id: job for job in self.snapshot.waiting}
        free: dict[str, int] = {}
        releases: dict[str, list[tuple[float, int]]] = {}
        for machine in self.snapshot.machines:
            free[machine.accelerator] = free.get(machine.accelerator, 0) + machine.free
            releases.setdefault(machine.accelerator, []).extend(machine.releases)
        for heap in releases.values():
            heapq.heapify(heap)
        clock = dict.fromkeys(free, self.now)
        for line in self.plan.lines:
            job = jobs[line.job_id]
            kind, needed = job.demand.accelerator, job.demand.all_slots
            if line.blocking_resource == "nodes" or line.blocking_resource.startswith("quota"):
                continue
            while free[kind] < needed and releases[kind]:
                at, given = heapq.heappop(releases[kind])
                clock[kind], free[kind] = max(clock[kind], at), free[kind] + given
            if free[kind] < needed:
                continue
            line.estimated_start = clock[kind]
            free[kind] -= needed
            heapq.heappush(releases[kind], (clock[kind] + job.limit_s, needed))


def _suits(machine: Machine, demand: Demand) -> bool:
    return (
        machine.capacity >= demand.slots
        and demand.has_labels(machine.labels)
        and demand.has_model(machine.gpus)
        and demand.has_memory(machine.gpus)
    )


def _over_quota(share: Share, demand: Demand) -> tuple[str, str] | None:
    """Why the project may not start this job now, and what it has run out of."""
    if share.max_running_jobs is not None and share.running_jobs >= share.max_running_jobs:
        return f"The project runs {share.running_jobs} of {share.max_running_jobs} allowed jobs.", "quota.running_jobs"
    if share.max_gpus is not None and _gpus(demand) and share.gpus + _gpus(demand) > share.max_gpus:
        return f"The project uses {share.gpus} of {share.max_gpus} allowed GPUs; the job needs {_gpus(demand)}.", "quota.gpus"
    return None


def _gpus(demand: Demand) -> int:
    return demand.all_slots if demand.accelerator == "gpu" else 0
