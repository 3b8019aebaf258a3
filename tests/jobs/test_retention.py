"""What an ended job leaves: what goes, when, and what never does. Time passes by the stamps in the database."""

import os
import time
from typing import Any

import pytest
from sqlalchemy import func, select, update

from app import db, storage
from app.config import get_settings
from app.files import service as files
from app.jobs import queries, retention
from app.jobs.logs import log_key
from app.jobs.tables import Artifact, Checkpoint, Event, Job
from app.keys import service as keys
from app.models.tables import FineTunedModel
from tests import factories
from worker import sweeper

DAY = 24 * 3600.0


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def ended(project_id: str, days_ago: float, status: str = "failed", **values: Any) -> str:
    """A job that ended so long ago with a checkpoint, a log and a story."""
    job_id = factories.create_job(project_id, status=status, attempt=1, **values)
    age(job_id, days_ago)
    with storage.writer(f"{checkpoint_key(job_id)}/state.bin") as file:
        file.write(b"state")
    factories.add_checkpoint(job_id, 4)
    with db.write() as session:
        session.execute(update(Checkpoint).where(Checkpoint.job_id == job_id).values(storage_key=checkpoint_key(job_id)))
    factories.write_log(job_id, 1, "a line\n")
    factories.add_events(job_id, "Step 1/4", kind="metrics")
    factories.add_metrics(job_id, range(1, 5))
    factories.add_events(job_id, "The job ended", data={"status": status})
    return job_id


def age(job_id: str, days: float) -> None:
    with db.write() as session:
        now = session.scalar(select(db.now()))
        assert now is not None
        session.get_one(Job, job_id).finished_at = now - days * DAY


def checkpoint_key(job_id: str) -> str:
    return f"jobs/{job_id}/attempt-1/checkpoints/checkpoint-4"


def stored(job_id: str) -> list[str]:
    return [key.removeprefix(f"jobs/{job_id}/attempt-1/") for key in storage.keys(f"jobs/{job_id}")]


def count(table: Any, job_id: str) -> int:
    with db.read() as connection:
        statement = select(func.count()).select_from(table).where(table.job_id == job_id)
        return int(connection.execute(statement).scalar_one())


def test_a_young_job_keeps_everything(project_id: str) -> None:
    job_id = ended(project_id, days_ago=1)
    assert retention.sweep() == 0
    assert stored(job_id) == ["checkpoints/checkpoint-4/state.bin", "trainer.log"]


def test_checkpoints_logs_and_events_go_in_their_time(project_id: str) -> None:
    job_id = ended(project_id, days_ago=31)
    retention.sweep()
    assert (stored(job_id), count(Checkpoint, job_id)) == (["trainer.log"], 0)
    age(job_id, 91)
    retention.sweep()
    assert (stored(job_id), count(Event, job_id)) == ([], 2)
    age(job_id, 366)
    retention.sweep()
    with db.read() as connection:
        assert connection.execute(select(Event.message).where(Event.job_id == job_id)).scalars().all() == ["The job ended"]
        assert queries.metrics(connection, job_id, since_step=0, max_points=10) == (0, {"step": []})
        assert queries.events_beyond(connection, job_id, 0)[1]


def test_a_job_that_was_swept_is_not_looked_at_again_before_its_next_age(project_id: str) -> None:
    ended(project_id, days_ago=31)
    assert (retention.sweep(), retention.sweep()) == (1, 0)


@pytest.mark.parametrize("status", ["queued", "running", "paused"])
def test_a_job_that_has_not_ended_keeps_everything(project_id: str, status: str) -> None:
    job_id = ended(project_id, days_ago=1000, status=status)
    retention.sweep()
    assert len(stored(job_id)) == 2


def test_a_models_files_stay_until_it_is_deleted(project_id: str) -> None:
    job_id = ended(project_id, days_ago=1000, status="succeeded")
    factories.add_artifact(job_id, "adapter/adapter_model.safetensors", b"weights")
    model_id = factories.create_model(project_id, job_id)
    retention.sweep()
    assert stored(job_id) == ["artifacts/adapter/adapter_model.safetensors"]
    with db.write() as session:
        session.get_one(FineTunedModel, model_id).deleted_at = 1.0
    retention.sweep()
    assert (stored(job_id), count(Artifact, job_id)) == ([], 0)


