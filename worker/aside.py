"""A process beside the jobs of a node: on its CPU, after everything else, killed at its time limit."""

import os
import subprocess
import sys
import threading
import time
from typing import Literal

from app.process import die_with_parent

POLL_S = 0.1
NICENESS = 10  # trainers on this host go first
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(module: str, argument: str, limit_s: float, stop: threading.Event) -> Literal["ended", "late", "stopped"]:
    """Run `python -m module argument` to its end, to its limit, or until `stop` is set."""
    deadline = time.monotonic() + limit_s
    command = [sys.executable, "-m", module, argument]
    process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, preexec_fn=_yield_to_others)
    while process.poll() is None and time.monotonic() < deadline and not stop.wait(POLL_S):
        pass
    ended = process.poll() is not None
    process.kill()
    process.wait()
    if ended:
        return "ended"
    return "stopped" if stop.is_set() else "late"


def _yield_to_others() -> None:
    os.nice(NICENESS)
    die_with_parent()
