"""The lease of a running attempt: renewed from a thread, with the requests that each renewal brings back."""

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from app import db
from app.config import get_settings
from app.jobs import attempts
from worker import launch
from worker.workspace import Run, StopRequest, Workspace, write_json

log = logging.getLogger(__name__)

ENFORCE_EVERY_S = 0.25
# Beyond the grace: what the main thread may need for its last upload before it counts as hanging.
GIVE_UP_S = 600.0

Reason = Literal["cancel", "pause", "time_limit", "shutdown", "unreachable", "crashed", "lost"]


class Stopped(Exception):
    """The attempt ends before its work is done."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Heartbeat:
    """Renews the lease while the block runs, and enforces what each renewal asks for from a thread of its own: the main
    thread may be deep in an upload. The first reason to stop stays; `lost` overrides: then nothing may be written.
    """

    def __init__(self, run: Run, workspace: Workspace) -> None:
        self.run = run
        self.workspace = workspace
        self.reason: Reason | None = None
        self._time_limit_s: float | None = None
        self._asked_at: float | None = None
        self._enforcing = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_for_ever, name="lease", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def limit_to(self, seconds: float) -> None:
        """Request a stop once the job has run for so long, all attempts together."""
        self._time_limit_s = seconds

    def request_stop(self, reason: Reason) -> None:
        """Ask for an end; safe in a signal handler."""
        if self.reason is None or reason == "lost":
            self.reason = reason

    def raise_if_stopped(self) -> None:
        """Raises Stopped when an end has been requested."""
        if self.reason is not None:
            raise Stopped(self.reason)

    def stand_down(self) -> None:
        """Only renew from now on: the end is decided and about to be written."""
        self._enforcing = False

    def _beat_for_ever(self) -> None:
        lease = Renewal(self.run)
        while not self._ended.wait(ENFORCE_EVERY_S):
            if reason := lease.renew_if_due(self._time_limit_s):
                self.request_stop(reason)
            if self.reason is not None and self._enforcing:
                self._enforce(self.reason)

    def _enforce(self, reason: Reason) -> None:
        """Ask the trainer to save and stop; kill it when its time is over; give up a main thread that never comes back."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            _try(lambda: write_json(self.workspace.stop, StopRequest(reason)))
        waited, grace_s = time.monotonic() - self._asked_at, _grace_s(reason)
        if waited > grace_s:
            launch.kill_attempt(self.run, wait_s=1.0)
        if waited > grace_s + GIVE_UP_S:
            log.error("the supervisor hangs; its node reports it dead, and the attempt ends as was asked")
            os._exit(1)


class Renewal:
    """When the lease was last renewed, and whether it is time again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._tried_at = self._renewed_at = time.monotonic()

    def renew_if_due(self, time_limit_s: float | None) -> Reason | None:
        """Renew the lease every heartbeat; why the attempt should end, if it should."""
        settings, now = get_settings(), time.monotonic()
        if now - self._tried_at < settings.heartbeat_s:
            return None
        self._tried_at = now
        try:
            with db.write() as session:
                lease = attempts.renew_lease(session, self.run.job_id, self.run.attempt, now - self._renewed_at)
        except Exception:  # the database is away
            log.warning("the lease could not be renewed", exc_info=True)
            return "unreachable" if time.monotonic() - self._renewed_at > 0.8 * settings.lease_s else None
        self._renewed_at = now
        return _asked_for(lease, time_limit_s)


def _asked_for(lease: attempts.Lease | None, time_limit_s: float | None) -> Reason | None:
    if lease is None:
        return "lost"
    if lease.cancel_requested:
        return "cancel"
    if lease.pause_requested:
        return "pause"
    return "time_limit" if time_limit_s is not None and lease.run_seconds > time_limit_s else None


def _grace_s(reason: Reason) -> float:
    """How long the trainer may take to save and stop: not past the end of a lease that cannot be renewed."""
    settings = get_settings()
    match reason:
        case "lost":
            return 0.0
        case "unreachable":
            return min(settings.stop_grace_s, 0.1 * settings.lease_s)
        case _:
            return settings.stop_grace_s


def _try(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError:  # a full disk: the trainer is killed when its grace is over
        log.warning("the stop request could not be written", exc_info=True)
