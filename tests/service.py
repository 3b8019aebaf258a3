"""The whole service as a user starts it, for tests: `tuneyard up` in a process of its own, driven by the official SDK."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob

from tests.servers import free_port
from worker import launch

TERMINAL = {"succeeded", "failed", "cancelled"}
# How long anything may take on a loaded machine of two cores before a test gives up on it.
PATIENCE_S = 180.0


@dataclass
class Service:
    """A running `tuneyard up` and how to reach it."""

    data_dir: Path
    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    clients: list[OpenAI] = field(default_factory=list)

    def start(self) -> None:
        """Start and wait until it says that it is ready."""
        command = [sys.executable, "-m", "app.cli", "up", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        with self.out.open("wb") as out:
            environment = os.environ | self.environment
            # Tests under nohup ignore SIGHUP; a service at a terminal does not.
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, preexec_fn=_hear_hangups)
        wait_until(self._is_ready, "the service is ready", 60)

    def stop(self, signum: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does; its exit status."""
        for client in self.clients:
            client.close()
        self.clients.clear()
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(PATIENCE_S)

    @property
    def out(self) -> Path:
        """What it printed."""
        return self.data_dir.with_suffix(".out")

    @property
    def key(self) -> str:
        return (self.data_dir / "api-key").read_text().strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def client(self) -> OpenAI:
        """The official SDK, as its users make it."""
        if not self.clients:
            self.clients.append(OpenAI(base_url=self.url, api_key=self.key))
        return self.clients[0]

    def child(self, *words: str) -> psutil.Process:
        """The process below the service whose command line holds all these words."""
        assert self.process is not None
        return next(p for p in psutil.Process(self.process.pid).children(recursive=True) if _matches(p, words))

    def upload(self, path: Path) -> str:
        with path.open("rb") as file:
            return self.client.files.create(file=file, purpose="fine-tune").id

    def create_job(self, model: Path | str, training_file: str, spec: dict[str, Any], **fields: Any) -> FineTuningJob:
        jobs = self.client.fine_tuning.jobs
        return jobs.create(model=str(model), training_file=training_file, extra_body={"spec": spec}, **fields)

    def wait_for_end(self, job_id: str) -> FineTuningJob:
        """Poll as a dashboard does until the job has ended."""
        jobs = self.client.fine_tuning.jobs
        wait_until(lambda: jobs.retrieve(job_id).status in TERMINAL, f"{job_id} ends")
        return jobs.retrieve(job_id)

    def wait_for_step(self, job_id: str, step: int) -> None:
        """Wait until the job has reported a step; an end before that fails the test with the job's error."""

        def reached() -> bool:
            job = self.client.fine_tuning.jobs.retrieve(job_id)
            assert job.status not in TERMINAL, job.error
            progress = (job.model_extra or {}).get("progress") or {}
            return int(progress.get("step") or 0) >= step

        wait_until(reached, f"{job_id} reaches step {step}")

    def losses(self, job_id: str) -> list[float]:
        """The training loss of every step, from the metrics route."""
        response = self.client.get(f"/fine_tuning/jobs/{job_id}/metrics?max_points=1000", cast_to=object)
        assert isinstance(response, dict)
        losses: list[float] = response["columns"]["loss"]
        assert all(loss is not None for loss in losses)
        return losses

    def download(self, job_id: str, folder: Path) -> Path:
        """Every artifact of a job below `folder`, as anybody downloads them."""
        listed = self.client.get(f"/fine_tuning/jobs/{job_id}/artifacts", cast_to=object)
        assert isinstance(listed, dict)
        for name in (artifact["name"] for artifact in listed["data"]):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"{self.url}/fine_tuning/jobs/{job_id}/artifacts/{name}/content"
            answer = httpx2.get(url, headers={"Authorization": f"Bearer {self.key}"})
            path.write_bytes(answer.raise_for_status().content)
        return folder

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.out.read_text()
        with contextlib.suppress(OSError):
            return "ready at" in self.out.read_text()
        return False


@contextlib.contextmanager
def running(data_dir: Path, **environment: str) -> Iterator[Service]:
    """A service for the block; everything it started is gone after it, and asserted to be."""
    service = Service(data_dir, free_port(), {"OMP_NUM_THREADS": "1", "TUNEYARD_HEARTBEAT_S": "0.5", **environment})
    service.start()
    try:
        yield service
    finally:
        assert service.process is not None
        is_up = service.process.poll() is None  # a test may have ended it itself
        started = psutil.Process(service.process.pid).children(recursive=True) if is_up else []
        service.stop()
        left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"


def _hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll a condition; AssertionError naming it when patience runs out."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain until {what}"
        time.sleep(0.1)


def trainer_processes_of(job_id: str) -> list[psutil.Process]:
    """What must be gone when a job has ended: torch elastic, ranks, verifier."""
    return [process for process in psutil.process_iter() if _is_marked(process, job_id)]


def processes_of(job_id: str) -> list[psutil.Process]:
    """Every living process that belongs to a job: supervisor, torch elastic, ranks, verifier."""
    return [process for process in psutil.process_iter() if _belongs(process, job_id)]


def _belongs(process: psutil.Process, job_id: str) -> bool:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and (job_id in process.cmdline() or _is_marked(process, job_id))
    except psutil.Error:
        return False


def _is_marked(process: psutil.Process, job_id: str) -> bool:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and str(process.environ().get(launch.MARK, "")).startswith(job_id + ".")
    except psutil.Error:
        return False


def _matches(process: psutil.Process, words: tuple[str, ...]) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return all(any(word in part for part in command) for word in words)
