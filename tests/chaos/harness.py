"""A storm over a service, as a plan says it: jobs and wishes come, processes are killed; then calm, and what is left."""

import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from app import db
from app.jobs.status import TERMINAL
from app.jobs.tables import Job, Wait
from app.nodes.tables import Node
from tests import tiny
from tests.chaos import fleet as fleets
from tests.chaos.fleet import Fleet
from tests.chaos.plan import Fault, JobPlan, Plan

# What an answer may take while APIs are killed and the database is away, and all jobs once the storm is over.
ANSWER_PATIENCE_S = 120.0
CALM_PATIENCE_S = 240.0
CALM_PATIENCE_S_PER_JOB = 6.0
QUIET_PATIENCE_S = 60.0
LOOK_EVERY_S = 0.3


@dataclass(frozen=True)
class Answer:
    """What a cancel was answered, and when; unix seconds."""

    at: float
    code: int
    status: str
    """The job's, as the answer has it."""


@dataclass
class Story:
    """What happened, as far as the database does not say it."""

    job_ids: dict[int, str] = field(default_factory=dict)
    cancels: dict[int, Answer] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    """How often each kind of process was really struck."""
    seconds: float = 0.0
    sightings: set[str] = field(default_factory=set)
    """Jobs that were seen in /proc to train twice at once."""
    troubles: list[str] = field(default_factory=list)
    """What the harness itself waited for in vain."""
    left: list[str] = field(default_factory=list)
    """Processes that outlived the last job."""


class Customer:
    """A patient client of all APIs, as a program with retries is: what fails for a while is asked again, elsewhere."""

    def __init__(self, fleet: Fleet, models: dict[str, Path], folder: Path) -> None:
        self.fleet, self.models = fleet, models
        self._http = httpx2.Client(timeout=30, headers={"Authorization": f"Bearer {fleet.key}"})
        self._urls = itertools.cycle(fleet.urls)
        rows = tiny.write_rows(folder / "train.jsonl", tiny.chat_rows(16))
        files = {"file": ("train.jsonl", rows.read_bytes())}
        self.file = self.call("/files", files=files, data={"purpose": "fine-tune"}).json()["id"]

    def submit(self, job: JobPlan) -> str:
        body = {
            "model": str(self.models[job.kind]),
            "training_file": self.file,
            "seed": job.seed,
            "spec": {
                "model": {"dtype": "float32"},
                "adapter": {"r": 4, "alpha": 8},
                "data": {"max_length": 256, "packing": "off"},
                "training": {"learning_rate": 0.01, "per_device_train_batch_size": 2, "max_steps": job.steps},
                "checkpoints": {"save_steps": 2 if job.kind == "real" else 4},
                "parallelism": {"nproc_per_node": 2 if job.kind == "real" else 1},
            },
        }
        answer = self.call("/fine_tuning/jobs", json=body, headers={"Idempotency-Key": f"job-{job.number}"})
        answer.raise_for_status()
        return str(answer.json()["id"])

    def ask(self, job_id: str, what: str) -> tuple[int, dict[str, Any]]:
        answer = self.call(f"/fine_tuning/jobs/{job_id}/{what}")
        return answer.status_code, answer.json()

    def call(self, path: str, **content: Any) -> httpx2.Response:
        """POST until there is an answer that is the service's last word."""
        deadline = time.monotonic() + ANSWER_PATIENCE_S
        while True:
            with contextlib.suppress(httpx2.TransportError):
                answer = self._http.post(next(self._urls) + path, **content)
                if answer.status_code < 500:
                    return answer
                if answer.status_code != 503:
                    raise AssertionError(f"POST {path}: {answer.status_code} {answer.text}")
            assert time.monotonic() < deadline, f"POST {path} was never answered"
            time.sleep(0.3)


