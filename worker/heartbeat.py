"""The lease of a running attempt: renewed from a thread, with the requests that each renewal brings back, and enforced from
another one, as a renewal may hang for as long as a cut connection does."""

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from app import db
from app.config import get_settings
from app.jobs import attempts
from worker import launch
from worker.failures import Reason, Stopped
from worker.workspace import Run, StopRequest, Workspace, write_json

log = logging.getLogger(__name__)

ENFORCE_EVERY_S = 0.25
# Beyond the grace: what the main thread may need for its last upload before it counts as hanging.
GIVE_UP_S = 600.0

# What the ranks of this node need to fail by themselves, each with its traceback, once those of another are gone.
BROKEN_GANG_GRACE_S = 2.0
# The part of the lease at whose beginning an attempt that cannot renew it is asked to stop, and half of it until it is killed.
LAST_PART = 0.2


class Heartbeat:
    """Renews the lease while the block runs, and enforces its end and what each renewal asks for: the main thread may be deep
    in an upload. The first reason to stop stays; `lost` overrides: then nothing may be written.
    """

    def __init__(self, run: Run, workspace: Workspace) -> None:
        self.run = run
        self.workspace = workspace
        self.reason: Reason | None = None
        self._alone = False
        self._time_limit_s: float | None = None
        self._asked_at: float | None = None
        self._enforcing = True
        self._ended = threading.Event()
        self._lease = Renewal(run)
        work = {"renew": self._renew_for_ever, "enforce": self._enforce_for_ever}
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in work.items()]

    def __enter__(self) -> "Heartbeat":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

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

    def stand_alone(self) -> None:
        """The other nodes of the job are not needed any more: training is over, here and there."""
        self._alone = True

    def stand_down(self) -> None:
        """Only renew from now on: the end is decided and about to be written."""
        self._enforcing, self._alone = False, True

    def _renew_for_ever(self) -> None:
        while not self._ended.wait(ENFORCE_EVERY_S):
            if reason := self._lease.renew_if_due(self._time_limit_s, alone=self._alone):
                self.request_stop(reason)

    def _enforce_for_ever(self) -> None:
        while not self._ended.wait(ENFORCE_EVERY_S):
            if self._lease.is_running_out(LAST_PART):
                self.request_stop(self._lease.why_it_runs_out())
            if self.reason is not None and self._enforcing:
                self._enforce(self.reason)

    def _enforce(self, reason: Reason) -> None:
        """Ask the trainer to save and stop; kill it when its time is over; give up a main thread that never comes back."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            _try(lambda: write_json(self.workspace.stop, StopRequest(reason)))
        waited, grace_s = time.monotonic() - self._asked_at, _grace_s(reason)
        if waited > grace_s or self._lease.is_running_out(LAST_PART / 2):
            launch.kill_attempt(self.run, wait_s=1.0)
        if waited > grace_s + GIVE_UP_S:
            log.error("the supervisor hangs; its node reports it dead, and the attempt ends as was asked")
            os._exit(1)


class Renewal:
    """Until when this node's part is held, and whether it is time to renew it again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._tried_at = self._renewed_at = time.monotonic()
        self._held_until = self._renewed_at + get_settings().lease_s

    def renew_if_due(self, time_limit_s: float | None, *, alone: bool) -> Reason | None:
        """Renew every heartbeat; why the attempt should end, if it should."""
        settings, now = get_settings(), time.monotonic()
        if now - self._tried_at < settings.heartbeat_s:
            return None
        self._tried_at = now
        try:
            lease = self._renew(now - self._renewed_at, alone=alone)
        except Exception:  # the database is away
            log.warning("the lease could not be renewed", exc_info=True)
            return None
        self._renewed_at = now
        if lease is not None:
            self._held_until = now + lease.seconds_left
        return _asked_for(lease, time_limit_s)

    def is_running_out(self, part: float) -> bool:
        """Whether no more than this part of a lease is left."""
        return self._held_until - time.monotonic() < part * get_settings().lease_s

    def why_it_runs_out(self) -> Reason:
        """What keeps the lease from growing: the database, or another node of the job that it does not hear of."""
        is_answered = time.monotonic() - self._renewed_at < get_settings().lease_s / 2
        return "silent" if is_answered else "unreachable"

    def _renew(self, ran_s: float, *, alone: bool) -> attempts.Lease | None:
        """The first node keeps the job for all of them; each other one its own part."""
        run = self.run
        with db.write() as session:
            if run.node_rank:
                return attempts.stay(session, run.job_id, run.attempt, run.node_rank)
            return attempts.renew_lease(session, run.job_id, run.attempt, ran_s, alone=alone)


def _asked_for(lease: attempts.Lease | None, time_limit_s: float | None) -> Reason | None:
    if lease is None:
        return "lost"
    if lease.cancel_requested:
        return "cancel"
    if lease.pause_requested:
        return "pause"
    if time_limit_s is not None and lease.run_seconds > time_limit_s:
        return "time_limit"
    if lease.is_gang_broken:
        return "broken"
    return "silent" if lease.seconds_left < LAST_PART * get_settings().lease_s else None


def _grace_s(reason: Reason) -> float:
    """How long the trainer may take to save and stop, whatever is left of the lease."""
    settings = get_settings()
    match reason:
        case "lost" | "stalled":
            return 0.0
        case "broken":
            return min(settings.stop_grace_s, BROKEN_GANG_GRACE_S)
        case _:
            return settings.stop_grace_s


def _try(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError:  # a full disk: the trainer is killed when its grace is over
        log.warning("the stop request could not be written", exc_info=True)
