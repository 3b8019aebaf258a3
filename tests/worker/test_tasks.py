"""What a node does with a wake-up: one supervisor for each placement that waits for one, however often it is woken."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from app import db
from app.config import get_settings
from app.jobs import attempts, service
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.queue import celery
from tests import factories
from worker import tasks

SPEC = TrainingSpec.model_validate({"resources": {"accelerator": "cpu"}}).model_dump(mode="json")


@pytest.fixture
def project_id(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TUNEYARD_NODE_NAME", "a")
    monkeypatch.setattr(tasks, "_starts_fail", threading.Event())
    get_settings.cache_clear()
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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that left, each with its queue."""
    messages: list[str] = []

    def send_task(task: str, *, queue: str, **_: Any) -> None:
        messages.append(f"{task} {queue}")

    monkeypatch.setattr(celery, "send_task", send_task)
    return messages


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


class TestANodeThatDidNotStartAJob:
    """Jobs go elsewhere for some leases: after an outage of the broker that would be one node less for no reason."""

    @pytest.fixture
    def distrusted(self, job_id: str) -> str:
        with db.write() as session:
            attempts.give_back_unclaimed(session, job_id, 1)
        assert self.is_distrusted()
        return job_id

    def is_distrusted(self) -> bool:
        with db.write() as session:
            return nodes.distrusted(session) == ["a"]

    def test_is_asked_whether_it_hears_wake_ups_until_it_does(self, distrusted: str, sent: list[str]) -> None:
        placement.ask_distrusted_nodes()
        assert sent == ["hear node.a"]
        tasks.hear()
        assert not self.is_distrusted()
        placement.ask_distrusted_nodes()
        assert sent == ["hear node.a"]

    def test_stays_so_while_it_cannot_start_one(self, distrusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise OSError("no memory")

        record(monkeypatch, fail)
        placement.place_all()
        with pytest.raises(OSError, match="no memory"):
            tasks.launch(distrusted, 3, 0)
        tasks.hear()
        assert self.is_distrusted()
        record(monkeypatch, lambda: None)
        tasks.launch(distrusted, 3, 0)
        tasks.hear()
        assert not self.is_distrusted()