class Storm:
    """One run of a plan."""

    def __init__(self, fleet: Fleet, plan: Plan, customer: Customer) -> None:
        self.fleet, self.plan, self.customer = fleet, plan, customer
        self.story = Story()
        self._blows: Counter[str] = Counter()
        self._ids = {job.number: Future[str]() for job in plan.jobs}
        self._engine = db.make_engine(fleet.database_url)

    def run(self) -> Story:
        self._wait(self._is_complete, "every node has registered", QUIET_PATIENCE_S)
        begin = time.monotonic()
        self._begin = begin
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,))
        watcher.start()
        try:
            with ThreadPoolExecutor(max_workers=len(self.plan.jobs) + 8) as wishes:
                asked = [wishes.submit(self._live, job) for job in self.plan.jobs]
                self._blow()
                self.story.troubles += [str(error) for future in asked if (error := future.exception())]
            patience_s = CALM_PATIENCE_S + CALM_PATIENCE_S_PER_JOB * len(self.plan.jobs)
            self._wait(self._all_ended, "every job has ended", patience_s)
            self.story.seconds = time.monotonic() - begin
            self._wait(self._is_quiet, "nothing runs any more and every slot is free", QUIET_PATIENCE_S)
            self.story.left = [fleets.describe(process) for process in self._processes()]
        finally:
            over.set()
            watcher.join()
            self._engine.dispose()
        return self.story

    def _blow(self) -> None:
        """All faults in their time, each mended in its own."""
        moments: list[tuple[float, int, Callable[[], None]]] = []
        count = itertools.count()
        for fault in self.plan.faults:
            moments.append((fault.at, next(count), lambda fault=fault: self._strike(fault)))  # type: ignore[misc]
            moments.append((fault.at + fault.down_s, next(count), lambda fault=fault: self.fleet.mend(fault)))  # type: ignore[misc]
        heapq.heapify(moments)
        while moments:
            at, _, act = heapq.heappop(moments)
            self._sleep_until(at)
            act()

    def _strike(self, fault: Fault) -> None:
        spared = {job_id for job_id, blows in self._blows.items() if blows >= fleets.MOST_BLOWS}
        hit = self.fleet.strike(fault, spared)
        self._blows.update(hit)
        if hit or fault.victim not in ("supervisor", "trainer"):
            self.story.faults[fault.victim] += 1

    def _live(self, job: JobPlan) -> None:
        """Submit a job, and say what its user wishes of it, each in its time."""
        self._sleep_until(job.submit_at)
        job_id = self.story.job_ids[job.number] = self.customer.submit(job)
        wishes = [(job.pause_at, self._pause), (job.resume_at, self._resume), (job.cancel_at, self._cancel)]
        for at, wish in sorted(((at, wish) for at, wish in wishes if at is not None), key=lambda wish: wish[0]):
            self._sleep_until(at)
            wish(job, job_id)

    def _pause(self, job: JobPlan, job_id: str) -> None:
        self._insist(job_id, "pause")

    def _resume(self, job: JobPlan, job_id: str) -> None:
        while _error_code(self._insist(job_id, "resume")[1]) == "job_pausing":
            time.sleep(0.5)

    def _cancel(self, job: JobPlan, job_id: str) -> None:
        code, body = self._insist(job_id, "cancel")
        self.story.cancels[job.number] = Answer(time.time(), code, body.get("status", ""))

    def _insist(self, job_id: str, what: str) -> tuple[int, dict[str, Any]]:
        code, body = self.customer.ask(job_id, what)
        assert code in (200, 409), f"{what} {job_id}: {code} {body}"
        return code, body

    def _sleep_until(self, at: float) -> None:
        time.sleep(max(0.0, self._begin + at - time.monotonic()))

    def _watch(self, over: threading.Event) -> None:
        """Look in /proc now and again for two attempts of a job that train at once."""
        while not over.wait(LOOK_EVERY_S):
            found = filter(fleets.is_training, fleets.trainers(self.fleet.folder))
            training = {tuple(fleets.mark_of(process).split(".")[:2]) for process in found}
            jobs = Counter(job_id for job_id, *_ in training)
            self.story.sightings |= {job_id for job_id, count in jobs.items() if count > 1 and job_id}

    def _is_complete(self) -> bool:
        return self._count(select(func.count()).select_from(Node)) == self.fleet.num_nodes

    def _all_ended(self) -> bool:
        open_jobs = select(func.count()).select_from(Job).where(Job.status.not_in(TERMINAL))
        return self._count(open_jobs) == 0

    def _is_quiet(self) -> bool:
        taken = select(func.count()).select_from(Node).where(Node.free_slots != Node.slots)
        return self._count(taken) == 0 and not self._processes()

    def _count(self, statement: Any) -> int:
        with contextlib.suppress(OperationalError), self._engine.connect() as connection:
            return int(connection.execute(statement).scalar_one())
        return -1

    def _processes(self) -> list[Any]:
        return fleets.supervisors(self.fleet.folder) + fleets.trainers(self.fleet.folder)

    def _why(self) -> list[str]:
        """What the scheduler says of the jobs that wait, and how fresh the nodes are."""
        with self._engine.connect() as connection:
            waits = connection.execute(select(Wait.job_id, Wait.reason)).all()
            ages = connection.execute(select(Node.id, Node.free_slots, db.now() - Node.heartbeat_at)).all()
        return [f"{job_id} waits: {reason}" for job_id, reason in waits] + [
            f"{n}: {free} slots free, {age:.1f} s" for n, free, age in ages
        ]

    def _wait(self, condition: Callable[[], bool], what: str, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                self.story.troubles += [f"waited {patience_s:g} s in vain until {what}", *self._why()]
                return
            time.sleep(0.5)


def _error_code(body: dict[str, Any]) -> str | None:
    """Of an answer that is an error, or of a job, which has one where it has failed."""
    error = body.get("error") or {}
    return error.get("code")
