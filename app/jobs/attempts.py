"""What workers write about an attempt of a job. Every write is fenced: only the attempt that holds the job changes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update
from sqlalchemy.orm import Session

from app.config import get_settings
from app.db import now, storable
from app.ids import new_id
from app.jobs import events, figures, history
from app.jobs.events import NewEvent
from app.jobs.history import End
from app.jobs.status import Status, switch_status
from app.jobs.tables import Artifact, Checkpoint, Job, Metrics, Wait
from app.models import service as models
from app.nodes import gangs
from app.nodes import service as nodes


@dataclass(frozen=True)
class Lease:
    """The answer to a renewal: what the user has asked for meanwhile, and how long the job has run, all attempts together."""

    cancel_requested: bool
    pause_requested: bool
    run_seconds: float
    seconds_left: float
    """How long the lease lasts: less than a whole one where another node of the job is silent."""
    is_gang_broken: bool
    """Whether another node's part in the attempt has ended, so that this one's is in vain."""


@dataclass(frozen=True)
class StepRecord:
    """The figures of one step, as they go to the row, the event and the chart."""

    step: int
    total_steps: int
    values: dict[str, float | None]
    trained_tokens: int
    tokens_per_second: float | None
    seconds_left: float | None


@dataclass(frozen=True)
class StoredFile:
    """One file of the result, as it lies in storage."""

    name: str
    bytes: int
    sha256: str
    storage_key: str


@dataclass(frozen=True)
class Outcome:
    """What a finished run hands over."""

    model_id: str
    trained_tokens: int
    artifacts: list[StoredFile]
    result_file: str | None
    answers: list[dict[str, Any]] = field(default_factory=list)


def begin(session: Session, job_id: str) -> int:
    """The number of a new attempt; whatever an older one still writes is refused from now on."""
    numbered = update(Job).where(Job.id == job_id).values(attempt=Job.attempt + 1, reserved_at=None).returning(Job.attempt)
    starting = {"position": 0, "reason": "A node is starting the job.", "blocking_resource": None, "estimated_start": None}
    session.merge(Wait(job_id=job_id, **starting))
    number: int = session.execute(numbered.execution_options(synchronize_session=False)).scalar_one()
    history.begin(session, job_id, number)
    return number


def give_back_unclaimed(session: Session, job_id: str, attempt: int) -> None:
    """No supervisor came: free the slots, and let the job wait for other ones."""
    told = NewEvent("The node did not start the job: it waits for another placement", level="warn", data={"attempt": attempt})
    guards = (Job.attempt == attempt, Job.status == Status.QUEUED)
    # The number moves on, so that a supervisor that comes too late finds nothing to take up.
    if events.append(session, job_id, [told], *guards, attempt=Job.attempt + 1):
        history.end(session, job_id, attempt, End.NOT_STARTED, told.message)
        nodes.distrust(session, job_id, attempt)
        nodes.release(session, job_id, attempt)


def start(session: Session, job_id: str, attempt: int) -> bool:
    """The attempt has a supervisor, on the first of its nodes to come: the job runs, under a lease."""
    guards = (Job.status == Status.QUEUED, Job.attempt == attempt)
    told = NewEvent("The job is running", data={"attempt": attempt})
    times = {
        "started_at": func.coalesce(Job.started_at, now()),
        "lease_expires_at": _lease_end(),
        "num_starts": Job.num_starts + 1,
    }
    started = switch_status(session, job_id, Status.RUNNING, told, *guards, **times)
    if started:
        session.execute(delete(Wait).where(Wait.job_id == job_id))
        history.start(session, job_id, attempt)
    return started


def renew_lease(session: Session, job_id: str, attempt: int, ran_s: float, *, alone: bool = False) -> Lease | None:
    """Keep the job for another lease and add the seconds run since the last renewal; None when the attempt has lost it.

    The lease ends a whole one after the most silent of the job's nodes was heard of, unless node rank 0 goes on `alone`.
    """
    asked: tuple[Any, ...] = (Job.cancel_requested_at, Job.pause_requested_at, Job.preempted_by)
    heard = now() if alone else func.coalesce(gangs.oldest_beat_of_others(job_id, attempt), now())
    renewed = (
        update(Job)
        .where(*_held(job_id, attempt))
        .values(lease_expires_at=heard + get_settings().lease_s, run_seconds=Job.run_seconds + ran_s)
        .returning(*asked, Job.run_seconds, Job.lease_expires_at - now())
        .execution_options(synchronize_session=False)
    )
    row = session.execute(renewed).one_or_none()
    if row is None:
        return None
    cancel_at, pause_at, preempted_by, run_seconds, seconds_left = row
    gangs.beat(session, job_id, attempt, 0)
    is_broken = not alone and gangs.is_broken(session, job_id, attempt, 0)
    return Lease(
        cancel_at is not None, pause_at is not None or preempted_by is not None, run_seconds, seconds_left or 0.0, is_broken
    )


def stay(session: Session, job_id: str, attempt: int, node_rank: int) -> Lease | None:
    """What node rank 0 does by renewing the lease, any other node does by this: its part goes on. None when it may not."""
    if not gangs.beat(session, job_id, attempt, node_rank):
        return None
    row = session.execute(select(Job.run_seconds, Job.lease_expires_at - now()).where(*_held(job_id, attempt))).one_or_none()
    if row is None:
        return None
    return Lease(False, False, row[0], row[1] or 0.0, gangs.is_broken(session, job_id, attempt, node_rank))


def tell(session: Session, job_id: str, attempt: int, told: Sequence[NewEvent]) -> bool:
    """Append events of a running attempt."""
    return events.append(session, job_id, told, *_held(job_id, attempt))


def record_data(session: Session, job_id: str, attempt: int, sha256: dict[str, str]) -> bool:
    """Note what the job trains on, for its later attempts and its manifest."""
    return events.append(session, job_id, [], *_held(job_id, attempt), data_sha256=sha256)


def record_rows(session: Session, job_id: str, attempt: int, counts: dict[str, dict[str, Any]]) -> bool:
    """Note what became of the rows, per split; what was noted before of a split stays where the new counts do not say it."""
    known: dict[str, Any] = session.scalar(select(Job.data_rows).where(*_held(job_id, attempt))) or {}
    merged = known | {split: known.get(split, {}) | count for split, count in counts.items()}
    return events.append(session, job_id, [], *_held(job_id, attempt), data_rows=merged)


def record_steps(session: Session, job_id: str, attempt: int, records: Sequence[StepRecord]) -> bool:
    """Append metrics events and rows, and move the job's progress to the last of them."""
    last = records[-1]
    progress = {
        "step": last.step,
        "total_steps": last.total_steps,
        "trained_tokens": last.trained_tokens,
        "tokens_per_second": func.coalesce(last.tokens_per_second, Job.tokens_per_second),
        "estimated_finish": None if last.seconds_left is None else now() + last.seconds_left,
    }
    told = [NewEvent(_step_message(record), type="metrics", data=_step_data(record)) for record in records]
    if not events.append(session, job_id, told, *_held(job_id, attempt), **progress):
        return False
    history.pass_steps(session, job_id, attempt, records[0].step, last.step)
    merged: dict[int, dict[str, float | None]] = {}
    for record in records:
        merged.setdefault(record.step, {}).update(record.values)
    old = session.execute(
        select(Metrics.step, Metrics.attempt, Metrics.values).where(Metrics.job_id == job_id, Metrics.step.in_(merged))
    )
    for step, written_by, values in old.all():
        # An evaluation adds to its step's figures; a later attempt that passes the step again replaces them.
        merged[step] = (values if written_by == attempt else {}) | merged[step]
    session.execute(delete(Metrics).where(Metrics.job_id == job_id, Metrics.step.in_(merged)))
    session.execute(
        insert(Metrics),
        [{"job_id": job_id, "step": step, "attempt": attempt, "values": values} for step, values in merged.items()],
    )
    return True


