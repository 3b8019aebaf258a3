"""What must hold when a storm is over: each violation in words. Training is judged by the workspaces, not by the database."""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, func, select

from app import db
from app.jobs.status import TERMINAL
from app.jobs.tables import Artifact, Attempt, Event, Job, Metrics
from app.models.tables import FineTunedModel
from app.nodes.tables import Node, Placement
from tests.chaos import stand_in
from tests.chaos.fleet import HEARTBEAT_S, MAX_ATTEMPTS, Fleet
from tests.chaos.harness import Story
from tests.chaos.plan import JobPlan, Plan
from tests.chaos.stamps import lives

# What a trainer needs to hear of a cancel: a heartbeat, a look at the stop file, and patience with a loaded machine.
CANCEL_ARRIVES_S = 10 * HEARTBEAT_S


@dataclass(frozen=True)
class Verdict:
    """How it went."""

    states: Counter[str]
    attempts: list[int]
    """Per job how often it was started."""
    violations: list[str]


@dataclass(frozen=True)
class Evidence:
    """Everything about one job."""

    plan: JobPlan
    row: Row[Any]
    events: list[Row[Any]]
    attempts: list[Row[Any]]
    losses: list[tuple[int, float]]
    num_artifacts: int
    num_models: int
    lives: dict[int, list[tuple[float, float]]]
    """Per attempt, of each trainer its first and its last moment."""
    finished_at: float | None
    """When a trainer wrote down that it had come to the end; unix seconds."""


def judge(fleet: Fleet, plan: Plan, story: Story) -> Verdict:
    """Look at everything that is left."""
    engine = db.make_engine(fleet.database_url)
    violations = [*story.troubles, *(f"a process is left: {process}" for process in story.left)]
    violations += [f"{job_id} was seen to train twice at once" for job_id in sorted(story.sightings)]
    with engine.connect() as connection:
        violations += _of_nodes(connection, fleet)
        rows = {row.id: row for row in connection.execute(select(Job.__table__))}
        if sorted(rows) != sorted(story.job_ids.values()) or len(rows) != len(plan.jobs):
            violations.append(f"{len(plan.jobs)} jobs were submitted as {len(story.job_ids)}, and {len(rows)} are there")
        known = [job for job in plan.jobs if story.job_ids.get(job.number) in rows]
        evidence = [_evidence(connection, fleet, job, rows[story.job_ids[job.number]]) for job in known]
    engine.dispose()
    for item in evidence:
        violations += [f"{item.row.id} ({item.plan.kind}): {what}" for what in of_job(item, story)]
    real = {tuple(item.losses) for item in evidence if item.plan.kind == "real" and item.row.status == "succeeded"}
    if len(real) > 1:
        violations.append(f"equal jobs have {len(real)} different courses of losses: {sorted(real)}")
    states = Counter(str(item.row.status) for item in evidence)
    return Verdict(states, [sum(a.started_at is not None for a in item.attempts) for item in evidence], violations)


def _of_nodes(connection: Connection, fleet: Fleet) -> Iterator[str]:
    nodes = connection.execute(select(Node.id, Node.slots, Node.free_slots)).all()
    if len(nodes) != fleet.num_nodes:
        yield f"{len(nodes)} nodes are registered, not {fleet.num_nodes}"
    for node in nodes:
        if node.slots != node.free_slots:
            yield f"{node.id} has {node.free_slots} of {node.slots} slots free"
    held = connection.execute(select(Placement.job_id, Placement.attempt).where(Placement.state != "released")).all()
    yield from (f"{job_id} still holds its placement of attempt {attempt}" for job_id, attempt in held)


def _evidence(connection: Connection, fleet: Fleet, plan: JobPlan, row: Row[Any]) -> Evidence:
    def count(table: Any) -> int:
        return connection.execute(select(func.count()).select_from(table).where(table.job_id == row.id)).scalar_one()

    events = connection.execute(select(Event.seq, Event.data).where(Event.job_id == row.id).order_by(Event.seq)).all()
    attempts = connection.execute(select(Attempt.__table__).where(Attempt.job_id == row.id).order_by(Attempt.number)).all()
    figures = connection.execute(select(Metrics.step, Metrics.values).where(Metrics.job_id == row.id).order_by(Metrics.step))
    roots = [path for folder in fleet.workspaces() for path in folder.glob(f"{row.id}/*")]
    lived: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for root in roots:
        lived[int(root.name)] += lives(root)
    losses = [(step, values["loss"]) for step, values in figures if "loss" in values]
    models = count(FineTunedModel)
    return Evidence(plan, row, [*events], [*attempts], losses, count(Artifact), models, dict(lived), _finished_at(roots))


