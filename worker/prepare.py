"""Fill the workspace before any trainer starts: the spec, the rows in canonical form, the checkpoint to go on from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from app import db, storage
from app.config import get_settings
from app.errors import TuneyardError
from app.files import dataset, rows
from app.files import service as files
from app.files.observations import Row
from app.files.parsing import Parsed
from app.files.problems import Problem
from app.jobs import attempts, continuation, sources
from app.jobs.events import NewEvent
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.manifests.check import sha256_of
from worker import tracking
from worker.failures import JobFailed
from worker.heartbeat import Heartbeat
from worker.workspace import Run, Workspace, lines_of, write_json

# Rows between two looks at whether the user has cancelled.
CHECK_EVERY = 1000
# Beside the tensors; the rest of a checkpoint is the state of the run that made it.
WEIGHT_FILES = {"config.json", "adapter_config.json", "model.safetensors.index.json"}


def prepare_workspace(workspace: Workspace, run: Run, job: Job, spec: TrainingSpec, heartbeat: Heartbeat) -> None:
    """Write everything the trainer reads.

    Raises JobFailed(invalid_training_file) for rows that cannot be used, Stopped when the job is to end.
    """
    write_json(workspace.spec, spec.model_dump(mode="json"))
    write_json(workspace.reports, tracking.reports_of(job))
    reports = {"training": _write_rows(job.training_file, "training_file", job, workspace.train_data, heartbeat)}
    if job.validation_file is not None:
        target = workspace.validation_data
        reports["validation"] = _write_rows(job.validation_file, "validation_file", job, target, heartbeat)
    _check_data(workspace, run, job)
    _fetch_initial_weights(workspace, job, spec.training.from_)
    _fetch_checkpoint(workspace, job, keep_best=spec.evaluation.keep_best)
    if spec.parallelism.nnodes > 1 and not get_settings().shared_workspace:
        for path in filter(Path.exists, _row_files(workspace)):
            storage.put(path, _rows_key(job, path))
    told = NewEvent(f"Read {reports['training'].rows_used} training rows", data={"rows": _used(reports)})
    skipped = [_told_of_skipped(split, report) for split, report in reports.items() if report.num_problems]
    with db.write() as session:
        attempts.tell(session, run.job_id, run.attempt, [told, *skipped])
        attempts.record_rows(session, run.job_id, run.attempt, {split: _counts(report) for split, report in reports.items()})


def _used(reports: dict[str, dataset.Report]) -> dict[str, int]:
    return {split: report.rows_used for split, report in reports.items()}


def _counts(report: dataset.Report) -> dict[str, Any]:
    read, used = report.rows_read, report.rows_used
    return {"rows_read": read, "rows_used": used, "rows_skipped": read - used, "skipped_by_reason": dict(report.codes)}


def _told_of_skipped(split: str, report: dataset.Report) -> NewEvent:
    message = f"Skipped {report.num_problems} of {report.rows_read} {split} rows: {report.summary}"
    return NewEvent(message, level="warn", data={"split": split, **_counts(report)})


def prepare_part(workspace: Workspace, run: Run, job: Job, spec: TrainingSpec) -> None:
    """The same on another node of the job, once the first one is ready: its rows, and the checkpoint it goes on from."""
    write_json(workspace.spec, spec.model_dump(mode="json"))
    if get_settings().shared_workspace:
        _link_to_first(workspace, Workspace(workspace.root.parent))
        return
    for path in _row_files(workspace):
        with contextlib.suppress(FileNotFoundError):  # most jobs have no validation file
            storage.get(_rows_key(job, path), path)
    _check_data(workspace, run, job)
    _fetch_initial_weights(workspace, job, spec.training.from_)
    _fetch_checkpoint(workspace, job, keep_best=spec.evaluation.keep_best)


def forget_rows(job_id: str) -> None:
    """Delete what was stored for the other nodes of a job."""
    storage.delete(f"jobs/{job_id}/rows")


def _rows_key(job: Job, path: Path) -> str:
    return f"jobs/{job.id}/rows/{path.name}"


def _row_files(workspace: Workspace) -> list[Path]:
    files = (workspace.train_data, workspace.validation_data)
    return [*files, *map(lines_of, files)]


def _link_to_first(workspace: Workspace, first: Workspace) -> None:
    """Read what lies on the shared file system; what this node writes lies beside it."""
    for path in (*_row_files(first), first.initial, *first.checkpoints.glob("checkpoint-*")):
        if path.exists():
            link = workspace.root / path.relative_to(first.root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def _write_rows(source: str, param: str, job: Job, target: Path, heartbeat: Heartbeat) -> dataset.Report:
    """Write the rows that can be learned from, and beside them on which line each stood; what was wrong with the others."""
    target.parent.mkdir(parents=True, exist_ok=True)
    skips = TrainingSpec.stored(job.spec).data.on_bad_rows == "skip"
    report = dataset.Report()
    try:
        with target.open("w", encoding="utf-8") as file, lines_of(target).open("w", encoding="ascii") as lines:
            for count, found in enumerate(rows_of(source, param, job.project_id), start=1):
                checked = for_method(found, job.spec["method"])
                report.add(checked)
                if isinstance(checked, Row):
                    file.write(dataset.canonical_line(checked.value))
                    lines.write(f"{checked.line}\n")
                elif not skips or checked.line is None:
                    raise JobFailed("invalid_training_file", str(checked), param)
                if count % CHECK_EVERY == 0:
                    heartbeat.raise_if_stopped()
    except TuneyardError as error:
        raise JobFailed(error.code or "invalid_training_file", error.message, param) from error
    if report.rows_used == 0:
        raise JobFailed("dataset_no_trainable_rows", f"Every row was skipped, none is left: {report.summary}", param)
    return report


def for_method(found: Row | Problem, method: str) -> Row | Problem:
    """The row, or why the job's method cannot learn from it."""
    if isinstance(found, Problem):
        return found
    try:
        rows.check_method(found.value, method)
    except rows.Unusable as error:
        return Problem(error.code, error.message, found.line, path=error.path)
    return found


