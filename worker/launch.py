"""Torch elastic for one node rank: start it, follow it, and leave no process behind.

Ranks get sessions of their own from torch elastic, so a process group is not enough to find them: every process of a node's
part in an attempt carries MARK in its environment, and what carries it is what gets killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from app.config import get_settings
from app.jobs.spec import TrainingSpec
from app.process import die_with_parent
from worker.meeting import Meeting
from worker.workspace import Run, Workspace

MARK = "TUNEYARD_ATTEMPT"


def start_trainer(
    workspace: Workspace, run: Run, spec: TrainingSpec, meeting: Meeting, gpu_uuids: list[str], secrets: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `torchrun -m worker.trainer.train WORKSPACE` for this node's ranks. Secrets go by the environment only."""
    command = [
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(spec.parallelism.nnodes), "--nproc-per-node", str(spec.parallelism.nproc_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint, "--rdzv-conf", meeting.conf(run.node_rank)),
        *("--rdzv-id", f"{run.job_id}.{run.attempt}", "--local-addr", meeting.own_address, "--max-restarts", "0"),
        # One stream for all ranks; the agent's own error file keeps the first failing rank's cause.
        *("--log-dir", str(workspace.root / "torchelastic"), "--tee", "3"),
        *("-m", "worker.trainer.train", str(workspace.root)),
    ]
    return _start(command, workspace, run, gpu_uuids, meeting.environment | secrets)


def start_verifier(
    workspace: Workspace, run: Run, export: Path, gpu_uuids: list[str], secrets: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the reload of stored files in a fresh process."""
    return _start(["-m", "worker.trainer.verify", str(workspace.root), str(export)], workspace, run, gpu_uuids, secrets)


def start_hub_push(workspace: Workspace, run: Run, secrets: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the push of the exported files to the Hub."""
    return _start(["-m", "worker.hub", str(workspace.root), run.job_id], workspace, run, [], secrets)


def kill_attempt(run: Run, wait_s: float = 10.0) -> bool:
    """Kill every process of the attempt on this machine and see them gone; False if one is still there after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while found := list(processes_of(run)):
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline:
            return False
        psutil.wait_procs(found, timeout=0.2)
    return True


def dump_stacks(run: Run) -> None:
    """Have every rank that still can write into the log where it is."""
    for process in processes_of(run):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if "worker.trainer.train" in command and "torch.distributed.run" not in command:
                process.send_signal(signal.SIGUSR1)


def processes_of(run: Run) -> Iterator[psutil.Process]:
    """The living processes that carry the attempt's mark, this one excepted."""
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == run.mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def running_attempts(workspace_dir: Path) -> set[Run]:
    """The attempts whose processes live on this machine, with workspaces below this folder: no neighbour's."""
    found = set()
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if mark and any(part.startswith(f"{workspace_dir}/") for part in process.cmdline()):
                job_id, attempt, node_rank = mark.rsplit(".", 2)
                found.add(Run(job_id, int(attempt), int(node_rank)))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _start(
    command: list[str], workspace: Workspace, run: Run, gpu_uuids: list[str], added: dict[str, str]
) -> subprocess.Popen[bytes]:
    # The trainer knows no service: no database URL and no key of ours reaches its environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TUNEYARD_")}
    # One thread a rank unless the operator says otherwise: two in one process were at times ten times slower on 2 cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {
        MARK: run.mark,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHELASTIC_ERROR_FILE": str(workspace.error),
        "TUNEYARD_DEQUANTIZED_CACHE": str(get_settings().dequantized_cache_dir),
        "TUNEYARD_DEQUANTIZED_CACHE_GB": str(get_settings().dequantized_cache_gb),
    }
    environment |= added
    if gpu_uuids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_uuids)
    with workspace.trainer_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
