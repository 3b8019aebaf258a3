"""Celery tasks: a few lines each, safe to run twice or at once. Run by `tuneyard control` and `tuneyard node`."""

import subprocess
import sys
from typing import Any

from celery.signals import worker_ready

from app import db
from app.jobs import attempts
from app.nodes import placement
from app.queue import celery
from worker import node

NODE_PREFIX = "node@"


@celery.task(name="place")
def place() -> None:
    """Give waiting jobs their nodes."""
    placement.place_all()


@celery.task(name="launch")
def launch(job_id: str, attempt: int, node_rank: int) -> None:
    """Start the detached supervisor of one placement; a second delivery finds it claimed and ends."""
    command = [sys.executable, "-m", "worker.supervisor", job_id, str(attempt), str(node_rank)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


@celery.task(name="tick")
def tick() -> None:
    """Find what lost messages and lost workers left behind."""
    with db.write() as session:
        for job_id, attempt in attempts.expired(session):
            attempts.lose(session, job_id, attempt, "The job's worker was lost")
    placement.resend_lost_launches()
    placement.place_all()


@worker_ready.connect
def _report(sender: Any, **_: Any) -> None:
    if sender.hostname.startswith(NODE_PREFIX):
        node.start_reporting()