def record_checkpoint(
    session: Session, job_id: str, attempt: int, step: int, metrics: dict[str, Any], storage_key: str, model_id: str
) -> bool:
    """List a stored checkpoint."""
    told = NewEvent(f"Checkpoint created at step {step}", data={"step": step})
    if not tell(session, job_id, attempt, [told]):
        return False
    session.execute(delete(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.step == step))
    session.add(
        Checkpoint(
            id=new_id("ftckpt_"),
            job_id=job_id,
            step=step,
            attempt=attempt,
            metrics=metrics,
            storage_key=storage_key,
            model_id=model_id,
        )
    )
    return True


def forget_checkpoints(session: Session, job_id: str, keep: int, *, keep_best: bool = False) -> list[str]:
    """Drop all but the newest `keep` checkpoints, and the best one if asked; the storage keys that are now to be deleted."""
    ordered = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc())
    best = best_checkpoint(session, job_id) if keep_best else None
    dropped = [checkpoint for checkpoint in session.scalars(ordered.offset(keep)) if checkpoint is not best]
    for checkpoint in dropped:
        session.delete(checkpoint)
    return [checkpoint.storage_key for checkpoint in dropped]


def last_checkpoint(session: Session, job_id: str) -> Checkpoint | None:
    """The newest stored checkpoint, from which another attempt goes on."""
    return session.scalar(select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc()).limit(1))