def _finished_at(roots: list[Path]) -> float | None:
    results = [path for root in roots if (path := root / "result.json").exists()]
    finished = [path.stat().st_mtime for path in results if json.loads(path.read_text())["outcome"] == "finished"]
    return min(finished, default=None)


def of_job(item: Evidence, story: Story) -> Iterator[str]:
    """What one job has done wrong, or was done to it."""
    yield from _of_state(item, story)
    yield from _of_events(item)
    yield from _of_training(item)
    if item.row.status == "succeeded":
        yield from _of_result(item)
    elif item.num_artifacts or item.num_models:
        yield f"it has {item.row.status} and has {item.num_artifacts} files and {item.num_models} models"


def _of_state(item: Evidence, story: Story) -> Iterator[str]:
    row, cancel = item.row, story.cancels.get(item.plan.number)
    expected, code = _due(item.plan)
    allowed = {expected}
    if cancel is not None and cancel.code == 200:
        allowed = {"cancelled"}
        came_late = item.finished_at is not None and item.finished_at < cancel.at + CANCEL_ARRIVES_S
        if cancel.status != "cancelled" and (came_late or expected == "failed"):
            allowed |= {expected}
    if row.status not in allowed:
        yield f"it has {row.status} ({row.error}), not {' or '.join(sorted(allowed))}; cancel: {cancel}"
    if row.status == "failed" and row.error["code"] != code:
        yield f"it has failed with {row.error['code']}, not {code}"
    if row.status == "failed" and code == "worker_lost" and row.num_starts != MAX_ATTEMPTS:
        yield f"it was given up after {row.num_starts} tries, not {MAX_ATTEMPTS}"
    if row.num_starts > MAX_ATTEMPTS:
        yield f"it was tried {row.num_starts} times, more than {MAX_ATTEMPTS}"


def _due(plan: JobPlan) -> tuple[str, str]:
    """How a job ends that nobody cancels, and the code if that is a failure."""
    if plan.kind == stand_in.POISON:
        return "failed", "worker_lost"
    if plan.kind == stand_in.BROKEN:
        return "failed", stand_in.FAILURE_CODE
    return "succeeded", ""


def _of_events(item: Evidence) -> Iterator[str]:
    numbers = [event.seq for event in item.events]
    if numbers != list(range(1, item.row.last_seq + 1)):
        yield f"its events are numbered {numbers}, and the last should be {item.row.last_seq}"
    ends = [event.data["status"] for event in item.events if (event.data or {}).get("status") in TERMINAL]
    if ends != [item.row.status]:
        yield f"its terminal events are {ends}, its state is {item.row.status}"
    if open_ones := [attempt.number for attempt in item.attempts if attempt.ended_at is None]:
        yield f"its attempts {open_ones} have no end"


def _of_training(item: Evidence) -> Iterator[str]:
    spans = [(number, min(found)[0], max(end for _, end in found)) for number, found in sorted(item.lives.items()) if found]
    for (one, _, end), (other, start, _) in itertools.pairwise(spans):
        if start <= end:
            yield f"attempts {one} and {other} trained at once, for {end - start:.2f} s"
    ranks = 2 if item.plan.kind == "real" else 1
    for number, found in item.lives.items():
        if len(found) > ranks:
            yield f"attempt {number} had {len(found)} trainers, not {ranks}"
    if item.row.status == "succeeded" and not spans:
        yield "it has succeeded, and no trainer left a trace"


def _of_result(item: Evidence) -> Iterator[str]:
    if (item.num_artifacts == 0) or item.num_models != 1:
        yield f"it has {item.num_artifacts} files and {item.num_models} models"
    steps = [step for step, _ in item.losses]
    if steps != list(range(1, item.plan.steps + 1)):
        yield f"it tells steps {steps} of {item.plan.steps}"
    elif item.plan.kind != "real" and [loss for _, loss in item.losses] != stand_in.losses(item.plan.seed, item.plan.steps):
        yield "its losses are not those of an undisturbed run"
