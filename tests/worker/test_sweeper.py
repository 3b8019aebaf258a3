"""A node's workspaces: which go, which stay."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from app import db
from app.config import get_settings
from app.jobs.tables import Attempt
from app.keys import service as keys
from tests import factories
from worker import launch, sweeper

DAY = 24 * 3600.0


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def attempt(project_id: str, days_ago: float | None, num_bytes: int = 10) -> Path:
    """The folder of a job's first attempt, which ended so long ago or goes on."""
    job_id = factories.create_job(project_id, status="running", attempt=1)
    with db.write() as session:
        now = session.scalar(select(db.now()))
        assert now is not None
        ended_at = None if days_ago is None else now - days_ago * DAY
        session.execute(insert(Attempt).values(job_id=job_id, number=1, ended_at=ended_at))
    folder = get_settings().resolved_workspace_dir / job_id / "1"
    folder.mkdir(parents=True)
    (folder / "trainer.log").write_bytes(b"x" * num_bytes)
    return folder


def test_folders_of_attempts_that_ended_long_ago_go(project_id: str) -> None:
    old, young, live = (attempt(project_id, days) for days in (4, 2, None))
    sweeper.sweep_workspaces()
    assert (old.exists(), old.parent.exists(), young.exists(), live.exists()) == (False, False, True, True)


def test_the_oldest_go_when_all_together_are_too_large(project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer, live = attempt(project_id, 2, 60), attempt(project_id, 1, 60), attempt(project_id, None, 600)
    monkeypatch.setenv("TUNEYARD_RETENTION_WORKSPACES_GB", "1e-7")  # 100 bytes
    get_settings.cache_clear()
    sweeper.sweep_workspaces()
    assert (older.exists(), newer.exists(), live.exists()) == (False, True, True)


def test_other_folders_are_left_alone(project_id: str) -> None:
    cache = get_settings().dequantized_cache_dir / "1"
    cache.mkdir(parents=True)
    sweeper.sweep_workspaces()
    assert cache.exists()


def test_a_folder_that_a_process_still_uses_stays(project_id: str, tracker: Path) -> None:
    sweeper.sweep_workspaces()
    assert tracker.exists()


@pytest.fixture
def tracker(project_id: str) -> Iterator[Path]:
    """Of an old attempt whose result is still being handed over."""
    folder = attempt(project_id, 4)
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)", folder.parent.name, "1", "0"]
    with subprocess.Popen(command, env={launch.MARK: ""}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield folder
        process.kill()
