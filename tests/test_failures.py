"""Known pains of services like this one, each as it happens here: no trainer runs, time passes in the database.

Where the other pains and cases have their tests:

    a task that is delivered again (1, C01)              nodes/test_placement.py TestClaim, test_outages.py, and below
    an outage that kills or repeats jobs (2, 3)          test_outages.py, worker/test_ticker.py, worker/test_supervisor.py
    a restart that loses jobs (4, 16)                    test_lifecycle.py, jobs/test_history.py
    a worker that dies and a job that runs for ever (C03)   below, test_lifecycle.py
    a cancel that nobody hears (5, C05)                  below, jobs/test_service.py
    queued without a reason (6)                          nodes/test_placement.py
    processes and GPU memory that stay (7)               worker/test_node.py, test_lifecycle.py, nodes/test_placement.py
    a hang after success (8)                             worker/test_supervisor.py
    one rank dies and the others wait (9)                test_lifecycle.py, test_stalls.py
    a request that can never be met (C07)                jobs/test_service.py
    a request sent twice (C07)                           jobs/test_replays.py
    two jobs on one port (24)                            test_outages.py, whose jobs share a host
    a gang that gets half its nodes (25)                 nodes/test_placement.py, nodes/test_planning.py
    all of it at once, over and over                     chaos/test_chaos.py
"""

from typing import Any

import pytest

from app import db
from app.config import get_settings
from app.jobs import attempts, history, queries, service
from app.jobs.schemas import JobOut
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from tests import factories
from worker.ticker import Reaper

SPEC = TrainingSpec.model_validate({"resources": {"accelerator": "cpu"}}).model_dump(mode="json")


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def start_node(slots: int = 1) -> None:
    with db.write() as session:
        nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", slots, [], {}))


def create(project_id: str) -> str:
    return factories.create_job(project_id, spec=SPEC, demand=None)


def shown(project_id: str, job_id: str) -> dict[str, Any]:
    with db.read() as connection:
        return JobOut.of(queries.get_job(connection, project_id, job_id)).model_dump()


def story(job_id: str) -> list[str]:
    with db.read() as connection:
        return [event.message for event in queries.events_beyond(connection, job_id, 0)[0]]


def ends(job_id: str) -> list[str | None]:
    with db.read() as connection:
        return [attempt["end"] for attempt in history.of_job(connection, job_id)]


class TestADeadWorker:
    """Everything on the node was killed and nobody starts it again: only the lease is left to tell."""

    @pytest.fixture
    def dead(self, project_id: str, monkeypatch: pytest.MonkeyPatch) -> str:
        start_node()
        job_id = create(project_id)
        assert placement.place_all() == 1
        assert placement.claim(job_id, 1, 0, pid=1) is not None
        factories.update_job(job_id, lease_expires_at=1.0)
        self.now = 1e6
        monkeypatch.setattr("worker.ticker._uptime_s", lambda: self.now)
        return job_id

    def reap(self) -> None:
        reaper = Reaper()
        for _ in range(int(get_settings().lease_s)):
            self.now += 2
            reaper.reap()

    def test_the_job_is_tried_again(self, project_id: str, dead: str) -> None:
        self.reap()
        assert shown(project_id, dead)["status"] == "queued"
        assert ends(dead) == ["lost"]

    def test_where_no_try_is_left_it_fails_with_its_cause_and_its_streams_end(
        self, project_id: str, dead: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TUNEYARD_MAX_ATTEMPTS", "1")
        get_settings.cache_clear()
        self.reap()
        job = shown(project_id, dead)
        assert (job["status"], job["error"]["code"]) == ("failed", "worker_lost")
        assert job["finished_at"] is not None
        with db.read() as connection:
            told, is_over = queries.events_beyond(connection, dead, 0)
        assert is_over
        assert [event.message for event in told if (event.data or {}).get("status") == "failed"] == [told[-1].message]

    def test_the_next_job_gets_its_slot(self, project_id: str, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUNEYARD_MAX_ATTEMPTS", "1")
        get_settings.cache_clear()
        waiting = create(project_id)
        assert placement.place_all() == 0
        self.reap()
        start_node()  # it is back
        assert placement.place_all() == 1
        assert placement.claim(waiting, 1, 0, pid=2) is not None

    def test_what_the_dead_one_was_told_to_do_is_done(self, project_id: str, dead: str) -> None:
        factories.update_job(dead, cancel_requested_at=1.0)
        self.reap()
        assert (shown(project_id, dead)["status"], ends(dead)) == ("cancelled", ["cancelled"])


class TestACancelWithoutAWorker:
    def test_the_answer_is_at_once_and_again_the_same_and_no_worker_changes_it(self, project_id: str) -> None:
        job_id = create(project_id)
        service.cancel_job(project_id, job_id)
        first, told = shown(project_id, job_id), story(job_id)
        assert first["status"] == "cancelled"
        service.cancel_job(project_id, job_id)
        start_node()
        assert placement.place_all() == 0
        assert (shown(project_id, job_id), story(job_id)) == (first, told)

    def test_a_worker_that_was_about_to_start_it_finds_nothing(self, project_id: str) -> None:
        start_node()
        job_id = create(project_id)
        assert placement.place_all() == 1
        service.cancel_job(project_id, job_id)
        first, told = shown(project_id, job_id), story(job_id)
        assert placement.claim(job_id, 1, 0, pid=1) is None
        assert placement.place_all() == 0
        assert (shown(project_id, job_id), story(job_id)) == (first, told)
        assert ends(job_id) == ["cancelled"]

    def test_a_paused_job_too(self, project_id: str) -> None:
        job_id = create(project_id)
        service.pause_job(project_id, job_id)
        service.cancel_job(project_id, job_id)
        start_node()
        assert placement.place_all() == 0
        assert shown(project_id, job_id)["status"] == "cancelled"


class TestAnOldMessage:
    """A broker may keep a message for hours and deliver it then."""

    def test_of_an_attempt_that_was_lost_it_starts_nothing_beside_the_next(self, project_id: str) -> None:
        start_node(slots=2)
        job_id = create(project_id)
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        factories.update_job(job_id, lease_expires_at=1.0)
        with db.write() as session:
            assert attempts.lose(session, job_id, 1, "The node was lost")
        placement.place_all()
        assert placement.claim(job_id, 1, 0, pid=2) is None
        assert placement.claim(job_id, 2, 0, pid=3) is not None
        assert ends(job_id) == ["lost", None]

    def test_of_a_job_that_ended_it_starts_nothing(self, project_id: str) -> None:
        start_node()
        job_id = create(project_id)
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        factories.update_job(job_id, status="succeeded")
        assert placement.claim(job_id, 1, 0, pid=2) is None
        assert shown(project_id, job_id)["status"] == "succeeded"