def test_a_model_that_was_deleted_a_moment_ago_keeps_its_files(project_id: str) -> None:
    job_id = ended(project_id, days_ago=1000, status="succeeded")
    factories.add_artifact(job_id, "adapter.safetensors", b"weights")
    model_id = factories.create_model(project_id, job_id)
    with db.write() as session:
        session.get_one(FineTunedModel, model_id).deleted_at = session.scalar(select(db.now()))
    retention.sweep()
    assert stored(job_id) == ["artifacts/adapter.safetensors"]


def test_what_an_unfinished_job_starts_from_stays(project_id: str) -> None:
    job_id = ended(project_id, days_ago=1000)
    heir = factories.create_job(project_id, model=f"ft:base:tuneyard::{job_id.removeprefix('ftjob-')}:ckpt-step-4")
    retention.sweep()
    assert count(Checkpoint, job_id) == 1
    assert stored(job_id) == ["checkpoints/checkpoint-4/state.bin"]
    factories.update_job(heir, status="succeeded", finished_at=1.0)
    factories.update_job(job_id, swept_until_s=0.0)
    retention.sweep()
    assert stored(job_id) == []


def test_a_sweep_that_was_cut_off_is_done_again(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = ended(project_id, days_ago=31)

    def cut_off(key: str) -> None:
        raise OSError(f"killed before {key} was deleted")

    with monkeypatch.context() as killed:
        killed.setattr(storage, "delete", cut_off)
        with pytest.raises(OSError, match="killed"):
            retention.sweep()
    assert count(Checkpoint, job_id) == 0  # nothing is listed that may be gone
    retention.sweep()
    assert stored(job_id) == ["trainer.log"]


def test_what_a_resumed_job_writes_while_it_is_swept_stays(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = ended(project_id, days_ago=31)
    delete = storage.delete

    def resumed_meanwhile(key: str) -> None:
        factories.update_job(job_id, status="running", attempt=2)
        factories.write_log(job_id, 2, "the next try")
        delete(key)

    monkeypatch.setattr(storage, "delete", resumed_meanwhile)
    retention.sweep()
    assert log_key(job_id, 2) in storage.keys(f"jobs/{job_id}")
    with db.write() as session:
        assert session.get_one(Job, job_id).swept_until_s == 0.0


def test_checkpoints_beyond_the_size_go_oldest_first(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = ended(project_id, days_ago=2), ended(project_id, days_ago=1)
    monkeypatch.setenv("TUNEYARD_RETENTION_CHECKPOINTS_GB", "7e-9")  # one of 5 bytes
    get_settings.cache_clear()
    retention.sweep()
    assert (count(Checkpoint, older), count(Checkpoint, newer)) == (0, 1)
    assert stored(older) == ["trainer.log"]


class TestStorage:
    def test_bytes_without_a_row_go_when_they_are_old(self, project_id: str) -> None:
        for key in ("files/file-lost", "jobs/ftjob-lost/attempt-1/trainer.log"):
            with storage.writer(key) as file:
                file.write(b"left by a crash")
        sweeper.sweep_storage()
        assert len(storage.keys("")) == 2
        make_old("files/file-lost", "jobs/ftjob-lost/attempt-1/trainer.log")
        sweeper.sweep_storage()
        assert storage.keys("") == []

    def test_old_bytes_with_a_row_stay(self, project_id: str) -> None:
        with db.write() as session:
            file_id = files.store_result_file(session, project_id, "step_metrics.csv", b"step\n")
        factories.write_log(job_id := factories.create_job(project_id), 1, "a line\n")
        make_old(f"files/{file_id}", log_key(job_id, 1))
        sweeper.sweep_storage()
        assert len(storage.keys("")) == 2

    def test_what_two_control_workers_sweep_at_once_is_no_error(self, project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        job_id = ended(project_id, days_ago=31)
        delete = storage.delete
        monkeypatch.setattr(storage, "delete", lambda key: (delete(key), delete(key)))
        retention.sweep()
        assert stored(job_id) == ["trainer.log"]


def make_old(*keys: str) -> None:
    long_ago = time.time() - 1000 * DAY
    for key in keys:
        os.utime(get_settings().resolved_storage_url + "/" + key, (long_ago, long_ago))
