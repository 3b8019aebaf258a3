"""How an attempt ends, whatever happens to it."""

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from app import db
from app.config import get_settings
from app.jobs.tables import Job
from app.keys import service as keys
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.nodes.tables import Node, Placement
from tests import factories
from tests.worker.test_failures import RANK_1_KILLED
from worker import gang, launch, prepare, supervisor
from worker.failures import JobFailed, Stopped
from worker.heartbeat import Heartbeat
from worker.reporter import Reporter
from worker.workspace import Result, Run, Workspace, write_json


@pytest.fixture
def run(database: str) -> Run:
    """The first attempt of a running job."""
    with db.write() as session:
        project_id = keys.create_project(session, "test").id
    return Run(factories.create_job(project_id, status="running", attempt=1, num_starts=1), 1)


def test_a_log_that_cannot_be_stored_does_not_hide_why_the_attempt_ends(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def cancelled(*_: object) -> None:
        raise Stopped("cancel")

    monkeypatch.setattr(prepare, "prepare_workspace", lambda *_: None)
    monkeypatch.setattr(launch, "start_trainer", cancelled)
    monkeypatch.setattr(Reporter, "upload_log", full)
    placement: Any = type("Placement", (), {"gpu_uuids": []})
    workspace = Workspace(tmp_path)
    with Heartbeat(run, workspace) as heartbeat:
        ending = supervisor._run_to_end(run, placement, workspace, heartbeat)
    supervisor._write_end(run, supervisor._end_of(run, ending))
    with db.write() as session:
        assert session.get_one(Job, run.job_id).status == "cancelled"


def test_a_gpu_that_keeps_memory_leaves_the_pool_before_the_attempt_ends(run: Run, tmp_path: Path) -> None:
    gpus = [{"uuid": "GPU-0", "name": "H200", "memory_bytes": 1}, {"uuid": "GPU-1", "name": "H200", "memory_bytes": 1}]
    with db.write() as session:
        nodes.register(session, NodeReport("g", "127.0.0.1", "gpu", 2, gpus, {}))
        held = {"job_id": run.job_id, "attempt": 1, "node_rank": 0, "node_id": "g", "slots": 2, "state": "claimed"}
        session.add(Placement(gpu_uuids=["GPU-0", "GPU-1"], **held))
        session.execute(update(Node).values(free_slots=0))
    gang.report(run, Stopped("cancel"), Workspace(tmp_path), "g", ["GPU-1"])
    supervisor._write_end(run, supervisor._end_of(run, Stopped("cancel")))
    with db.write() as session:
        assert session.get_one(Job, run.job_id).status == "cancelled"
        node = session.get_one(Node, "g")
        assert (node.free_slots, node.quarantined) == (1, ["GPU-1"])


def test_the_trainers_last_lines_wait_for_a_database_that_is_away(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the lease: the trainer has stopped by then, and its last checkpoint is where the job goes on."""
    monkeypatch.setattr("worker.supervisor.time.sleep", lambda _: None)
    tries: list[bool] = []

    def report() -> None:
        tries.append(heartbeat._enforcing)
        if len(tries) < 5:
            raise OperationalError("UPDATE", {}, Exception("connection refused"))

    heartbeat = Heartbeat(run, Workspace(tmp_path))
    heartbeat.request_stop("unreachable")
    supervisor._report_rest(report, heartbeat)
    assert tries == [True, False, False, False, False]  # from then on it is no supervisor that hangs


def test_an_outage_of_the_database_is_no_failed_try(run: Run) -> None:
    supervisor._write_end(run, supervisor._end_of(run, Stopped("unreachable")))
    with db.write() as session:
        job = session.get_one(Job, run.job_id)
        assert (job.status, job.num_starts) == ("queued", 0)


def test_nor_is_one_while_the_result_is_handed_over_not_even_of_the_last_try(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restarting(*_: object) -> None:
        raise OperationalError("SELECT", {}, Exception("the database system is shutting down"))

    monkeypatch.setenv("TUNEYARD_MAX_ATTEMPTS", "1")
    get_settings.cache_clear()
    monkeypatch.setattr(supervisor, "_work", restarting)
    placement: Any = None
    workspace = Workspace(tmp_path)
    with Heartbeat(run, workspace) as heartbeat:
        ending = supervisor._run_to_end(run, placement, workspace, heartbeat)
    supervisor._write_end(run, supervisor._end_of(run, ending))
    with db.write() as session:
        job = session.get_one(Job, run.job_id)
        assert (job.status, job.num_starts) == ("queued", 0)


def test_a_rank_that_the_kernel_killed_for_its_memory_is_told_as_that(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own count and a rank ended by SIGKILL: together they leave no other cause."""
    workspace = Workspace(tmp_path)
    workspace.trainer_log.write_text(RANK_1_KILLED)
    counts = iter([3, 4])
    monkeypatch.setattr(supervisor, "oom_kills", lambda: next(counts))
    with subprocess.Popen(["false"]) as trainer, pytest.raises(JobFailed) as failed:
        supervisor._follow(trainer, run, workspace, Heartbeat(run, workspace), lambda: None, 3600)
    assert (failed.value.code, failed.value.param) == ("host_out_of_memory", "parallelism.nproc_per_node")


def test_a_trainer_that_hangs_after_its_result_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    """Its result decides, not its exit."""
    workspace = Workspace(tmp_path)
    write_json(workspace.result, Result("finished", 2, 2, 10, 1.0))
    handed_over = time.time() - supervisor.TEARDOWN_S - 1
    os.utime(workspace.result, (handed_over, handed_over))
    environment = {launch.MARK: run.mark}
    with subprocess.Popen(["sleep", "600"], env=environment | {"PATH": os.environ["PATH"]}) as trainer:
        supervisor._follow(trainer, run, workspace, Heartbeat(run, workspace), lambda: None, 3600)
        assert trainer.poll() is not None
