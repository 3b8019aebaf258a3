"""Rows that only a worker would write, for tests of what is read."""

import hashlib
from typing import Any

from app import db, storage
from app.files import validation
from app.ids import new_id
from app.jobs import validating
from app.jobs.logs import log_key
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Artifact, Checkpoint, Event, Job, Metrics, Wait
from app.models.tables import FineTunedModel


def create_job(project_id: str, **values: Any) -> str:
    """A job, queued unless said otherwise; its id."""
    hyperparameters = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 1.0}
    defaults: dict[str, Any] = {
        "status": "queued",
        "model": "openai/gpt-oss-20b",
        "training_file": "file-of-a-test",
        "seed": 42,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "spec": TrainingSpec().model_dump(mode="json"),
        "integrations": [],
        "priority": 0,
        "accelerator": "cpu",
        "result_files": [],
        "answers": [],
    }
    job = Job(id=new_id("ftjob-"), project_id=project_id, **defaults | values)
    with db.write() as session:
        session.add(job)
    return job.id


def update_job(job_id: str, **values: Any) -> None:
    """Change a job's row as a worker would."""
    with db.write() as session:
        job = session.get_one(Job, job_id)
        for name, value in values.items():
            setattr(job, name, value)


def read_uploads() -> None:
    """What a control worker does for new files, and for the jobs that wait for them."""
    while validation.validate_next():
        pass
    validating.settle_all()


def pass_checks() -> None:
    """What a node does for jobs that would take GPUs, where their rows are good."""
    validating.settle_all()
    while (job := validating.claim_check()) is not None:
        validating.pass_check(job.id)


def add_wait(job_id: str, position: int, reason: str, blocking_resource: str) -> None:
    """Where the scheduler saw a job in the queue."""
    with db.write() as session:
        session.add(Wait(job_id=job_id, position=position, reason=reason, blocking_resource=blocking_resource))


def add_events(job_id: str, *messages: str, kind: str = "message", data: dict[str, Any] | None = None) -> None:
    """The next events of a job's story."""
    with db.write() as session:
        job = session.get_one(Job, job_id)
        for message in messages:
            job.last_seq += 1
            event_id = new_id("ftevent-")
            session.add(
                Event(job_id=job_id, seq=job.last_seq, id=event_id, level="info", type=kind, message=message, data=data)
            )


def add_metrics(job_id: str, steps: range) -> None:
    """One line of figures per step."""
    with db.write() as session:
        for step in steps:
            session.add(Metrics(job_id=job_id, step=step, attempt=1, values={"loss": 1.0 / step, "grad_norm": None}))


def add_checkpoint(job_id: str, step: int, **metrics: float | None) -> str:
    """A complete checkpoint; its id."""
    model_id = f"ft:base:tuneyard::{job_id.removeprefix('ftjob-')}:ckpt-step-{step}"
    checkpoint = Checkpoint(
        job_id=job_id, step=step, id=new_id("ftckpt_"), attempt=1, metrics=metrics, storage_key="unused", model_id=model_id
    )
    with db.write() as session:
        session.add(checkpoint)
    return checkpoint.id


def add_artifact(job_id: str, name: str, content: bytes) -> str:
    """A stored file of a job's result; its SHA-256."""
    key, sha256 = f"jobs/{job_id}/attempt-1/artifacts/{name}", hashlib.sha256(content).hexdigest()
    with storage.writer(key) as file:
        file.write(content)
    with db.write() as session:
        session.add(Artifact(job_id=job_id, name=name, bytes=len(content), sha256=sha256, storage_key=key))
    return sha256


def write_log(job_id: str, attempt: int, text: str) -> None:
    """The whole log of an attempt, as its supervisor uploads it."""
    with storage.writer(log_key(job_id, attempt)) as file:
        file.write(text.encode())


def create_model(project_id: str, job_id: str, base: str = "base") -> str:
    """A finished model; its id."""
    model = FineTunedModel(id=f"ft:base:tuneyard::{job_id}", project_id=project_id, job_id=job_id, base_model=base)
    with db.write() as session:
        session.add(model)
    return model.id