def best_checkpoint(session: Session, job_id: str) -> Checkpoint | None:
    """The stored checkpoint of the lowest `eval_loss`: of equal ones the first, as later ones may repeat its figure."""
    stored = session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step))
    measured = [checkpoint for checkpoint in stored if checkpoint.metrics.get("eval_loss") is not None]
    return min(measured, key=lambda checkpoint: float(checkpoint.metrics["eval_loss"]), default=None)


def get_running(session: Session, job_id: str, attempt: int) -> Job | None:
    """The job, if the attempt holds it."""
    return session.scalar(select(Job).where(*_held(job_id, attempt)))


def metrics_of(session: Session, job_id: str) -> list[tuple[int, dict[str, Any]]]:
    """All figures of a job, by step."""
    rows = session.execute(select(Metrics.step, Metrics.values).where(Metrics.job_id == job_id).order_by(Metrics.step))
    return [(step, values) for step, values in rows]


def succeed(session: Session, job_id: str, attempt: int, outcome: Outcome) -> bool:
    """End the job well: its artifacts, its model and the terminal event, all or nothing."""
    made = NewEvent(f"New fine-tuned model created: {outcome.model_id}", data={"fine_tuned_model": outcome.model_id})
    if not tell(session, job_id, attempt, [made]):
        return False
    job = session.scalars(select(Job).where(Job.id == job_id)).one()
    models.register(session, outcome.model_id, job.project_id, job_id, job.model)
    for artifact in outcome.artifacts:
        session.add(Artifact(job_id=job_id, **vars(artifact)))
    done = NewEvent("The job has successfully completed")
    return _end(
        session,
        job_id,
        attempt,
        Status.SUCCEEDED,
        done,
        fine_tuned_model=outcome.model_id,
        trained_tokens=outcome.trained_tokens,
        result_files=[outcome.result_file] if outcome.result_file else [],
        answers=storable(outcome.answers),  # a model may well say NUL
    )


def fail(session: Session, job_id: str, attempt: int, code: str, message: str, param: str | None = None) -> bool:
    """End the job with the cause."""
    error = storable({"code": code, "message": message, "param": param})
    told = NewEvent(f"The job failed: {message}", level="error", data={"error": error})
    return _end(session, job_id, attempt, Status.FAILED, told, error=error)


def cancel(session: Session, job_id: str, attempt: int) -> bool:
    """End a job whose user asked for it; its processes are gone."""
    return _end(session, job_id, attempt, Status.CANCELLED, NewEvent("Fine-tuning job cancelled"))


def pause(session: Session, job_id: str, attempt: int) -> bool:
    """Give the job's slots back, as its user asked; it goes on from its last checkpoint when they say so."""
    told = NewEvent("Fine-tuning job paused")
    # A pause is no failed try.
    changes: dict[str, Any] = {"pause_requested_at": None, "num_starts": Job.num_starts - 1}
    return _leave(session, job_id, attempt, Status.PAUSED, End.PAUSED, told, **changes)


