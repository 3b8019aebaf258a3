"""An ended job, once more: the same spec, seed, weights and rows under a new id."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from app import db, storage
from app.errors import Conflict
from app.files import dataset
from app.ids import new_id
from app.jobs import events, queries, service, validating, waiting
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.status import TERMINAL
from app.jobs.tables import Artifact, Job
from app.manifests.check import MANIFEST


def rerun_job(project_id: str, job_id: str) -> str:
    """The id of the new job. Raises NotFound; Conflict where the result could not be the same."""
    with db.read() as connection:
        job = queries.get_job(connection, project_id, job_id)
    if job.status not in TERMINAL:
        raise Conflict(f"Job {job_id} is {job.status}: only a job that has ended can be run again.", code="job_not_ended")
    _refuse_changed_rows(job)
    spec = _pinned(TrainingSpec.model_validate(job.spec), job_id)
    with db.write() as session:
        service.require_sources(session, job, "run again")
        service.check_resources(session, spec)
        service.check_quotas(session, job.project_id, spec)
        return _insert(session, job, spec)


def _insert(session: Session, job: Row[Any], spec: TrainingSpec) -> str:
    copied = ("project_id", "model", "training_file", "validation_file", "suffix", "seed", "method", "job_metadata")
    also = ("integrations", "priority", "accelerator", "data_sha256")
    again = Job(
        id=new_id("ftjob-"),
        spec=spec.model_dump(mode="json"),
        rerun_of=job.id,
        result_files=[],
        answers=[],
        **waiting.requirements(spec),
        **{name: getattr(job, name) for name in copied + also},
    )
    again.status = validating.first_status(session, again)
    session.add(again)
    session.flush()
    events.append(session, again.id, [NewEvent(f"Created fine-tuning job: {again.id}, which repeats {job.id}")])
    return again.id


def _refuse_changed_rows(job: Row[Any]) -> None:
    """Of rows on disk; an upload never changes, and what the Hub gives is known when the job reads it."""
    for split, sha256 in (job.data_sha256 or {}).items():
        source = getattr(job, f"{split}_file") or ""
        path = Path(unquote(urlsplit(source).path))
        if source.startswith("file://") and path.is_file() and _hash(path, job.spec) != sha256:
            message = f"Job {job.id} cannot be run again, the rows of its {split}_file have changed: create a new job."
            raise Conflict(message, code="training_data_changed", param=f"{split}_file")


def _hash(path: Path, spec: dict[str, Any]) -> str | None:
    try:
        return dataset.canonical_hash(path, path.name, skip_bad=spec["data"].get("on_bad_rows") == "skip")
    except dataset.InvalidDataset:
        return None


def _pinned(spec: TrainingSpec, job_id: str) -> TrainingSpec:
    """With the commit that a Hub model's name stood for at the time, where the job lived to write it down."""
    with db.read() as connection:
        statement = select(Artifact.storage_key).where(Artifact.job_id == job_id, Artifact.name == MANIFEST)
        key = connection.execute(statement).scalar_one_or_none()
    if key is None or spec.model.revision is not None:
        return spec
    with storage.open_read(key) as file:
        revision = json.load(file)["base"]["revision"]
    return spec.model_copy(update={"model": spec.model.model_copy(update={"revision": revision})})
