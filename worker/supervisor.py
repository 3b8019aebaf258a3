"""One attempt of a job on this node, in a process of its own: claim, prepare, launch, follow, finish.

    python -m worker.supervisor JOB ATTEMPT NODE_RANK

It outlives the Celery worker that started it. The one place that decides how an attempt ends; it writes the end only
when no process of the attempt is left.
"""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sqlalchemy.orm import Session

from app import db
from app.config import get_settings
from app.errors import NotFound
from app.jobs import attempts
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.nodes import placement as placements
from app.nodes.tables import Placement
from app.secrets.service import reveal
from worker import gang, gpus, launch, meeting, prepare, publish, tracking
from worker.failures import JobFailed, Reason, Stopped, failure_of, last_line, oom_kills
from worker.heartbeat import Heartbeat
from worker.progress import Progress
from worker.redaction import Redactor
from worker.reporter import Reporter
from worker.workspace import HubPush, Result, Run, Workspace, read_json, write_json

log = logging.getLogger(__name__)

POLL_S = 0.25
# What ranks need to write their stacks, and torch elastic to copy them into the log.
STACKS_S = 2.0
HOST_OUT_OF_MEMORY = (
    "The node's memory was used up, and the kernel killed a training process. Lower parallelism.nproc_per_node (each rank "
    "holds what it trains), then training.per_device_train_batch_size, or use a node with more memory."
)
TEARDOWN_S = 60.0
# What passes: the database, the file system, an object store (s3fs and gcsfs raise OSErrors).
OUTAGES = (*db.AWAY, OSError)
End = Callable[[Session], bool]


def main() -> None:
    """Detach from whoever started this, and supervise."""
    job_id, attempt, node_rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = Run(job_id, attempt, node_rank)
    workspace = Workspace(run.folder(get_settings().resolved_workspace_dir))
    workspace.root.mkdir(parents=True, exist_ok=True)
    _detach(workspace.root / "supervisor.log")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s job={job_id} attempt={attempt} %(message)s")
    supervise(run, workspace)


def supervise(run: Run, workspace: Workspace) -> None:
    """Take up the placement, do this node's part of the attempt; the job's first node writes how all of it ended."""
    placement = placements.claim(run.job_id, run.attempt, run.node_rank, os.getpid())
    if placement is None:
        log.info("duplicate_delivery_ignored")
        return
    with Heartbeat(run, workspace) as heartbeat:
        signal.signal(signal.SIGTERM, lambda *_: heartbeat.request_stop("shutdown"))
        ending = _run_to_end(run, placement, workspace, heartbeat)
        while not launch.kill_attempt(run):
            log.error("processes of the attempt survive SIGKILL; their slots stay taken until they are gone")
        kept_gpus = gpus.still_held(placement.gpu_uuids)
        heartbeat.stand_down()
        gang.report(run, ending, workspace, placement.node_id, kept_gpus)
        if run.node_rank == 0:
            ending = gang.settle(run, ending, workspace)
            _write_end(run, _end_of(run, ending))


def _run_to_end(run: Run, placement: Placement, workspace: Workspace, heartbeat: Heartbeat) -> gang.Ending:
    """Do the work; whatever happens becomes the one way this node's part ends."""
    try:
        if run.node_rank:
            _train_along(run, placement, workspace, heartbeat)
            return None
        outcome = publish.finished_before(run) or _work(run, placement, workspace, heartbeat)
        heartbeat.stand_alone()
        _push(run, workspace, heartbeat, outcome)
        return outcome
    except (Stopped, JobFailed) as ending:
        return ending
    except db.AWAY as error:
        log.warning("the database went away", exc_info=True)
        return Stopped("unreachable", f"The database failed ({type(error).__name__})")
    except OSError as error:
        log.warning("storage went away", exc_info=True)
        if _is_disk_full(error):
            return JobFailed("disk_full", "The node's disk or the storage is full: free space, then run the job again.")
        return Stopped("outage", f"Storage failed ({type(error).__name__})")
    except Exception as error:
        log.exception("the supervisor failed")
        return JobFailed("internal_error", f"The service failed while it ran the job: {type(error).__name__}.")


