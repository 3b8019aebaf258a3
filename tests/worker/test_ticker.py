"""The reaper: what it gives up, and when it holds still."""

import time

import pytest

from app import db
from app.config import get_settings
from app.jobs.tables import Job
from app.keys import service as keys
from tests import factories
from worker.ticker import Reaper


class Clock:
    """The machine's uptime as the reaper sees it, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr("worker.ticker._uptime_s", lambda: self.now)

    def tick(self, reaper: Reaper, seconds: float) -> None:
        """Let time pass in ticks of two seconds."""
        for _ in range(int(seconds / 2)):
            self.now += 2
            reaper.reap()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def expired_job(database: str) -> str:
    """A running job whose lease has ended."""
    with db.write() as session:
        project_id = keys.create_project(session, "test").id
    return factories.create_job(project_id, status="running", attempt=1, num_starts=1, lease_expires_at=1.0)


def status(job_id: str) -> str:
    with db.write() as session:
        return session.get_one(Job, job_id).status


def test_after_its_start_it_gives_every_owner_a_lease_to_report(expired_job: str, clock: Clock) -> None:
    reaper, lease_s = Reaper(), get_settings().lease_s
    clock.tick(reaper, lease_s - 4)
    assert status(expired_job) == "running"
    clock.tick(reaper, 8)
    assert status(expired_job) == "queued"


def test_after_an_outage_it_gives_every_owner_a_lease_again(expired_job: str, clock: Clock) -> None:
    reaper, lease_s = Reaper(), get_settings().lease_s
    clock.tick(reaper, lease_s - 4)
    clock.now += 3 * lease_s  # the database was away, or the machine asleep
    clock.tick(reaper, lease_s - 4)
    assert status(expired_job) == "running"
    clock.tick(reaper, 8)
    assert status(expired_job) == "queued"


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_corrected_wall_clock_changes_nothing(
    expired_job: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    reaper, lease_s = Reaper(), get_settings().lease_s
    clock.tick(reaper, lease_s - 4)
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 3600 * hours)
    clock.tick(reaper, 8)
    assert status(expired_job) == "queued"