def lose(session: Session, job_id: str, attempt: int, why: str, *, counts: bool = True, code: str = "worker_lost") -> bool:
    """An attempt is gone without an end: another one follows from the last checkpoint, at most `max_attempts` in all.

    `code` is the failure's when there are no more tries. `counts` is False where the service itself stopped the attempt, such
    as at a shutdown of its node.
    """
    job = session.scalar(select(Job).where(*_held(job_id, attempt)).with_for_update())
    if job is None:
        return False
    if job.cancel_requested_at is not None:
        return cancel(session, job_id, attempt)
    if job.pause_requested_at is not None:
        return pause(session, job_id, attempt)
    if job.preempted_by is not None and not counts:
        why = f"The job made room for {job.preempted_by}"
    limit = get_settings().max_attempts
    if counts and job.num_starts >= limit:
        return fail(session, job_id, attempt, code, f"{why}; it was tried {job.num_starts} times.")
    told = NewEvent(f"{why}: the job is queued again", level="warn", data={"attempt": attempt})
    starts, how = (Job.num_starts, End.LOST) if counts else (Job.num_starts - 1, End.STOPPED)
    return _leave(session, job_id, attempt, Status.QUEUED, how, told, code=code if counts else None, num_starts=starts)


def quarantine(session: Session, job_id: str, attempt: int, node_id: str, gpu_uuids: Sequence[str]) -> None:
    """Keep GPUs back whose memory the attempt's processes left taken, and tell it. Call it before the attempt ends."""
    if gpu_uuids:
        message = f"Memory of {', '.join(gpu_uuids)} on {node_id} did not come back: quarantined until the node is resumed"
        tell(session, job_id, attempt, [NewEvent(message, level="warn", data={"node": node_id, "gpus": list(gpu_uuids)})])
        nodes.quarantine(session, node_id, gpu_uuids)


def lose_part(session: Session, job_id: str, attempt: int, node_rank: int, why: str) -> None:
    """A node has lost its supervisor of an attempt, and has killed what was left. The attempt is over once no other node runs
    a part of it: until then node rank 0, or if that is the lost one the next call, sees to it."""
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())
    gangs.stop(session, job_id, attempt, node_rank, {"reason": "crashed", "why": why})
    if get_running(session, job_id, attempt) is None:
        nodes.release(session, job_id, attempt)  # the job has ended or moved on; only the slots were left
    elif node_rank == 0 and gangs.num_others_running(session, job_id, attempt) == 0:
        lose(session, job_id, attempt, why)


def expired(connection: Connection) -> Sequence[tuple[str, int]]:
    """Running jobs whose lease has ended: (job id, attempt)."""
    late = select(Job.id, Job.attempt).where(Job.status == Status.RUNNING, Job.lease_expires_at < now()).order_by(Job.id)
    return [(job_id, attempt) for job_id, attempt in connection.execute(late)]


def _end(session: Session, job_id: str, attempt: int, to: Status, told: NewEvent, **values: Any) -> bool:
    return _leave(session, job_id, attempt, to, End(to), told, finished_at=now(), **values)


def _leave(
    session: Session, job_id: str, attempt: int, to: Status, how: End, told: NewEvent, code: str | None = None, **values: Any
) -> bool:
    """The attempt is over: the job moves on and the slots are free, in one transaction."""
    values |= {"lease_expires_at": None, "estimated_finish": None, "preempted_by": None}
    left = switch_status(session, job_id, to, told, *_held(job_id, attempt), **values)
    if left:
        error = values.get("error") or {"code": code, "message": told.message}
        history.end(session, job_id, attempt, how, error["message"], error["code"])
        nodes.release(session, job_id, attempt)
    return left


def _held(job_id: str, attempt: int) -> tuple[ColumnElement[bool], ...]:
    """The fence: true only while this attempt holds the job."""
    return (Job.id == job_id, Job.attempt == attempt, Job.status == Status.RUNNING)


def _lease_end() -> ColumnElement[float]:
    return now() + get_settings().lease_s


def _step_message(record: StepRecord) -> str:
    shown = {"loss": "training loss", "eval_loss": "validation loss"}
    told = [f"{shown[name]}={value:.4f}" for name, value in record.values.items() if name in shown and value is not None]
    return f"Step {record.step}/{record.total_steps}: {', '.join(told) or 'no loss'}"


def _step_data(record: StepRecord) -> dict[str, Any]:
    openais = {figures.OPENAI_NAMES[name]: value for name, value in record.values.items() if name in figures.OPENAI_NAMES}
    known = {name: value for name, value in openais.items() if value is not None}
    return {"step": record.step, "total_steps": record.total_steps} | known | {"tokens_per_second": record.tokens_per_second}