def _work(run: Run, placement: Placement, workspace: Workspace, heartbeat: Heartbeat) -> attempts.Outcome:
    """Prepare the workspace, train, and hand over a proven artifact."""
    job = _load_job(run)
    spec = TrainingSpec.stored(job.spec)
    heartbeat.limit_to(spec.resources.time_limit_s)
    prepare.prepare_workspace(workspace, run, job, spec, heartbeat)
    secrets = _secrets_of(job, spec)
    redactor = Redactor(secrets.values())
    reporter = Reporter(workspace, run, job, spec.checkpoints.keep, redactor, keep_best=spec.evaluation.keep_best)
    heartbeat.raise_if_stopped()
    with _redacted(redactor, run, workspace), _log_uploaded(reporter):
        place = meeting.host(run) if spec.parallelism.nnodes > 1 else meeting.alone()
        process = launch.start_trainer(workspace, run, spec, place, placement.gpu_uuids, secrets)
        _tolerating_outage(partial(tracking.start_all, run, job))
        _follow(process, run, workspace, heartbeat, reporter.poll, spec.resources.step_timeout_s)
        result = _result_of(workspace)
        heartbeat.stand_alone()
        _tell(run, "Training has finished: storing and verifying the result")
        return publish.publish(workspace, run, job, result, partial(_verify, run, placement, workspace, heartbeat, secrets))


def _train_along(run: Run, placement: Placement, workspace: Workspace, heartbeat: Heartbeat) -> None:
    """On the job's other nodes: train with the first one, which alone reports and hands over the result."""
    place = meeting.join(run, heartbeat.raise_if_stopped)
    job = _load_job(run)
    spec = TrainingSpec.stored(job.spec)
    prepare.prepare_part(workspace, run, job, spec)
    secrets = _secrets_of(job, spec)
    heartbeat.raise_if_stopped()
    with _redacted(Redactor(secrets.values()), run, workspace):
        process = launch.start_trainer(workspace, run, spec, place, placement.gpu_uuids, secrets)
        _follow(process, run, workspace, heartbeat, lambda: None, spec.resources.step_timeout_s)
        if process.returncode:
            raise failure_of(workspace)


@contextlib.contextmanager
def _redacted(redactor: Redactor, run: Run, workspace: Workspace) -> Iterator[None]:
    """No secret is left in what the block says or writes."""
    try:
        yield
    except JobFailed as error:
        raise JobFailed(error.code, redactor.text(error.message), error.param) from None
    finally:
        if redactor:
            launch.kill_attempt(run)
            redactor.clean(workspace.root, "trainer.log", "std*.log", "*.json", "*.jsonl")


@contextlib.contextmanager
def _log_uploaded(reporter: Reporter) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # why the attempt ends matters more than its log
            reporter.upload_log(at_once=True)


def _follow(
    process: subprocess.Popen[bytes],
    run: Run,
    workspace: Workspace,
    heartbeat: Heartbeat,
    poll: Callable[[], None],
    step_timeout_s: float,
) -> None:
    """Report lines until the trainer has ended; Stopped where it was asked to end, or no longer moved on."""
    progress, num_oom_kills = Progress(workspace, step_timeout_s), oom_kills()
    while not _is_done(process, workspace):
        time.sleep(POLL_S)
        _tolerating_outage(poll)
        if progress.has_stalled() and heartbeat.reason is None:
            launch.dump_stacks(run)
            time.sleep(STACKS_S)
            heartbeat.request_stop("stalled")
    launch.kill_attempt(run)
    _report_rest(poll, heartbeat)
    if heartbeat.reason == "stalled":
        raise Stopped("stalled", f"Training stalled: nothing moved for {step_timeout_s:g} s (resources.step_timeout_s)")
    if heartbeat.reason is None and oom_kills() > num_oom_kills and _was_killed(process, workspace):
        raise JobFailed("host_out_of_memory", HOST_OUT_OF_MEMORY, "parallelism.nproc_per_node")
    if heartbeat.reason == "broken" and isinstance(failure := failure_of(workspace), JobFailed):
        raise failure  # of this node's own: it may be what broke the others
    heartbeat.raise_if_stopped()


def _was_killed(process: subprocess.Popen[bytes], workspace: Workspace) -> bool:
    ending = failure_of(workspace) if process.returncode else None
    return isinstance(ending, Stopped) and ending.why.endswith("SIGKILL")


