"""The judge of a storm finds what a storm could do: a job that did well has no fault, and each fault is seen."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import db
from app.keys import service as keys
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.nodes.tables import Node
from tests import factories
from tests.chaos import stand_in
from tests.chaos.fleet import MAX_ATTEMPTS
from tests.chaos.harness import Answer, Story
from tests.chaos.judge import Evidence, judge, of_job
from tests.chaos.plan import Fault, JobPlan, Kind, Plan
from tests.chaos.stamps import lives, stamp

STEPS = 3


def job(kind: Kind = "stand-in") -> JobPlan:
    return JobPlan(0, kind, seed=5, steps=STEPS, submit_at=0)


def events(*states: str | None) -> list[Any]:
    return [SimpleNamespace(seq=number, data={"status": state} if state else None) for number, state in enumerate(states, 1)]


def row(status: str = "succeeded", **values: Any) -> Any:
    return SimpleNamespace(**{"id": "ftjob-a", "status": status, "error": None, "num_starts": 2, "last_seq": 3} | values)


def good(**values: Any) -> Evidence:
    """A job that succeeded at its second try."""
    attempts: list[Any] = [SimpleNamespace(number=number, started_at=1.0, ended_at=2.0) for number in (1, 2)]
    losses = list(enumerate(stand_in.losses(5, STEPS), 1))
    evidence = Evidence(
        plan=job(),
        row=row(),
        events=events(None, "running", "succeeded"),
        attempts=attempts,
        losses=losses,
        num_artifacts=4,
        num_models=1,
        lives={1: [(10.0, 11.0)], 2: [(12.0, 13.0)]},
        finished_at=100.0,
    )
    return replace(evidence, **values)


def failed(code: str, **values: Any) -> Evidence:
    ended: dict[str, Any] = {"row": row("failed", error={"code": code}, **values), "events": events(None, None, "failed")}
    return good(plan=job("stand-in-poison"), num_artifacts=0, num_models=0, **ended)


def cancelled_at(at: float, status: str = "running") -> Story:
    return Story(cancels={0: Answer(at, 200, status)})


class TestAJobThatDidWell:
    def test_after_two_tries(self) -> None:
        assert list(of_job(good(), Story())) == []

    def test_as_it_was_cancelled(self) -> None:
        item = good(row=row("cancelled"), events=events(None, None, "cancelled"), num_artifacts=0, num_models=0)
        assert list(of_job(item, cancelled_at(50.0))) == []

    def test_as_a_cancel_came_when_it_had_all_but_ended(self) -> None:
        assert list(of_job(good(), cancelled_at(99.0))) == []

    def test_as_a_poison_job_was_given_up(self) -> None:
        assert list(of_job(failed("worker_lost", num_starts=MAX_ATTEMPTS), Story())) == []


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        (good(row=row("queued"), events=events(None, None, None)), "it has queued"),
        (good(row=row("failed", error={"code": "worker_lost"})), "it has failed"),
        (good(row=row("cancelled"), events=events(None, None, "cancelled")), "it has cancelled"),
        (good(events=events(None, "succeeded", "succeeded")), "its terminal events are ['succeeded', 'succeeded']"),
        (good(events=events(None, "running", "running")), "its terminal events are []"),
        (good(events=events(None, "cancelled", "succeeded")), "its terminal events are ['cancelled', 'succeeded']"),
        (good(row=row(last_seq=4)), "its events are numbered [1, 2, 3], and the last should be 4"),
        (good(lives={1: [(10.0, 12.5)], 2: [(12.0, 13.0)]}), "attempts 1 and 2 trained at once, for 0.50 s"),
        (good(lives={2: [(12.0, 13.0), (12.0, 13.0)]}), "attempt 2 had 2 trainers, not 1"),
        (good(lives={}), "no trainer left a trace"),
        (good(attempts=[SimpleNamespace(number=1, started_at=1.0, ended_at=None)]), "its attempts [1] have no end"),
        (good(num_models=0), "it has 4 files and 0 models"),
        (good(num_models=2), "it has 4 files and 2 models"),
        (good(num_artifacts=0), "it has 0 files and 1 models"),
        (good(losses=[*good().losses, good().losses[-1]]), "it tells steps [1, 2, 3, 3]"),
        (good(losses=good().losses[1:]), "it tells steps [2, 3]"),
        (good(losses=[*good().losses[:2], (3, 0.5)]), "its losses are not those of an undisturbed run"),
        (good(row=row(num_starts=MAX_ATTEMPTS + 1)), "more than"),
        (failed("worker_lost", num_starts=MAX_ATTEMPTS - 1), "it was given up after 6 tries"),
        (failed("internal_error", num_starts=MAX_ATTEMPTS), "it has failed with internal_error"),
        (replace(failed("worker_lost", num_starts=MAX_ATTEMPTS), num_models=1), "it has failed and has 0 files and 1 models"),
    ],
)
def test_a_fault_is_seen(item: Evidence, fault: str) -> None:
    assert any(fault in said for said in of_job(item, Story())), list(of_job(item, Story()))


def test_a_cancel_that_was_answered_in_time_and_not_heard_is_seen() -> None:
    assert any("it has succeeded" in said for said in of_job(good(), cancelled_at(50.0)))
    assert any("it has succeeded" in said for said in of_job(good(), cancelled_at(99.0, status="cancelled")))


@dataclass
class Remains:
    """What a storm has left, without the storm."""

    folder: Path
    database_url: str
    num_nodes: int = 1
    urls: list[str] = field(default_factory=list)
    key: str = ""

    def strike(self, fault: Fault, spared: set[str]) -> set[str]:
        raise NotImplementedError

    def mend(self, fault: Fault) -> None:
        raise NotImplementedError

    def workspaces(self) -> list[Path]:
        return [self.folder / "one", self.folder / "other"]


@pytest.fixture
def remains(database: str, tmp_path: Path) -> Remains:
    with db.write() as session:
        nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", 2, [], {}))
    return Remains(tmp_path, database)


def judged(remains: Remains, **values: Any) -> list[str]:
    """What the judge says of a job in the database, and of the workspaces of both nodes."""
    with db.write() as session:
        project_id = keys.create_project(session, "test").id
    job_id = factories.create_job(project_id, status="succeeded", **values)
    roots = [remains.folder / node / job_id / str(attempt) for attempt, node in enumerate(("one", "other"), 1)]
    for root in roots:
        root.mkdir(parents=True)
    for root in (*roots, *roots):
        stamp(root)
    return judge(remains, Plan(1, [job()], [], 1.0), Story(job_ids={0: job_id})).violations


def test_attempts_that_trained_at_once_on_two_nodes_are_seen_in_their_workspaces(remains: Remains) -> None:
    assert any("attempts 1 and 2 trained at once" in said for said in judged(remains))


def test_a_slot_that_is_not_given_back_is_seen(remains: Remains) -> None:
    with db.write() as session:
        session.get_one(Node, "a").free_slots = 1
    assert "a has 1 of 2 slots free" in judged(remains)


def test_what_the_storm_itself_saw_is_told(remains: Remains) -> None:
    story = Story(left=["1 python"], sightings={"ftjob-a"}, troubles=["waited in vain"])
    said = judge(remains, Plan(1, [job()], [], 1.0), story).violations
    assert said[:3] == ["waited in vain", "a process is left: 1 python", "ftjob-a was seen to train twice at once"]
    assert "1 jobs were submitted as 0, and 0 are there" in said


def test_a_line_that_a_kill_has_cut_is_no_time(tmp_path: Path) -> None:
    (tmp_path / "alive-1").write_text("1.000000\n2.000000\n2.5")
    assert lives(tmp_path) == [(1.0, 2.0)]
