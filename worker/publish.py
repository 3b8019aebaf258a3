"""From a finished run to a result: store the export, prove the stored files, sign a manifest, record the end beside them."""

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from app import db, storage
from app.files import service as files
from app.jobs import attempts
from app.jobs.attempts import Outcome, StoredFile
from app.jobs.tables import Job
from app.manifests.check import sha256_of
from app.models import naming
from worker.failures import JobFailed
from worker.manifest import write_manifest
from worker.reporter import attempt_key
from worker.workspace import Result, Run, Verification, Workspace, read_json

# OpenAI's column -> our figure.
CSV_COLUMNS = {
    "train_loss": "loss",
    "train_accuracy": "mean_token_accuracy",
    "valid_loss": "eval_loss",
    "valid_mean_token_accuracy": "eval_mean_token_accuracy",
}


def publish(workspace: Workspace, run: Run, job: Job, result: Result, verify: Callable[[Path], None]) -> Outcome:
    """Store the export and prove it from what was stored; JobFailed(artifact_verification_failed) where it does not hold.

    `verify` reloads a folder of stored files and writes verification.json. What is not proven does not stay in storage.
    """
    try:
        stored = [_store(path, workspace.export, run) for path in sorted(workspace.export.rglob("*")) if path.is_file()]
        verification = _prove(workspace, run, verify)
    except Exception:
        with contextlib.suppress(OSError):  # why the attempt ends matters more
            storage.delete(_artifacts_key(run))
        raise
    manifest = write_manifest(workspace, job, result, verification, stored)
    stored += [_store(path, workspace.export, run) for path in manifest]
    outcome = Outcome(
        model_id=naming.finished_name(job.model, job.suffix, job.id),
        trained_tokens=result.trained_tokens,
        artifacts=stored,
        result_file=_store_result_file(job),
        answers=verification.answers,
    )
    with storage.writer(_record_key(run)) as file:
        file.write(json.dumps(asdict(outcome)).encode())
    return outcome


def finished_before(run: Run) -> Outcome | None:
    """The outcome an earlier attempt recorded but could not write to the database any more."""
    try:
        with storage.open_read(_record_key(run)) as file:
            record = json.loads(file.read())
    except FileNotFoundError:
        return None
    return Outcome(**record | {"artifacts": [StoredFile(**artifact) for artifact in record["artifacts"]]})


def fetch(outcome: Outcome, workspace: Workspace) -> None:
    """The result's files below workspace.export, where an earlier attempt has made them."""
    for artifact in outcome.artifacts:
        path = workspace.export / artifact.name
        if not path.exists():
            storage.get(artifact.storage_key, path)


def _store(path: Path, export: Path, run: Run) -> StoredFile:
    name = str(path.relative_to(export))
    key = f"{_artifacts_key(run)}/{name}"
    storage.put(path, key)
    return StoredFile(name=name, bytes=path.stat().st_size, sha256=sha256_of(path), storage_key=key)


def _prove(workspace: Workspace, run: Run, verify: Callable[[Path], None]) -> Verification:
    """Fetch the files back from storage and reload them: what a user will download is what was proven."""
    fetched = workspace.root / "verify"
    storage.get_tree(_artifacts_key(run), fetched)
    try:
        verify(fetched)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)
    verification = Verification(**read_json(workspace.verification))
    if not verification.ok:
        raise JobFailed("artifact_verification_failed", verification.message)
    return verification


def _store_result_file(job: Job) -> str:
    """The CSV of step figures that OpenAI's users read with `files.content`."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["step", *CSV_COLUMNS])
    with db.write() as session:
        for step, values in attempts.metrics_of(session, job.id):
            table.writerow([step, *(values.get(name) for name in CSV_COLUMNS.values())])
        return files.store_result_file(session, job.project_id, "step_metrics.csv", text.getvalue().encode())


def _artifacts_key(run: Run) -> str:
    return f"{attempt_key(run)}/artifacts"


def _record_key(run: Run) -> str:
    return f"jobs/{run.job_id}/terminal.json"