def _is_done(process: subprocess.Popen[bytes], workspace: Workspace) -> bool:
    """Whether the trainer has ended, or has handed over its result so long ago that its teardown hangs."""
    if process.poll() is not None:
        return True
    try:
        return time.time() - workspace.result.stat().st_mtime > TEARDOWN_S  # both by this machine's clock
    except FileNotFoundError:
        return False


def _verify(
    run: Run, placement: Placement, workspace: Workspace, heartbeat: Heartbeat, secrets: dict[str, str], export: Path
) -> None:
    """Reload the stored files in a fresh process, under the same requests as the training."""
    process = launch.start_verifier(workspace, run, export, placement.gpu_uuids, secrets)
    while process.poll() is None:
        time.sleep(POLL_S)
        heartbeat.raise_if_stopped()
    if process.returncode < 0:
        raise Stopped("crashed")
    if process.returncode > 0:
        raise JobFailed("internal_error", f"The stored files could not be reloaded: {last_line(workspace.trainer_log)}.")


def _push(run: Run, workspace: Workspace, heartbeat: Heartbeat, outcome: attempts.Outcome) -> None:
    """Push the proven result to the Hub where the job asks for that. A push that fails is a warning: the result is there.

    What stops the attempt for good stops the push only; after any other stop a later attempt pushes.
    """
    job = _load_patiently(run, heartbeat)
    spec = TrainingSpec.stored(job.spec)
    if spec.export.hub is None:
        return
    try:
        pushed = _try_to_push(run, workspace, heartbeat, outcome, spec, _secrets_of(job, spec))
    except Stopped as stopped:
        if stopped.reason not in ("cancel", "time_limit"):
            raise
        pushed = HubPush(False, "The job was asked to end while it pushed.", "hub_push_stopped")
    except JobFailed as error:
        pushed = HubPush(False, error.message, error.code)
    except Exception as error:
        log.exception("the push failed")
        pushed = HubPush(False, f"The service failed while it pushed: {type(error).__name__}.", "internal_error")
    _tolerating_outage(partial(_tell_push, run, spec.export.hub.repo_id, pushed))


def _try_to_push(
    run: Run,
    workspace: Workspace,
    heartbeat: Heartbeat,
    outcome: attempts.Outcome,
    spec: TrainingSpec,
    secrets: dict[str, str],
) -> HubPush:
    publish.fetch(outcome, workspace)
    write_json(workspace.spec, spec.model_dump(mode="json"))  # an attempt that only pushes has none yet
    workspace.hub.unlink(missing_ok=True)
    process = launch.start_hub_push(workspace, run, secrets)
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            heartbeat.raise_if_stopped()
    finally:
        launch.kill_attempt(run)
        Redactor(secrets.values()).clean(workspace.root, "trainer.log", "hub.json")
    if not workspace.hub.exists():
        return HubPush(False, "The process that pushed was killed.", "internal_error")
    return HubPush(**read_json(workspace.hub))


def _tell_push(run: Run, repo_id: str, pushed: HubPush) -> None:
    data = {"repo_id": repo_id, "code": pushed.code, "url": pushed.url, "commit": pushed.commit}
    what = f"Pushed to {pushed.url}" if pushed.ok else f"The result was not pushed to {repo_id}: {pushed.message}"
    told = NewEvent(what, "info" if pushed.ok else "warn", data={"hub": data})
    with db.write() as session:
        attempts.tell(session, run.job_id, run.attempt, [told])


def _result_of(workspace: Workspace) -> Result:
    """What the trainer wrote last; its absence is the failure."""
    if not workspace.result.exists():
        raise failure_of(workspace)
    result = Result(**read_json(workspace.result))
    if result.outcome != "finished":
        raise Stopped("crashed")
    return result


def _tell(run: Run, message: str) -> None:
    with db.write() as session:
        attempts.tell(session, run.job_id, run.attempt, [NewEvent(message)])


def _load_job(run: Run) -> Job:
    with db.write() as session:
        job = attempts.get_running(session, run.job_id, run.attempt)
    if job is None:
        raise Stopped("lost")
    return job


def _load_patiently(run: Run, heartbeat: Heartbeat) -> Job:
    """The same once there is a result: an outage of the database must not cost it an attempt."""
    while True:
        try:
            return _load_job(run)
        except OUTAGES:
            log.warning("database unreachable; the push to the Hub waits", exc_info=True)
            time.sleep(get_settings().heartbeat_s)
            heartbeat.raise_if_stopped()


