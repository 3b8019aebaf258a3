"""Uploads are read by a control worker: once, whatever is lost, and the jobs on them wait for that."""

import io
import threading

import pytest
from sqlalchemy import select, update

from app import db, storage
from app.errors import InvalidRequest
from app.files import dataset, validation
from app.files import service as files
from app.files.tables import File, Validation
from app.jobs import service as jobs
from app.jobs import validating
from app.jobs.schemas import JobCreate
from app.jobs.tables import Event, Job
from app.keys import service as keys
from tests import factories

GOOD = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
BAD = GOOD + b'{"messages": [{"role": "user", "content": "Hi"}]}\n'


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def upload(project_id: str, content: bytes = GOOD) -> str:
    return files.create_file(project_id, io.BytesIO(content), "a.jsonl", "fine-tune").id


def status(file_id: str) -> tuple[str, str | None]:
    with db.write() as session:
        file = session.get_one(File, file_id)
        return file.status, file.status_details


def end_lease(file_id: str) -> None:
    with db.write() as session:
        session.execute(update(Validation).where(Validation.file_id == file_id).values(leased_until=1.0))


def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that are asked for from now on."""
    asked: list[str] = []
    monkeypatch.setattr("app.queue.celery.send_task", lambda task, **_: asked.append(task))
    return asked


def test_the_report_is_kept_and_its_summary_is_the_files_status(project_id: str) -> None:
    good, bad = upload(project_id), upload(project_id, BAD)
    assert validation.validate_next()
    assert validation.validate_next()
    assert not validation.validate_next()
    assert status(good) == ("processed", None)
    assert status(bad)[0] == "error"
    assert "line 2" in (status(bad)[1] or "")
    with db.read() as connection:
        report = files.validation_report(connection, project_id, bad)
    assert (report["rows_read"], report["rows_used"], report["errors"][0]["code"]) == (2, 1, "no_assistant_turn")


def test_what_no_database_can_hold_is_reported_all_the_same(project_id: str) -> None:
    file_id = upload(project_id, GOOD + b'{"messages": [{"ro\\u0000le": "user"}], "\\u0000": 1}\n')
    assert validation.validate_next()
    assert status(file_id)[0] == "error"


def test_a_file_is_read_by_one_worker_at_a_time(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(project_id)
    seen: list[bool] = []

    def check(*_: object, **__: object) -> dataset.Report:
        seen.append(validation.validate_next())
        return dataset.Report()

    monkeypatch.setattr(dataset, "check", check)
    validation.validate_next()
    assert seen == [False]


def test_a_lost_message_is_sent_again_and_one_for_a_file_that_is_being_read_is_not(
    project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = upload(project_id)
    asked = sent(monkeypatch)
    validation.wake_if_any_waits()
    assert asked == ["validate"]
    with db.write() as session:
        session.execute(update(Validation).values(leased_until=db.now() + 60))
    validation.wake_if_any_waits()
    assert asked == ["validate"]
    end_lease(file_id)
    validation.wake_if_any_waits()
    assert asked == ["validate"] * 2


class Killed(BaseException):
    """Nothing of a killed process runs any more; here at least nothing that is ours."""


def die(*_: object, **__: object) -> dataset.Report:
    raise Killed


def test_a_file_whose_reader_was_killed_is_read_by_the_next_one(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = upload(project_id)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "check", die)
        with pytest.raises(Killed):
            validation.validate_next()
    assert status(file_id)[0] == "uploaded"
    assert not validation.validate_next()  # the lease lasts
    end_lease(file_id)
    assert validation.validate_next()
    assert status(file_id)[0] == "processed"


def test_a_file_that_kills_every_reader_ends_as_an_error(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = upload(project_id)
    monkeypatch.setattr(dataset, "check", die)
    for _ in range(validation.MAX_TRIES):
        with pytest.raises(Killed):
            validation.validate_next()
        end_lease(file_id)
    assert validation.validate_next()
    assert status(file_id) == (
        "error",
        f"The file could not be read to its end, in {validation.MAX_TRIES} tries. (not_readable)",
    )


def test_a_worker_that_is_to_end_leaves_the_file_to_another_at_once(project_id: str) -> None:
    file_id, stop = upload(project_id), threading.Event()
    stop.set()
    for _ in range(validation.MAX_TRIES + 1):  # no try is counted
        with pytest.raises(validation.Interrupted):
            validation.validate_next(stop)
    assert validation.validate_next()
    assert status(file_id)[0] == "processed"


def test_an_upload_deleted_while_it_waits_leaves_nothing(project_id: str) -> None:
    files.delete_file(project_id, upload(project_id))
    assert not validation.validate_next()
    with db.read() as connection:
        assert connection.execute(select(Validation.file_id)).all() == []
    assert storage.keys("files") == []


class TestJobsOnUnreadFiles:
    def create(self, project_id: str, content: bytes, **data: str) -> str:
        body = {"model": "openai/gpt-oss-20b", "training_file": upload(project_id, content), "spec": {"data": data}}
        with db.write() as session:
            return jobs.create_job(session, project_id, JobCreate.model_validate(body)).id

    def job(self, job_id: str) -> Job:
        with db.write() as session:
            return session.get_one(Job, job_id)

    def test_wait_until_it_is_read_and_are_queued(self, project_id: str) -> None:
        job_id = self.create(project_id, GOOD)
        validating.settle_all()
        assert self.job(job_id).status == "validating_files"
        factories.read_uploads()
        assert self.job(job_id).status == "queued"

    def test_fail_with_the_lines_when_it_is_bad(self, project_id: str) -> None:
        job_id = self.create(project_id, BAD)
        factories.read_uploads()
        job = self.job(job_id)
        assert (job.status, job.finished_at is not None) == ("failed", True)
        assert job.error is not None
        assert (job.error["code"], job.error["param"]) == ("invalid_training_file", "training_file")
        assert "line 2" in job.error["message"]
        with db.read() as connection:
            told = (
                connection.execute(select(Event.message).where(Event.job_id == job_id, Event.level == "error")).scalars().all()
            )
        assert told == [f"The job failed: {job.error['message']}"]

    def test_are_queued_when_they_skip_its_bad_rows(self, project_id: str) -> None:
        job_id = self.create(project_id, BAD, on_bad_rows="skip")
        factories.read_uploads()
        assert self.job(job_id).status == "queued"

    def test_can_be_paused_resumed_and_cancelled_meanwhile(self, project_id: str) -> None:
        job_id = self.create(project_id, GOOD)
        jobs.pause_job(project_id, job_id)
        assert self.job(job_id).status == "paused"
        jobs.resume_job(project_id, job_id)
        assert self.job(job_id).status == "validating_files"
        jobs.cancel_job(project_id, job_id)
        factories.read_uploads()
        assert self.job(job_id).status == "cancelled"

    def test_are_refused_at_once_when_it_is_known_to_be_bad(self, project_id: str) -> None:
        file_id = upload(project_id, BAD)
        factories.read_uploads()
        body = JobCreate.model_validate({"model": "openai/gpt-oss-20b", "training_file": file_id})
        with db.write() as session, pytest.raises(InvalidRequest, match="line 2"):
            jobs.create_job(session, project_id, body)
