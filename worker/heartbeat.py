"""The lease of a running attempt: renewed from a thread, with the requests that each renewal brings back."""

import logging
import threading
import time
from types import TracebackType
from typing import Literal

from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.config import get_settings
from app.jobs import attempts
from worker.workspace import Run

log = logging.getLogger(__name__)

Reason = Literal["cancel", "pause", "time_limit", "shutdown", "unreachable", "crashed", "lost"]


class Stopped(Exception):
    """The attempt ends before its work is done."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Heartbeat:
    """Renews the lease while the block runs. The first reason to stop stays; `lost` overrides: then nothing may be written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.reason: Reason | None = None
        self._time_limit_s: float | None = None
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def grace_s(self) -> float:
        """How long the trainer may take to save and stop: not past the end of a lease that cannot be renewed."""
        settings = get_settings()
        match self.reason:
            case "lost":
                return 0.0
            case "unreachable":
                return min(settings.stop_grace_s, 0.1 * settings.lease_s)
            case _:
                return settings.stop_grace_s

    def limit_to(self, seconds: float) -> None:
        """Request a stop once the job has run for so long, all attempts together."""
        self._time_limit_s = seconds

    def request_stop(self, reason: Reason) -> None:
        """Ask for an end; safe in a signal handler."""
        if self.reason is None or reason == "lost":
            self.reason = reason
            self._changed.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but wake at the first request to stop."""
        if self.reason is None:
            self._changed.wait(seconds)
        else:
            time.sleep(seconds)

    def raise_if_stopped(self) -> None:
        """Raises Stopped when an end has been requested."""
        if self.reason is not None:
            raise Stopped(self.reason)

    def _renew_for_ever(self) -> None:
        settings = get_settings()
        renewed_at = counted_at = time.monotonic()
        while not self._ended.wait(settings.heartbeat_s):
            now = time.monotonic()
            try:
                with db.write() as session:
                    lease = attempts.renew_lease(session, self.run.job_id, self.run.attempt, now - counted_at)
            except SQLAlchemyError:
                log.warning("the lease could not be renewed", exc_info=True)
                if time.monotonic() - renewed_at > 0.8 * settings.lease_s:
                    self.request_stop("unreachable")
                continue
            renewed_at = counted_at = now
            self._obey(lease)

    def _obey(self, lease: attempts.Lease | None) -> None:
        if lease is None:
            self.request_stop("lost")
        elif lease.cancel_requested:
            self.request_stop("cancel")
        elif lease.pause_requested:
            self.request_stop("pause")
        elif self._time_limit_s is not None and lease.run_seconds > self._time_limit_s:
            self.request_stop("time_limit")
