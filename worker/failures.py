"""What went wrong in a trainer, from the files it and torch elastic leave behind."""

import json
import re
import time
from pathlib import Path
from typing import Literal

from app.config import get_settings
from worker.workspace import Failure, Workspace, read_json

# unmet: the nodes did not come together. broken: another node's part has failed. silent: another node has not been heard of for
# most of the lease.
Reason = Literal[
    "cancel",
    "pause",
    "time_limit",
    "shutdown",
    "unreachable",
    "outage",
    "crashed",
    "stalled",
    "timeout",
    "unmet",
    "broken",
    "silent",
    "lost",
]


class Stopped(Exception):
    """The attempt ends before its work is done; `why` in words, where the reason alone does not say it."""

    def __init__(self, reason: Reason, why: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.why = why


# What a rank says when another one has gone: gloo's and NCCL's errors, and the stores' that they meet through.
COLLATERAL = re.compile(
    r"closed by peer|reset by peer|Broken pipe|gloo/transport|NCCL error|ncclRemoteError|ProcessGroup|recvValue|"
    r"Dist(Backend|Network|Store)Error|Socket (closed|Timeout)|Timed out waiting|RendezvousC"
)


# What torch elastic says at its end of a rank that a signal ended; its own to those that are left is SIGTERM, and after that
# SIGKILL, which it says before.
ENDED_BY = re.compile(r"local_rank: (\d+)\)\s+exitcode\s*: -\d+ \(pid: (\d+)\)\s+\((?!SIGTERM)(SIG\w+)\)")
ENDED_BY_ELASTIC = re.compile(r"Unable to shutdown process (\d+)")
# What gloo and NCCL say of a collective that not every rank came to in time; NCCL then ends the process itself.
TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms|collective operation timeout", re.IGNORECASE)
# What torch elastic says where not all nodes of the job came to its rendezvous in time.
NOT_MET = "RendezvousTimeoutError"
LOG_TAIL_BYTES = 1 << 16
OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")


class JobFailed(Exception):
    """The job cannot succeed as it stands: a stable code, and what to change."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def failure_of(workspace: Workspace) -> Exception:
    """The cause the trainer named, else the first failing rank's exception, else Stopped: a process was killed ("crashed"), one
    waited too long for another ("timeout"), the nodes never met ("unmet"), or there were only ranks that another had left
    behind ("broken")."""
    if workspace.failure.exists():
        failure = Failure(**read_json(workspace.failure))
        return JobFailed(failure.code, failure.message, failure.param)
    cause = _first_rank_error(workspace)
    if cause is not None and NOT_MET in cause:
        limit_s = get_settings().join_timeout_s
        return Stopped("unmet", f"The job's nodes did not all meet within {limit_s:g} s (TUNEYARD_JOIN_TIMEOUT_S)")
    if cause is not None and not COLLATERAL.search(cause):
        return JobFailed("internal_error", f"Training failed: {cause}. The log has the traceback.")
    log = _end_of(workspace.trainer_log)
    if timed_out := TIMED_OUT.search(log if cause is None else cause):
        return Stopped("timeout", f"A rank waited in vain for the others: {timed_out[0]}")
    killed = _who_was_killed(log)
    if killed or cause is None:  # the rank that failed first could say nothing
        return Stopped("crashed", killed)
    return Stopped("broken", "A training process was lost")


def _who_was_killed(log: str) -> str:
    """The first rank that torch elastic saw end by a signal not its own, in words; empty where it saw none."""
    others, _, first = log[log.rfind("Failures:") + 1 :].partition("Root Cause")
    by_elastic = ENDED_BY_ELASTIC.findall(log)
    for rank, pid, name in ENDED_BY.findall(first + others):
        if pid not in by_elastic:
            return f"The training process of local rank {rank} was killed by {name}"
    return ""


def oom_kills() -> int:
    """How many processes the kernel of this host, or the memory limit of this container, has killed since it started."""
    return sum(_count(path) for path in OOM_COUNTERS)


def _count(path: str) -> int:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def age_s(workspace: Workspace) -> float:
    """How long ago the first rank of this node failed, by this node's clock alone; 0 where nothing tells."""
    try:
        if workspace.failure.exists():
            return max(time.time() - workspace.failure.stat().st_mtime, 0.0)
        told = json.loads(workspace.error.read_text(encoding="utf-8"))["message"]["extraInfo"]["timestamp"]
        return max(time.time() - float(told), 0.0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def traceback_of(workspace: Workspace) -> str | None:
    """The traceback that torch elastic recorded for the rank that failed first."""
    try:
        message = json.loads(workspace.error.read_text(encoding="utf-8"))["message"]
        return str(message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - LOG_TAIL_BYTES, 0))
        return file.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """The last line of a log that says something: of a traceback, the exception."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "the log is empty"


def _first_rank_error(workspace: Workspace) -> str | None:
    """The last line of the exception that torch elastic recorded for the rank that failed first."""
    try:
        record = json.loads(workspace.error.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    message = record.get("message", record)
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    return str(text).strip().splitlines()[-1] if str(text).strip() else None