def _secrets_of(job: Job, spec: TrainingSpec) -> dict[str, str]:
    """The environment variables that the job's processes get beside the node's own."""
    try:
        with db.read() as connection:
            return reveal(connection, job.project_id, spec.secrets)
    except NotFound as error:
        raise JobFailed("secret_not_found", error.message, "spec.secrets") from error


def _end_of(run: Run, ending: gang.Ending) -> End:
    if isinstance(ending, attempts.Outcome):
        return lambda session: attempts.succeed(session, run.job_id, run.attempt, ending)
    if isinstance(ending, JobFailed):
        return _failing(run, ending)
    assert ending is not None
    return _end_of_stop(run, ending.reason, ending.why)


def _end_of_stop(run: Run, reason: Reason, why: str) -> End:
    match reason:
        case "cancel":
            return lambda session: attempts.cancel(session, run.job_id, run.attempt)
        case "pause":
            # Not paused outright: whoever cancelled meanwhile is served first.
            return _losing(run, "The job was asked to pause", counts=False)
        case "time_limit":
            message = "The job reached spec.resources.time_limit_s: set a longer limit."
            return _failing(run, JobFailed("time_limit_exceeded", message, "spec.resources.time_limit_s"))
        case "shutdown":
            return _losing(run, why or "The node is shutting down", counts=False)
        case "unreachable":
            # No fault of the job: were it counted, three outages would end every job there is.
            return _losing(run, why or "The node could not reach the database for too long", counts=False)
        case "outage":
            return _losing(run, why)
        case "crashed":
            return _losing(run, why or "A training process was killed")
        case "stalled":
            return _losing(run, why, code="step_stalled")
        case "timeout":
            return _losing(run, why, code="collective_timeout")
        case "unmet":
            return _losing(run, why, code="node_unreachable")
        case "broken" | "silent":
            return _losing(run, why or "A node of the job was lost")
        case "lost":
            return lambda session: False


def _losing(run: Run, why: str, *, counts: bool = True, code: str = "worker_lost") -> End:
    return lambda session: attempts.lose(session, run.job_id, run.attempt, why, counts=counts, code=code)


def _failing(run: Run, error: JobFailed) -> End:
    return lambda session: attempts.fail(session, run.job_id, run.attempt, error.code, error.message, error.param)


def _write_end(run: Run, end: End) -> None:
    """Write the end, however long the database is away: the fence in it makes a late write harmless."""
    while True:
        try:
            with db.write() as session:
                if not end(session):
                    log.warning("the attempt no longer holds the job; nothing was written")
            return
        except db.AWAY:
            log.warning("database unreachable; the end of the attempt waits", exc_info=True)
            time.sleep(get_settings().heartbeat_s)
        except Exception:  # an end that can never be written must not hold the job for ever
            log.exception("the end of the attempt could not be written")
            end = _failing(run, JobFailed("internal_error", "The service could not record how the job ended."))
            time.sleep(get_settings().heartbeat_s)


def _tolerating_outage(action: Callable[[], None], of: type[Exception] | tuple[type[Exception], ...] = OUTAGES) -> None:
    """What cannot be reported now is reported later; only a full disk ends the attempt."""
    try:
        action()
    except of as error:
        if _is_disk_full(error):
            raise
        log.warning("database or storage unreachable; lines wait in the workspace", exc_info=True)
        time.sleep(get_settings().heartbeat_s)


def _report_rest(report: Callable[[], None], heartbeat: Heartbeat) -> None:
    """What the trainer wrote last, its last checkpoint too, however long the database is away: nothing trains any more."""
    while True:
        try:
            _tolerating_outage(report, of=OSError)
            return
        except db.AWAY:
            log.warning("database unreachable; the trainer's last lines wait", exc_info=True)
            if heartbeat.reason == "unreachable":
                heartbeat.stand_down()  # it has stopped: this process waits, and does not hang
            time.sleep(get_settings().heartbeat_s)


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _detach(log_file: Path) -> None:
    """Leave the caller's session, so that neither its end nor its signals reach the training."""
    if os.fork():
        os._exit(0)
    os.setsid()
    with log_file.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    main()
