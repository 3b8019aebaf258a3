"""What can happen to a job over two hosts, done to a real one, and how long each side needs to be down."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.gangs.cluster import Cluster, Node
from tests.service import wait_until
from worker import launch

PATIENCE_S = 120.0
Disaster = Callable[[Cluster, Node], None]


@dataclass(frozen=True)
class Outcome:
    """Seconds from the blow."""

    down: dict[str, float]
    """Per host, until nothing of the struck attempt ran there any more: neither torch elastic nor a rank."""
    queued: float
    """Until the job was given to another attempt."""


def kill_rank(service: Cluster, victim: Node) -> None:
    """One training process, as the kernel does it when memory runs out."""
    victim.ranks()[-1].send_signal(signal.SIGKILL)


def kill_supervisor(service: Cluster, victim: Node) -> None:
    """The process that holds the host's part; its trainer dies with it."""
    victim.supervisor().kill()


def kill_node(service: Cluster, victim: Node) -> None:
    """Everything that runs on the host, as when its power fails."""
    victim.kill()


def cut_link(service: Cluster, victim: Node) -> None:
    """The host goes on, reaching nobody."""
    victim.host.cut()


def strike(service: Cluster, job_id: str, disaster: Disaster, victim: Node, step: int) -> Outcome:
    """Let the disaster happen once the job has done `step` steps, and mend it when the job has been taken from the host."""
    service.wait_for_step(job_id, step)
    attempt = attempt_of(service, job_id)
    wait_until(lambda: all(node.ranks() for node in service.nodes), "both hosts train")
    disaster(service, victim)
    outcome = _watch(service, job_id, attempt)
    victim.host.mend()
    if victim.worker is not None and victim.worker.poll() is not None:
        victim.start()
    return outcome


def attempt_of(service: Cluster, job_id: str) -> int:
    extra = service.client.fine_tuning.jobs.retrieve(job_id).model_extra or {}
    return int(extra["attempt"])


def trains(node: Node, job_id: str, attempt: int) -> bool:
    """Whether anything of this attempt runs on the host."""
    return any(_is_of(process, f"{job_id}.{attempt}.") for process in node.trainers())


def _watch(service: Cluster, job_id: str, attempt: int) -> Outcome:
    start, down, queued = time.monotonic(), dict[str, float](), None
    while queued is None or len(down) < len(service.nodes):
        waited = time.monotonic() - start
        assert waited < PATIENCE_S, f"down: {down}, queued again: {queued}"
        for node in service.nodes:
            if node.name not in down and not trains(node, job_id, attempt):
                down[node.name] = waited
        if queued is None and _has_moved_on(service, job_id, attempt):
            queued = waited
            left = [node.name for node in service.nodes if trains(node, job_id, attempt)]
            assert not left, f"the job was given away while {left} still trained it"
        time.sleep(0.05)
    return Outcome(down, queued)


def _has_moved_on(service: Cluster, job_id: str, attempt: int) -> bool:
    job = service.client.fine_tuning.jobs.retrieve(job_id)
    return job.status != "running" or int((job.model_extra or {})["attempt"]) != attempt


def _is_of(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get(launch.MARK, "")).startswith(mark)
    return False
