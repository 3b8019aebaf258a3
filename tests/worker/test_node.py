"""What a node does for itself: GPUs that keep memory, and attempts that outlived their right to run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from app import db
from app.config import get_settings
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from tests import factories
from worker import gpus, launch, node
from worker.workspace import Run

GB = 1 << 30


class FakeNvml(ModuleType):
    """NVML of a machine whose GPUs hold what `used` says: no machine of the tests has a GPU that fails."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, used: dict[str, int]) -> None:
        super().__init__("pynvml")
        self.used = used

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used:
            raise self.NVMLError("GPU is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 1) -> SimpleNamespace:
        return SimpleNamespace(used=self.used[handle], total=80 * GB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml({"GPU-0": GB // 2, "GPU-1": 40 * GB})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_gpu_that_keeps_memory_is_told_from_one_that_is_free(nvml: FakeNvml) -> None:
    assert gpus.still_held(["GPU-0", "GPU-1"], patience_s=0) == ["GPU-1"]


def test_a_gpu_that_nvml_cannot_ask_any_more_counts_as_held(nvml: FakeNvml) -> None:
    assert gpus.still_held(["GPU-0", "GPU-gone"], patience_s=0) == ["GPU-gone"]


def test_memory_that_comes_back_in_time_is_waited_for(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.gpus.time.sleep", lambda _: nvml.used.update({"GPU-1": 0}))
    assert gpus.still_held(["GPU-1"], patience_s=60) == []


class TestAfterACut:
    """A process per attempt of job, marked and placed in a workspace as a trainer is."""

    @pytest.fixture
    def job_id(self, database: str) -> str:
        with db.write() as session:
            project_id = keys.create_project(session, "test").id
            nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", 1, [], {}))
        spec = TrainingSpec.model_validate({"resources": {"accelerator": "cpu"}})
        job_id = factories.create_job(project_id, spec=spec.model_dump(mode="json"))
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        return job_id

    @pytest.fixture
    def trainer(self, job_id: str) -> Iterator[psutil.Process]:
        yield from trainer_in(get_settings().resolved_workspace_dir, job_id)

    @pytest.fixture
    def neighbour(self, job_id: str, tmp_path: Path) -> Iterator[psutil.Process]:
        yield from trainer_in(tmp_path / "workspace-of-another-service", job_id)

    def test_an_attempt_that_is_still_held_goes_on(self, job_id: str, trainer: psutil.Process) -> None:
        node.kill_stale_attempts()
        assert trainer.is_running()

    def test_one_that_was_given_up_dies(self, job_id: str, trainer: psutil.Process) -> None:
        with db.write() as session:
            nodes.release(session, job_id, 1)
        node.kill_stale_attempts()
        trainer.wait(timeout=10)  # raises if it lives

    def test_a_neighbouring_services_process_is_left_alone(self, job_id: str, neighbour: psutil.Process) -> None:
        with db.write() as session:
            nodes.release(session, job_id, 1)
        assert Run(job_id, 1) not in launch.running_attempts(get_settings().resolved_workspace_dir)
        node.kill_stale_attempts()
        assert neighbour.is_running()


def trainer_in(workspace_dir: Path, job_id: str) -> Iterator[psutil.Process]:
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)", f"{workspace_dir}/{job_id}/1"]
    with subprocess.Popen(command, env={launch.MARK: Run(job_id, 1).mark}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its new environment can be read from here on
        yield psutil.Process(process.pid)
        process.kill()
