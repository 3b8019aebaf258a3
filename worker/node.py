"""This machine as a node: what it has, that it is alive, and what it really runs."""

import importlib.metadata
import logging
import os
import platform
import socket
import threading
from collections.abc import Sequence

import psutil
from sqlalchemy import RowMapping

from app import db
from app.config import get_settings
from app.jobs import attempts
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from worker import gpus, launch, tracking
from worker.workspace import Run

log = logging.getLogger(__name__)

STOP_MARGIN_S = 15.0  # beyond the trainer's own grace: its last checkpoint is stored, the job queued again

GPU_PATIENCE_S = 10.0  # less than a supervisor has: while it waits, this node does not report


def node_name() -> str:
    """This machine's name among the nodes."""
    return get_settings().node_name or socket.gethostname()


def start_reporting() -> None:
    """Register now, then report from a thread of this process for as long as it lives."""
    threading.Thread(target=_report_for_ever, name="node-report", daemon=True).start()


def _report_for_ever() -> None:
    pause = threading.Event()
    registered = False
    while True:
        try:
            with db.write() as session:
                registered = registered and nodes.heartbeat(session, node_name())
                if not registered:
                    nodes.register(session, describe())
            if not registered:
                kill_stale_attempts()
            registered = True
            report_dead_supervisors()
            tracking.start_again()
        except Exception:  # the database is away: go on reporting, it comes back
            log.warning("node report failed; trying again", exc_info=True)
            registered = False  # it may have been away for long: the two sides compare what they know
        pause.wait(get_settings().heartbeat_s)


def report_dead_supervisors() -> None:
    """A death this node sees is not waited for: attempts whose supervisor is gone are given up at once."""
    for placement in _claimed_here():
        run = Run(placement["job_id"], placement["attempt"], placement["node_rank"])
        if _is_supervisor(placement["supervisor_pid"], run.job_id):
            continue
        if not launch.kill_attempt(run, wait_s=2.0):
            continue  # what survives SIGKILL still holds its GPU: look again at the next report
        held = gpus.still_held(placement["gpu_uuids"], GPU_PATIENCE_S)
        with db.write() as session:
            attempts.quarantine(session, run.job_id, run.attempt, node_name(), held)
            attempts.lose_part(session, run.job_id, run.attempt, run.node_rank, "The job's supervisor was lost")


def kill_stale_attempts() -> None:
    """After a cut: what still trains here and holds its job no more, as another node may have it, dies."""
    # First what runs, then what may: an attempt that starts in between is in neither list.
    running = launch.running_attempts(get_settings().resolved_workspace_dir)
    with db.read() as connection:
        stale = [run for run in running if not nodes.is_claimed(connection, run.job_id, run.attempt, run.node_rank)]
    for run in stale:
        log.warning("attempt %d of job %s runs here and is held by nobody: killing it", run.attempt, run.job_id)
        launch.kill_attempt(run, wait_s=2.0)


def stop_supervisors() -> None:
    """Let every job of this node save, requeue and stop, as where the machine or its container is about to go."""
    running = [placement for placement in _claimed_here() if _is_supervisor(placement["supervisor_pid"], placement["job_id"])]
    processes = [psutil.Process(placement["supervisor_pid"]) for placement in running]
    for process in processes:
        process.terminate()
    psutil.wait_procs(processes, timeout=get_settings().stop_grace_s + STOP_MARGIN_S)


def _claimed_here() -> Sequence[RowMapping]:
    with db.read() as connection:
        return nodes.claimed_here(connection, node_name())


def describe() -> NodeReport:
    """The machine's facts, read now."""
    devices, driver = gpus.found()
    return NodeReport(
        name=node_name(),
        address=get_settings().node_address,
        accelerator="gpu" if devices else "cpu",
        slots=len(devices) or get_settings().node_cpu_slots,
        gpus=devices,
        labels=get_settings().node_labels,
        facts={
            "cpu_count": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "disk_free_bytes": _disk_free(),
            "python": platform.python_version(),
            "driver": driver,
            "libraries": {name: _version(name) for name in ("torch", "transformers", "trl", "peft", "accelerate")},
        },
    )


def _is_supervisor(pid: int, job_id: str) -> bool:
    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return "worker.supervisor" in command and job_id in command


def _disk_free() -> int:
    folder = get_settings().resolved_workspace_dir
    folder.mkdir(parents=True, exist_ok=True)
    return int(psutil.disk_usage(str(folder)).free)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
