"""The control worker's tick: finds what lost messages and lost workers left behind. Any number may tick at once."""

import logging
import threading
import time

from app import db, queue
from app.config import get_settings
from app.files import validation
from app.jobs import attempts, validating
from app.nodes import placement
from app.previews import service as previews

log = logging.getLogger(__name__)


def start() -> None:
    """Tick from a thread of this process for as long as it lives."""
    threading.Thread(target=_tick_for_ever, name="tick", daemon=True).start()


def _tick_for_ever() -> None:
    reaper = Reaper()
    pause = threading.Event()
    while not pause.wait(queue.TICK_S):
        try:
            reaper.reap()
            placement.resend_lost_launches()
            placement.ask_distrusted_nodes()
            placement.place_all()
            validation.wake_if_any_waits()
            validating.settle_all()
            previews.wake_if_any_waits()
        except Exception:  # the database is away: go on ticking, it comes back
            log.warning("tick failed; trying again", exc_info=True)


class Reaper:
    """Gives up attempts whose lease has ended.

    "Cannot reach" is not "failed": after an outage, a suspend or its own start it waits a whole lease, so that every owner
    that lives has had time to report.
    """

    def __init__(self) -> None:
        self._seen_at = float("-inf")
        self._quiet_until = float("-inf")

    def reap(self) -> None:
        """Requeue or fail every expired job, each in a transaction of its own; raises when the database is away."""
        with db.read() as connection:
            expired = attempts.expired(connection)
        now, lease_s = _uptime_s(), get_settings().lease_s
        if now - self._seen_at > max(0.25 * lease_s, 5 * queue.TICK_S):
            self._quiet_until = now + lease_s
        self._seen_at = now
        if now < self._quiet_until:
            return
        for job_id, attempt in expired:
            with db.write() as session:
                attempts.lose(session, job_id, attempt, "The job's worker was lost")


def _uptime_s() -> float:
    """Seconds since the machine started, those asleep included; no correction of the wall clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
