"""What workers may write, and when: the fence, the tries, the ends."""

import pytest
from sqlalchemy import select

from app import db
from app.config import get_settings
from app.jobs import attempts
from app.jobs.attempts import Outcome, StepRecord
from app.jobs.events import NewEvent
from app.jobs.tables import Event, Job
from app.keys import service as keys
from tests import factories

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def job_id(database: str) -> str:
    """A job whose first attempt runs."""
    with db.write() as session:
        project_id = keys.create_project(session, "test").id
    return factories.create_job(project_id, status="running", attempt=1, num_starts=1)


def read(job_id: str) -> Job:
    with db.write() as session:
        return session.get_one(Job, job_id)


def messages(job_id: str) -> list[str]:
    with db.write() as session:
        return list(session.scalars(select(Event.message).where(Event.job_id == job_id).order_by(Event.seq)))


def step(number: int, loss: float | None) -> StepRecord:
    return StepRecord(number, 10, {"loss": loss}, trained_tokens=5 * number, tokens_per_second=1.0, seconds_left=2.0)


class TestFence:
    def test_an_older_attempt_writes_nothing(self, job_id: str) -> None:
        factories.update_job(job_id, attempt=2)
        with db.write() as session:
            assert attempts.renew_lease(session, job_id, 1, 1.0) is None
            assert not attempts.tell(session, job_id, 1, [NewEvent("late")])
            assert not attempts.record_steps(session, job_id, 1, [step(1, 2.0)])
            assert not attempts.record_checkpoint(session, job_id, 1, 1, {}, "key", "model")
            assert not attempts.succeed(session, job_id, 1, Outcome("m", 1, [], None))
            assert not attempts.fail(session, job_id, 1, "internal_error", "late")
            assert not attempts.lose(session, job_id, 1, "late")
        assert messages(job_id) == []
        assert read(job_id).status == "running"

    def test_an_end_is_final(self, job_id: str) -> None:
        with db.write() as session:
            assert attempts.fail(session, job_id, 1, "loss_not_finite", "The loss became nan")
        with db.write() as session:
            assert not attempts.succeed(session, job_id, 1, Outcome("m", 1, [], None))
            assert not attempts.cancel(session, job_id, 1)
        job = read(job_id)
        assert (job.status, job.error) == (
            "failed",
            {"code": "loss_not_finite", "message": "The loss became nan", "param": None},
        )
        assert messages(job_id) == ["The job failed: The loss became nan"]


class TestSteps:
    def test_a_later_attempt_replaces_the_steps_it_passes_again(self, job_id: str) -> None:
        with db.write() as session:
            attempts.record_steps(session, job_id, 1, [step(1, 3.0), step(2, 2.5)])
        factories.update_job(job_id, attempt=2)
        with db.write() as session:
            attempts.record_steps(session, job_id, 2, [step(2, 2.4)])
            assert attempts.metrics_of(session, job_id) == [(1, {"loss": 3.0}), (2, {"loss": 2.4})]

    def test_an_evaluation_adds_to_its_step_and_keeps_its_speed(self, job_id: str) -> None:
        evaluated = StepRecord(1, 10, {"eval_loss": 2.9}, trained_tokens=5, tokens_per_second=None, seconds_left=None)
        with db.write() as session:
            attempts.record_steps(session, job_id, 1, [step(1, 3.0)])
            attempts.record_steps(session, job_id, 1, [evaluated])
            assert attempts.metrics_of(session, job_id) == [(1, {"loss": 3.0, "eval_loss": 2.9})]
        assert read(job_id).tokens_per_second == 1.0

    def test_a_loss_that_is_not_finite_is_null_not_zero(self, job_id: str) -> None:
        with db.write() as session:
            attempts.record_steps(session, job_id, 1, [step(1, None)])
            assert attempts.metrics_of(session, job_id) == [(1, {"loss": None})]
        assert messages(job_id) == ["Step 1/10: no loss"]


class TestLose:
    def test_another_attempt_follows_until_there_were_enough(self, job_id: str) -> None:
        limit = get_settings().max_attempts
        for attempt in range(1, limit):
            with db.write() as session:
                assert attempts.lose(session, job_id, attempt, "The worker was lost")
            assert read(job_id).status == "queued"
            with db.write() as session:
                assert attempts.begin(session, job_id) == attempt + 1
                assert attempts.start(session, job_id, attempt + 1)
        with db.write() as session:
            attempts.lose(session, job_id, limit, "The worker was lost")
        job = read(job_id)
        assert job.status == "failed"
        assert job.error is not None
        assert job.error["code"] == "worker_lost"

    def test_a_shutdown_of_the_node_is_no_failed_try(self, job_id: str) -> None:
        with db.write() as session:
            attempts.lose(session, job_id, 1, "The node is shutting down", counts=False)
        assert (read(job_id).status, read(job_id).num_starts) == ("queued", 0)

    def test_a_job_that_was_to_be_cancelled_is(self, job_id: str) -> None:
        factories.update_job(job_id, cancel_requested_at=1.0)
        with db.write() as session:
            attempts.lose(session, job_id, 1, "The worker was lost")
        assert read(job_id).status == "cancelled"

    def test_a_cancel_after_a_pause_wins(self, job_id: str) -> None:
        factories.update_job(job_id, pause_requested_at=1.0, cancel_requested_at=2.0)
        with db.write() as session:
            attempts.lose(session, job_id, 1, "The job was asked to pause", counts=False)
        assert read(job_id).status == "cancelled"

    def test_a_job_that_was_to_pause_does(self, job_id: str) -> None:
        factories.update_job(job_id, pause_requested_at=1.0)
        with db.write() as session:
            attempts.lose(session, job_id, 1, "The worker was lost")
        job = read(job_id)
        assert (job.status, job.pause_requested_at, job.finished_at) == ("paused", None, None)

    def test_only_leases_that_ended_are_expired(self, job_id: str) -> None:
        with db.write() as session:
            attempts.renew_lease(session, job_id, 1, 0.0)
        with db.read() as connection:
            assert list(attempts.expired(connection)) == []
        factories.update_job(job_id, lease_expires_at=1.0)
        with db.read() as connection:
            assert list(attempts.expired(connection)) == [(job_id, 1)]


class TestText:
    def test_what_no_database_can_hold_is_replaced(self, job_id: str) -> None:
        with db.write() as session:
            attempts.tell(session, job_id, 1, [NewEvent("a\x00b\ud800", data={"row\x00": ["\ud800"]})])
            attempts.fail(session, job_id, 1, "invalid_training_file", "holds \x00")
        assert messages(job_id)[0] == "a\ufffdb?"
        job = read(job_id)
        assert job.error is not None
        assert job.error["message"] == "holds \ufffd"

    def test_an_answer_that_holds_nul_does_not_keep_the_job_from_its_end(self, job_id: str) -> None:
        answers = [{"messages": [], "base": "a\x00b", "tuned": "c"}]
        with db.write() as session:
            assert attempts.succeed(session, job_id, 1, Outcome("m", 1, [], None, answers))
        assert read(job_id).answers == [{"messages": [], "base": "a\ufffdb", "tuned": "c"}]
