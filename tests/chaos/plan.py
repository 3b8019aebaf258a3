"""What is asked of a service and what is done to it, all of it drawn from one seed: the same seed, the same plan."""

import random
from dataclasses import dataclass
from typing import Literal

from tests.chaos import stand_in

Kind = Literal["stand-in", "stand-in-poison", "stand-in-broken", "real"]
Victim = Literal["api", "control", "node", "host", "supervisor", "trainer", "broker", "database", "service"]

# Per fault, one for so many jobs.
JOBS_PER_FAULT: dict[Victim, int] = {"supervisor": 8, "trainer": 8, "node": 12, "api": 20, "control": 20, "host": 40}
SECONDS_PER_JOB = 1.5
REAL_STEPS = 6
LONG_STORM = 50  # jobs


@dataclass(frozen=True)
class JobPlan:
    """One job and what its user asks for; times are seconds since the storm's begin."""

    number: int
    kind: Kind
    seed: int
    steps: int
    submit_at: float
    cancel_at: float | None = None
    pause_at: float | None = None
    resume_at: float | None = None


@dataclass(frozen=True)
class Fault:
    """What is struck with -9 at a time: of those that live then the one at `choice` of 1; it comes back `down_s` later."""

    at: float
    victim: Victim
    choice: float
    down_s: float


@dataclass(frozen=True)
class Plan:
    """All of it, in the order of time."""

    seed: int
    jobs: list[JobPlan]
    faults: list[Fault]
    seconds: float


def draw(seed: int, num_jobs: int, *, lease_s: float, embedded: bool = False) -> Plan:
    """A plan for `num_jobs` jobs. `embedded`: for one node below `tuneyard up`, which is itself killed, and whose database is a
    file."""
    dice = random.Random(seed)
    seconds = max(SECONDS_PER_JOB * num_jobs, 3 * lease_s)
    kinds = _kinds(dice, num_jobs)
    good = [number for number, kind in enumerate(kinds) if kind in ("stand-in", "real")]
    cancelled = set(dice.sample(range(num_jobs), max(1, num_jobs // 10)))
    paused = set(dice.sample(good, max(1, num_jobs // 20)))  # one that had failed by then would be resumed, and fail again
    jobs = [_job(dice, number, kind, seconds / num_jobs) for number, kind in enumerate(kinds)]
    jobs = [_with_wishes(dice, job, job.number in cancelled, job.number in paused, seconds) for job in jobs]
    faults = _kills(dice, num_jobs, seconds, lease_s) + _outages(dice, num_jobs, seconds, lease_s, embedded=embedded)
    return Plan(seed, jobs, sorted(faults, key=lambda fault: fault.at), seconds)


def _kinds(dice: random.Random, num_jobs: int) -> list[Kind]:
    few = max(1, num_jobs // 70)
    special: dict[Kind, int] = {"stand-in-poison": few, "stand-in-broken": few, "real": max(2, num_jobs // 20)}
    kinds = [kind for kind, count in special.items() for _ in range(count)]
    kinds += ["stand-in"] * (num_jobs - len(kinds))
    dice.shuffle(kinds)
    return kinds


def _job(dice: random.Random, number: int, kind: Kind, pause_s: float) -> JobPlan:
    """They come faster than they can be served."""
    steps = REAL_STEPS if kind == "real" else dice.randint(8, 40)
    seed = 1 if kind == "real" else dice.randrange(stand_in.MODULUS)
    return JobPlan(number, kind, seed, steps, submit_at=number * pause_s / 3)


def _with_wishes(dice: random.Random, job: JobPlan, cancelled: bool, paused: bool, seconds: float) -> JobPlan:
    """Around the time when its turn comes: some wait then, some run, some have ended."""
    turn = max(job.submit_at + 0.5, 3 * job.submit_at)
    cancel_at, pause_at = (max(job.submit_at, turn + dice.uniform(-0.1, 0.1) * seconds) for _ in range(2))
    resume_at = pause_at + dice.uniform(1, 0.2 * seconds)
    wishes = {"cancel_at": cancel_at} if cancelled else {}
    wishes |= {"pause_at": pause_at, "resume_at": resume_at} if paused else {}
    return JobPlan(job.number, job.kind, job.seed, job.steps, job.submit_at, **wishes)


def _kills(dice: random.Random, num_jobs: int, seconds: float, lease_s: float) -> list[Fault]:
    kills = [victim for victim, jobs in JOBS_PER_FAULT.items() for _ in range(max(1, num_jobs // jobs))]
    # A host may stay away for longer than the lease; of a process the service's own keeper would start the next at once.
    longest: dict[Victim, float] = {"host": 1.5 * lease_s}
    return [
        Fault(dice.uniform(3, seconds), victim, dice.random(), dice.uniform(0.2, longest.get(victim, 3.0))) for victim in kills
    ]


def _outages(dice: random.Random, num_jobs: int, seconds: float, lease_s: float, *, embedded: bool) -> list[Fault]:
    """Two of each, apart; in a long storm the second of the database outlasts the lease."""
    if embedded:
        outages: list[tuple[Victim, float, float]] = [
            ("broker", 0.2, 0),
            ("service", 0.4, 3),
            ("broker", 0.6, 0),
            ("service", 0.8, 3),
        ]
    else:
        longest_s = 1.2 * lease_s if num_jobs >= LONG_STORM else 5
        outages = [("broker", 0.15, 4), ("database", 0.3, 3), ("broker", 0.5, 8), ("database", 0.65, longest_s)]
    return [Fault(seconds * (at + dice.uniform(0, 0.1)), victim, 0, down_s) for victim, at, down_s in outages]
