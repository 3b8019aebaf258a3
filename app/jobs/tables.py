"""Jobs and their append-only story."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.keys.tables import Project


class Job(Base):
    """What a user asked for, and where it stands. `attempt` is the fencing token of every write by a worker."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_project_created", "project_id", "created_at", "id"),
        Index("ix_jobs_status", "status", "priority", "created_at"),
        Index("ix_jobs_idempotency_key", "project_id", "idempotency_key", unique=True),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey(Project.id))
    status: Mapped[str] = mapped_column(String(24))
    model: Mapped[str] = mapped_column(String(512))
    training_file: Mapped[str] = mapped_column(String(1024))
    validation_file: Mapped[str | None] = mapped_column(String(1024))
    suffix: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int]
    method: Mapped[dict[str, Any]]
    """OpenAI's `method` object with resolved hyperparameters."""
    spec: Mapped[dict[str, Any]]
    """The resolved TrainingSpec."""
    job_metadata: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    integrations: Mapped[list[Any]]
    data_sha256: Mapped[dict[str, Any] | None]
    """Per split the SHA-256 of its rows in canonical form, written by the first attempt: later ones train on the same."""
    data_rows: Mapped[dict[str, Any] | None]
    """Per split what became of its rows: read, used, skipped by reason, cut, tokens."""
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    request_sha256: Mapped[str | None] = mapped_column(String(64))
    """Of the request that asked for it; without a key also of who sent it."""
    rerun_of: Mapped[str | None] = mapped_column(String(64))
    """The job that this one repeats."""
    tracking: Mapped[list[Any] | None]
    """Per integration what the tracker calls this job: its experiment, its run."""
    priority: Mapped[int]
    accelerator: Mapped[str] = mapped_column(String(8))

    demand: Mapped[str | None] = mapped_column(Text)
    """What it asks of the nodes, as `nodes.demand` writes it; NULL until the scheduler has read the spec."""
    time_limit_s: Mapped[int | None]
    max_wait_s: Mapped[int | None]
    queued_at: Mapped[float] = mapped_column(default=now())
    """When it began to wait; again with each return to the queue."""
    check_until: Mapped[float | None]
    """Until then a node checks its rows; in the past, it waits for a node that does; NULL before and after."""
    check_tries: Mapped[int] = mapped_column(default=0)
    reserved_at: Mapped[float | None]
    """Since when it is first in line and nodes are kept for it."""
    preempted_by: Mapped[str | None] = mapped_column(String(64))
    """The job of higher priority that it makes room for."""
    attempt: Mapped[int] = mapped_column(default=0)
    num_starts: Mapped[int] = mapped_column(default=0)
    """Attempts that count against `max_attempts`: those a supervisor took up and the service did not stop itself."""
    lease_expires_at: Mapped[float | None]
    cancel_requested_at: Mapped[float | None]
    pause_requested_at: Mapped[float | None]
    run_seconds: Mapped[float] = mapped_column(default=0.0)
    last_seq: Mapped[int] = mapped_column(default=0)
    """`seq` of the newest event."""

    step: Mapped[int | None]
    total_steps: Mapped[int | None]
    tokens_per_second: Mapped[float | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    estimated_finish: Mapped[float | None]
    fine_tuned_model: Mapped[str | None] = mapped_column(String(512))
    result_files: Mapped[list[Any]]
    answers: Mapped[list[Any]]
    """The replies of base and tuned model to `evaluation.prompts`."""
    error: Mapped[dict[str, Any] | None]

    created_at: Mapped[float] = mapped_column(default=now())
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    swept_until_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """The age since its end up to which what it left behind has been swept."""


class Wait(Base):
    """Where a queued job stands in the queue and why, as the scheduler last saw it. Apart from `jobs`, whose rows are wide."""

    __tablename__ = "waits"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int]
    """1 is served next; 0: a node is starting it."""
    reason: Mapped[str] = mapped_column(String(512))
    blocking_resource: Mapped[str | None] = mapped_column(String(32))
    estimated_start: Mapped[float | None]


class Attempt(Base):
    """One try at running a job. Where it ran is in `placements`."""

    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    placed_at: Mapped[float] = mapped_column(default=now())
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    first_step: Mapped[int | None]
    """The first and the last step that it reported."""
    last_step: Mapped[int | None]
    end: Mapped[str | None] = mapped_column(String(16))
    """As `history.End` names it; NULL while it goes on."""
    code: Mapped[str | None] = mapped_column(String(64))
    message: Mapped[str | None] = mapped_column(Text)


class Event(Base):
    """One line of a job's story; `seq` counts from 1 without gaps and is the id of the live stream."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(default=now())


class Metrics(Base):
    """The figures of one step; a later attempt that passes the step again replaces them."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    values: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=now())


class Checkpoint(Base):
    """A complete, stored checkpoint."""

    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    attempt: Mapped[int]
    metrics: Mapped[dict[str, Any]]
    storage_key: Mapped[str] = mapped_column(String(1024))
    model_id: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[float] = mapped_column(default=now())


class Artifact(Base):
    """One stored file of a job's result."""

    __tablename__ = "artifacts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    storage_key: Mapped[str] = mapped_column(String(1024))
    created_at: Mapped[float] = mapped_column(default=now())
