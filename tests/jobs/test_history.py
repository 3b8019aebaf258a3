"""Every try of a job, as its owner lists them: from the same transactions that move the job."""

from typing import Any

import httpx2
import pytest

from app import db
from app.config import get_settings
from app.jobs import attempts, history
from app.jobs import service as jobs
from app.jobs.attempts import Outcome, StepRecord
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from tests import factories
from tests.conftest import Live

SPEC = {"resources": {"accelerator": "cpu"}}


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", 1, [], {}))
        return keys.create_project(session, "test").id


@pytest.fixture
def job_id(project_id: str) -> str:
    return factories.create_job(project_id, spec=TrainingSpec.model_validate(SPEC).model_dump(mode="json"))


def of_job(job_id: str) -> list[dict[str, Any]]:
    with db.read() as connection:
        return history.of_job(connection, job_id)


def take_up(job_id: str, number: int) -> None:
    """A node gets the job, and its supervisor comes."""
    assert placement.place_all() == 1
    assert placement.claim(job_id, number, 0, pid=1) is not None


def report(job_id: str, number: int, *steps: int) -> None:
    with db.write() as session:
        records = [StepRecord(step, 10, {"loss": 1.0}, 5 * step, None, None) for step in steps]
        assert attempts.record_steps(session, job_id, number, records)


def ends(job_id: str) -> list[str | None]:
    return [attempt["end"] for attempt in of_job(job_id)]


def test_a_job_that_was_lost_once_shows_both_tries(job_id: str) -> None:
    take_up(job_id, 1)
    report(job_id, 1, 1, 2)
    report(job_id, 1, 3)
    with db.write() as session:
        attempts.lose(session, job_id, 1, "The node was lost")
    take_up(job_id, 2)
    report(job_id, 2, 3, 4)
    with db.write() as session:
        attempts.succeed(session, job_id, 2, Outcome("m", 20, [], None))
    first, second = of_job(job_id)
    assert (first["first_step"], first["last_step"], first["end"], first["code"]) == (1, 3, "lost", "worker_lost")
    assert first["message"] == "The node was lost: the job is queued again"
    assert (second["first_step"], second["last_step"], second["end"], second["code"]) == (3, 4, "succeeded", None)
    assert first["nodes"] == second["nodes"] == [{"node": "a", "node_rank": 0, "slots": 1}]
    assert first["placed_at"] <= first["started_at"] <= first["ended_at"] <= second["placed_at"] <= second["ended_at"]


def test_one_that_runs_has_no_end_yet(job_id: str) -> None:
    take_up(job_id, 1)
    (attempt,) = of_job(job_id)
    assert (attempt["end"], attempt["ended_at"], attempt["first_step"]) == (None, None, None)


def test_a_failure_gives_its_code_and_a_resume_adds_a_try(job_id: str, project_id: str) -> None:
    factories.update_job(job_id, training_file="hf://datasets/a/b")
    take_up(job_id, 1)
    with db.write() as session:
        attempts.fail(session, job_id, 1, "disk_full", "The disk is full")
    jobs.resume_job(project_id, job_id)
    take_up(job_id, 2)
    first, second = of_job(job_id)
    assert (first["end"], first["code"], first["message"]) == ("failed", "disk_full", "The disk is full")
    assert second["end"] is None


def test_what_the_service_itself_stopped_is_told_from_what_was_lost(job_id: str) -> None:
    take_up(job_id, 1)
    with db.write() as session:
        attempts.lose(session, job_id, 1, "The node is shutting down", counts=False)
    assert ends(job_id) == ["stopped"]


def test_a_try_that_no_supervisor_took_up_says_so(job_id: str) -> None:
    assert placement.place_all() == 1
    with db.write() as session:
        attempts.give_back_unclaimed(session, job_id, 1)
    assert ends(job_id) == ["not_started"]


@pytest.mark.parametrize(("change", "end"), [(jobs.cancel_job, "cancelled"), (jobs.pause_job, "paused")])
def test_a_job_that_leaves_before_it_was_taken_up_ends_its_try(job_id: str, project_id: str, change: Any, end: str) -> None:
    assert placement.place_all() == 1
    change(project_id, job_id)
    assert ends(job_id) == [end]


def test_a_job_that_circles_ends_with_a_row_per_try(job_id: str) -> None:
    for number in range(1, get_settings().max_attempts + 1):
        take_up(job_id, number)
        with db.write() as session:
            attempts.lose(session, job_id, number, "The node was lost")
    assert ends(job_id) == ["lost"] * (get_settings().max_attempts - 1) + ["failed"]
    assert of_job(job_id)[-1]["code"] == "worker_lost"


class TestRoute:
    def test_the_tries_come_oldest_first(self, live: Live, http: httpx2.Client) -> None:
        job_id = factories.create_job(live.project_id, status="running", attempt=2)
        with db.write() as session:
            for number in (1, 2):
                history.begin(session, job_id, number)
            history.end(session, job_id, 1, history.End.LOST, "The node was lost", "worker_lost")
        listed = http.get(f"/v1/fine_tuning/jobs/{job_id}/attempts").json()
        assert [attempt["attempt"] for attempt in listed["data"]] == [1, 2]
        assert [attempt["end"] for attempt in listed["data"]] == ["lost", None]
        assert not listed["has_more"]

    def test_another_projects_job_is_not_found(self, live: Live, http: httpx2.Client) -> None:
        with db.write() as session:
            stranger = keys.create_project(session, f"stranger to {live.project_id}").id
        answer = http.get(f"/v1/fine_tuning/jobs/{factories.create_job(stranger)}/attempts")
        assert answer.status_code == 404