def _check_data(workspace: Workspace, run: Run, job: Job) -> None:
    """An attempt trains on what the first one trained on, and a rerun on what the job it repeats did."""
    files = {"training": workspace.train_data, "validation": workspace.validation_data}
    found = {split: sha256_of(path) for split, path in files.items() if path.exists()}
    if job.data_sha256 is None:
        job.data_sha256 = found
        with db.write() as session:
            attempts.record_data(session, run.job_id, run.attempt, found)
    for split, sha256 in job.data_sha256.items():
        if found.get(split) != sha256:
            message = f"The {split} rows are not the ones this job began with: create a new job for them."
            raise JobFailed("training_data_changed", message, f"{split}_file")


def rows_of(source: str, param: str, project_id: str) -> Iterator[Row | Problem]:
    """Every row of a job's source, usable or not. Raises JobFailed, TuneyardError where it cannot be read."""
    if source.startswith("hf://"):
        yield from dataset.canonical_rows(_hub_rows(source, param))
    elif source.startswith("file://"):
        path = sources.resolve_data_path(source, param)
        yield from dataset.scan(path, path.name)
    else:
        with db.read() as connection:
            file = files.file_of_job(connection, project_id, source)
        with storage.open_read(file.storage_key) as stream:
            yield from dataset.scan(stream, file.filename)


def _hub_rows(source: str, param: str) -> Iterator[Parsed]:
    """Rows of `hf://datasets/OWNER/NAME?split=train&subset=...&revision=...`, streamed, each with its number."""
    import datasets  # heavy, and only needed here

    parts = urlsplit(source)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    name, revision, subset = parts.path.removeprefix("/"), query.get("revision"), query.get("subset")
    try:
        if subset is None:
            choices = datasets.get_dataset_config_names(name, revision=revision)
            if len(choices) > 1 and "default" not in choices:
                raise JobFailed("dataset_subset_required", sources.subset_required(source, choices), param)
        split = datasets.load_dataset(name, subset, split=query.get("split", "train"), revision=revision, streaming=True)
        yield from (Parsed(number, row) for number, row in enumerate(split, start=1))
    except JobFailed:
        raise
    except Exception as error:  # whatever the Hub or the network answers, the user needs to see which data set it was
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise JobFailed("invalid_training_file", f"{source} could not be read: {reason}", param) from error


def _fetch_initial_weights(workspace: Workspace, job: Job, name: str | None) -> None:
    """Copy the weights that the job goes on from; JobFailed where they are gone, or no longer what was proven."""
    if name is None:
        return
    with db.read() as connection:
        files = continuation.result_files(connection, job.project_id, name)
        checkpoint = continuation.checkpoint_key(connection, job.project_id, name)
    try:
        for file in files:
            path = workspace.initial / file.name.partition("/")[2]
            storage.get(file.storage_key, path)
            if sha256_of(path) != file.sha256:
                raise _initial_weights_gone(f"The file {file.name} of {name} is not what was stored")
        if not files and checkpoint is not None:
            for key in storage.keys(checkpoint):
                if (path := Path(key)).suffix == ".safetensors" or path.name in WEIGHT_FILES:
                    storage.get(key, workspace.initial / key.removeprefix(f"{checkpoint}/"))
    except FileNotFoundError as error:
        raise _initial_weights_gone(f"A file of {name} is gone") from error
    if not any(workspace.initial.glob("*.safetensors")):
        raise _initial_weights_gone(f"The weights of {name} are gone")


def _initial_weights_gone(what: str) -> JobFailed:
    return JobFailed("initial_weights_gone", f"{what}: create a new job from other weights.", continuation.FROM)


def _fetch_checkpoint(workspace: Workspace, job: Job, *, keep_best: bool) -> None:
    """Copy the newest stored checkpoint into the workspace, where the trainer looks for it; a first attempt has none.

    Where the best one is to be exported, it must be there too.
    """
    with db.write() as session:
        found = {attempts.last_checkpoint(session, job.id)}
        if keep_best:
            found.add(attempts.best_checkpoint(session, job.id))
    for checkpoint in found - {None}:
        assert checkpoint is not None
        storage.get_tree(checkpoint.storage_key, workspace.checkpoints / f"checkpoint-{checkpoint.step}")
