"""What a node does with a wake-up: one supervisor for each placement that waits for one, however often it is woken."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from app import db
from app.jobs import service
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from tests import factories
from worker import tasks

SPEC = TrainingSpec.model_validate({"resources": {"accelerator": "cpu"}}).model_dump(mode="json")


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", 1, [], {}))
        return keys.create_project(session, "test").id


@pytest.fixture
def job_id(project_id: str) -> str:
    """Placed on this node, and taken up by nobody yet."""
    job_id = factories.create_job(project_id, spec=SPEC)
    placement.place_all()
    return job_id


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The supervisors that were started, each by its arguments; none really is."""
    return record(monkeypatch, lambda: None)


def record(monkeypatch: pytest.MonkeyPatch, while_it_starts: Callable[[], None]) -> list[str]:
    commands: list[str] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(" ".join(command[3:]))
        while_it_starts()

    monkeypatch.setattr("worker.tasks.subprocess.run", run)
    return commands


def test_a_wake_up_starts_the_supervisor(job_id: str, started: list[str]) -> None:
    tasks.launch(job_id, 1, 0)
    assert started == [f"{job_id} 1 0"]


def test_another_one_while_it_is_still_starting_does_not(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again = threading.Thread(target=tasks.launch, args=(job_id, 1, 0))

    def wake_again() -> None:
        again.start()
        again.join()

    started = record(monkeypatch, wake_again)
    tasks.launch(job_id, 1, 0)
    assert started == [f"{job_id} 1 0"]


def test_one_that_died_as_it_started_is_started_again(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no memory")

    started = record(monkeypatch, fail)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            tasks.launch(job_id, 1, 0)
    assert started == [f"{job_id} 1 0"] * 2


def test_for_a_placement_that_is_taken_up_none_is_started(job_id: str, started: list[str]) -> None:
    placement.claim(job_id, 1, 0, pid=1)
    tasks.launch(job_id, 1, 0)
    assert started == []


def test_nor_for_one_that_was_given_back(project_id: str, job_id: str, started: list[str]) -> None:
    service.cancel_job(project_id, job_id)
    tasks.launch(job_id, 1, 0)
    assert started == []
