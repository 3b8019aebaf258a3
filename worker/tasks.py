"""Celery tasks: a few lines each, safe to run twice or at once. Run by `tuneyard control` and `tuneyard node`."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from celery.signals import worker_ready, worker_shutdown, worker_shutting_down

from app import db
from app.config import get_settings
from app.files import validation
from app.jobs import validating
from app.nodes import placement
from app.nodes import service as nodes
from app.previews import service as previews
from app.queue import celery
from worker import check as checker
from worker import messenger, node, sweeper, ticker
from worker import preview as previewer
from worker.workspace import Run

NODE_PREFIX = "node@"
_ending = threading.Event()
_starting: set[Run] = set()
_starts_fail = threading.Event()
_aside = threading.Lock()


@celery.task(name="place")
def place() -> None:
    """Give waiting jobs their nodes."""
    placement.place_all()


@celery.task(name="validate")
def validate() -> None:
    """Read new files through, and let the jobs go on that wait for them."""
    with contextlib.suppress(validation.Interrupted):
        validating.settle_all()
        while validation.validate_next(_ending):
            validating.settle_all()


@celery.task(name="preview")
def preview() -> None:
    """Answer what is asked of any node."""
    with _one_aside() as is_free:
        while is_free and not _ending.is_set() and (question := previews.claim_next()) is not None:
            previewer.run(question, _ending)


@celery.task(name="check")
def check() -> None:
    """Check the rows of jobs that would take GPUs."""
    with _one_aside() as is_free:
        while is_free and not _ending.is_set() and (job := validating.claim_check()) is not None:
            checker.run(job, _ending)


@contextlib.contextmanager
def _one_aside() -> Iterator[bool]:
    """One process beside the jobs at a time, so that no launch waits for a thread: what comes too early is sent again."""
    is_free = _aside.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            _aside.release()


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
def _interrupt(**_: Any) -> None:
    _ending.set()


@worker_shutdown.connect
def _stop_jobs(sender: Any, **_: Any) -> None:
    if sender.hostname.startswith(NODE_PREFIX) and get_settings().stop_jobs_with_node:
        node.stop_supervisors()
