"""The manifest of a result: what it was made from, by what, and the hash of every file. Signed with the service's key."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app import db
from app.jobs import history
from app.jobs.attempts import StoredFile
from app.jobs.tables import Job
from app.manifests import signing
from app.manifests.check import MANIFEST, SIGNATURE, sha256_of
from app.models import naming
from worker.workspace import Result, Verification, Workspace, read_json

VERSION = 1


def write_manifest(
    workspace: Workspace, job: Job, result: Result, verification: Verification, stored: list[StoredFile]
) -> list[Path]:
    """Write the manifest and its signature beside the exported files; their paths."""
    described = describe(workspace, job, result, verification, stored)
    content = json.dumps(described, ensure_ascii=False, indent=1, sort_keys=True).encode() + b"\n"
    manifest, signature = workspace.export / MANIFEST, workspace.export / SIGNATURE
    manifest.write_bytes(content)
    signature.write_bytes(signing.sign(content))
    return [manifest, signature]


def describe(
    workspace: Workspace, job: Job, result: Result, verification: Verification, stored: list[StoredFile]
) -> dict[str, Any]:
    """Everything a reader needs to make the same result again, and to know that it is the one."""
    facts = read_json(workspace.facts)
    with db.read() as connection:
        attempts = history.of_job(connection, job.id)
    figures = asdict(verification)
    del figures["answers"]
    return {
        "version": VERSION,
        "created_at": int(time.time()),
        "job_id": job.id,
        "rerun_of": job.rerun_of,
        "fine_tuned_model": naming.finished_name(job.model, job.suffix, job.id),
        "spec": read_json(workspace.spec),
        "seed": job.seed,
        "base": facts["base"],
        "continues": _continued(workspace),
        "data": _data(job),
        "chat_template_sha256": facts["chat_template_sha256"],
        "libraries": facts["libraries"],
        "hardware": facts["hardware"],
        "attempts": attempts,
        "steps": result.step,
        "trained_tokens": result.trained_tokens,
        "verification": figures,
        "files": {file.name: {"sha256": file.sha256, "bytes": file.bytes} for file in stored},
    }


def _continued(workspace: Workspace) -> dict[str, Any] | None:
    """Whose weights the run began with, and the hashes of their files; None for a run that began with the base."""
    name = read_json(workspace.spec)["training"].get("from")
    if name is None:
        return None
    return {"model": name, "files": {path.name: sha256_of(path) for path in sorted(workspace.initial.glob("*.safetensors"))}}


def _data(job: Job) -> dict[str, Any]:
    """Per split its source, and the SHA-256 of its rows in canonical form, one JSON object a line."""
    sources = {"training": job.training_file, "validation": job.validation_file}
    hashes = job.data_sha256 or {}
    return {split: {"source": source, "sha256": hashes.get(split)} for split, source in sources.items() if source}
