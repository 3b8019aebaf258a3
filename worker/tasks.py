"""Celery tasks: a few lines each, safe to run twice or at once. Run by `tuneyard control` and `tuneyard node`."""

import contextlib
import subprocess
import sys
import threading
from typing import Any

from celery.signals import worker_ready, worker_shutdown, worker_shutting_down

from app import db
from app.config import get_settings
from app.files import validation
from app.jobs import validating
from app.nodes import placement
from app.nodes import service as nodes
from app.queue import celery
from worker import messenger, node, sweeper, ticker
from worker.workspace import Run

NODE_PREFIX = "node@"
_ending = threading.Event()
_starting: set[Run] = set()
_starts_fail = threading.Event()


@celery.task(name="place")
def place() -> None:
    """Give waiting jobs their nodes."""
    placement.place_all()


@celery.task(name="validate")
def validate() -> None:
    """Read new files through, and let the jobs go on that wait for them."""
    with contextlib.suppress(validation.Interrupted):
        while validation.validate_next(_ending):
            validating.settle_all()


@celery.task(name="launch")
def launch(job_id: str, attempt: int, node_rank: int) -> None:
    """Start the detached supervisor of one placement; a second delivery finds it claimed, or about to be, and ends.

    A supervisor costs a second of CPU before it can look itself. A node that is slow to start them gets every wake-up again,
    and those of placements that were given back meanwhile: were each of them to start one, it would never catch up.
    """
    run = Run(job_id, attempt, node_rank)
    if run in _starting or not placement.is_unclaimed(job_id, attempt, node_rank):
        return
    _starting.add(run)
    try:
        command = [sys.executable, "-m", "worker.supervisor", job_id, str(attempt), str(node_rank)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        _starts_fail.clear()
    except Exception:
        _starts_fail.set()
        raise
    finally:
        _starting.discard(run)


@celery.task(name="hear")
def hear() -> None:
    """This node takes wake-ups, and so jobs again, unless it could not start the last one."""
    if not _starts_fail.is_set():
        with db.write() as session:
            nodes.trust(session, node.node_name())


@worker_ready.connect
def _start_thread(sender: Any, **_: Any) -> None:
    if sender.hostname.startswith(NODE_PREFIX):
        node.start_reporting()
        sweeper.start(sweeper.sweep_workspaces)
    else:
        ticker.start()
        messenger.start()
        sweeper.start(sweeper.sweep_storage)


@worker_shutting_down.connect
def _interrupt_readings(**_: Any) -> None:
    _ending.set()


@worker_shutdown.connect
def _stop_jobs(sender: Any, **_: Any) -> None:
    if sender.hostname.startswith(NODE_PREFIX) and get_settings().stop_jobs_with_node:
        node.stop_supervisors()
