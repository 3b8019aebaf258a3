"""Tell an experiment tracker about a job, from the lines that the trainer writes. A process of its own per integration:

    python -m worker.tracking JOB ATTEMPT INDEX

whatever the tracker does, the training neither waits for it nor fails. It outlives the supervisor until the result is handed
over. Until then a file on the node stands for it, which it holds locked: a node that finds one without a holder starts the
tracker again. Only MLflow is told this way; the trainer's own reporters tell the others (worker/trainer/trackers.py).
"""

import contextlib
import fcntl
import importlib.util
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app import db, storage
from app.config import get_settings
from app.errors import NotFound
from app.jobs import events, queries
from app.jobs.events import NewEvent
from app.jobs.status import TERMINAL, Status
from app.jobs.tables import Job
from app.secrets.service import reveal
from worker.failures import JobFailed
from worker.redaction import Redactor
from worker.reporter import LineFile
from worker.workspace import Reports, Run, Workspace

log = logging.getLogger(__name__)

POLL_S = 1.0
REPORTERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}  # any of the packages will do
LONGEST_PAUSE_S = 30.0
RESTART_PAUSE_S = 5.0  # between two starts of a tracker that dies at once
# The client's own defaults wait for minutes on a server that is away; we try again ourselves, and say so.
CLIENT_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "GIT_PYTHON_REFRESH": "quiet"}


def start_all(run: Run, job: Job) -> None:
    """Start a tracker per integration of the job that has one. One that cannot start is a warning, never the job's failure."""
    for index, integration in enumerate(job.integrations):
        if integration["type"] == "mlflow":
            _file_of(run, index).parent.mkdir(parents=True, exist_ok=True)
            _file_of(run, index).touch()
            _start(run, index, job)
        if integration["type"] == "wandb":
            wandb = integration["wandb"]
            _record(
                job.id, index, {"type": "wandb", "run_id": job.id} | {name: wandb[name] for name in ("project", "entity")}, None
            )


def reports_of(job: Job) -> Reports:
    """What the trainer itself is to tell. JobFailed(tracker_not_installed) where this node lacks the package for it."""
    kinds = {integration["type"]: integration for integration in job.integrations}
    for kind, packages in REPORTERS.items():
        if kind in kinds and not any(importlib.util.find_spec(package) for package in packages):
            message = f"The node lacks the package `{packages[-1]}`: install it there, or leave the integration out."
            raise JobFailed("tracker_not_installed", message, "integrations")
    wandb = kinds["wandb"]["wandb"] if "wandb" in kinds else None
    return Reports(run_id=job.id, tensorboard="tensorboard" in kinds, wandb=wandb)


def start_again() -> None:
    """Start the trackers of this node that died before they were done: with `tuneyard up`, with the machine, by a signal."""
    for path in _folder().glob("*.*.*"):
        with contextlib.suppress(FileNotFoundError):  # it came to its end meanwhile
            if time.time() - path.stat().st_mtime > RESTART_PAUSE_S:
                _start_of(path)


def _start_of(path: Path) -> None:
    job_id, attempt, index = path.name.split(".")
    job = _job_of(job_id)
    if job is None:  # of another database: nobody waits for it
        path.unlink()
    else:
        _start(Run(job_id, int(attempt)), int(index), job)


def _start(run: Run, index: int, job: Any) -> None:
    """Start the tracker unless it runs. It inherits the lock on its file, which nothing but its death opens."""
    path = _file_of(run, index)
    with path.open("r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.utime(path)  # FileNotFoundError where it has just come to its end
        try:
            with db.read() as connection:
                secrets = reveal(connection, job.project_id, _settings_of(job.integrations[index])["secrets"])
        except NotFound as error:
            _tell(run, f"mlflow is not told about this job: {error.message}", "warn")
            path.unlink()
            return
        workspace = _workspace_of(run)
        workspace.root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "worker.tracking", run.job_id, str(run.attempt), str(index)]
        with (workspace.root / "tracking.log").open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | CLIENT_LIMITS | secrets,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )


def main() -> None:
    """One integration of one attempt, to its end."""
    run, index = Run(sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s job={run.job_id} %(message)s")
    job = _job_of(run.job_id)
    settings = _settings_of(job.integrations[index])
    redactor = Redactor(os.environ[variable] for variable in settings["secrets"])
    try:
        from worker.mlflow_run import MlflowRun  # here, so that a node without MLflow can say what it lacks
    except ImportError:
        _tell(run, "mlflow is not told about this job: install it on the node (the extra `tracking`).", "warn")
    else:
        recorded = (job.tracking or [{}] * (index + 1))[index]
        follow(run, Outage(run, redactor), MlflowRun(job, settings, recorded), index, _workspace_of(run))
    _file_of(run, index).unlink(missing_ok=True)


def follow(run: Run, outage: "Outage", tracker: Any, index: int, workspace: Workspace) -> None:
    """Hand over line by line, and the result at the end; through any outage, until patience is over."""
    lines = LineFile(workspace.metrics)
    recorded: dict[str, Any] | None = None
    ended_at = None
    while True:
        try:
            status, attempt = _standing(run.job_id)
            if status in TERMINAL and ended_at is None:
                ended_at = time.monotonic()
            if attempt != run.attempt:
                return
            if tracker.open():
                tracker.log_steps(_earlier_steps(run))
            recorded = _record(run.job_id, index, tracker.facts, recorded)
            new, position = lines.peek()
            tracker.log_steps(new)
            lines.position = position
            if status in TERMINAL:
                files = _fetch_result(run.job_id, workspace) if status == Status.SUCCEEDED else []
                tracker.hand_over(workspace, files)
                _record(run.job_id, index, tracker.facts, recorded)
                tracker.close(status)
            outage.over()
            if status != Status.RUNNING:
                return
        except Exception as error:  # trackers and their networks fail in every way there is
            log.warning("the tracker did not take it", exc_info=True)
            if ended_at is not None and time.monotonic() - ended_at > get_settings().tracking_patience_s:
                outage.give_up(error)
                return
            outage.note(error)
        time.sleep(outage.pause_s)


@dataclass
class Outage:
    """A tracker that does not answer: said once when it begins and once when it is over."""

    run: Run
    redactor: Redactor
    pause_s: float = POLL_S
    failed: int = field(default=0)

    def note(self, error: Exception) -> None:
        self.failed += 1
        self.pause_s = min(LONGEST_PAUSE_S, POLL_S * 2**self.failed)
        if self.failed == 1:
            self._say(f"mlflow does not take this job's figures, it is tried again: {_reason(error)}", "warn")

    def over(self) -> None:
        if self.failed:
            self._say("mlflow has this job's figures again", "info")
        self.failed, self.pause_s = 0, POLL_S

    def give_up(self, error: Exception) -> None:
        self._say(f"mlflow did not take this job's figures: {_reason(error)}", "warn")

    def _say(self, message: str, level: Any) -> None:
        try:
            _tell(self.run, self.redactor.text(message), level)
        except Exception:  # the database may be what is away
            log.warning("could not be told: %s", message, exc_info=True)


def _tell(run: Run, message: str, level: Any) -> None:
    with db.write() as session:
        events.append(session, run.job_id, [NewEvent(message, level)], Job.attempt == run.attempt)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__


def _earlier_steps(run: Run) -> list[dict[str, Any]]:
    """What earlier attempts reported, in the form of the trainer's lines: their trackers may have died with some of it."""
    with db.read() as connection:
        rows = queries.steps_before(connection, run.job_id, run.attempt)
    apart = ("epoch", "tokens_per_second")
    return [
        {"step": row.step, "at": row.created_at, "trained_tokens": None}
        | {name: row.values.get(name) for name in apart}
        | {"values": {name: value for name, value in row.values.items() if name not in apart}}
        for row in rows
    ]


def _job_of(job_id: str) -> Any:
    with db.read() as connection:
        return connection.execute(select(*queries.JOB).where(Job.id == job_id)).one_or_none()


def _workspace_of(run: Run) -> Workspace:
    return Workspace(get_settings().resolved_workspace_dir / run.job_id / str(run.attempt))


def _folder() -> Path:
    return get_settings().resolved_workspace_dir / "trackers"


def _file_of(run: Run, index: int) -> Path:
    return _folder() / f"{run.job_id}.{run.attempt}.{index}"


def _standing(job_id: str) -> tuple[str, int]:
    with db.read() as connection:
        status, attempt = connection.execute(select(Job.status, Job.attempt).where(Job.id == job_id)).one()
    return status, attempt


def _record(job_id: str, index: int, facts: dict[str, Any], recorded: dict[str, Any] | None) -> dict[str, Any]:
    """What the tracker calls the job, onto the job's row where it is news; each integration keeps its own place."""
    if facts == recorded:
        return recorded
    with db.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id).with_for_update()).one()
        job.tracking = [
            facts if place == index else known
            for place, known in enumerate(job.tracking or [{"type": one["type"]} for one in job.integrations])
        ]
    return dict(facts)


def _fetch_result(job_id: str, workspace: Workspace) -> list[str]:
    """The names of the result's files, all below workspace.export: an attempt on another node may have made them."""
    with db.read() as connection:
        artifacts = queries.list_artifacts(connection, job_id)
    for artifact in artifacts:
        path: Path = workspace.export / artifact.name
        if not path.exists():
            storage.get(artifact.storage_key, path)
    return [artifact.name for artifact in artifacts]


def _settings_of(integration: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = integration[integration["type"]]
    return settings


if __name__ == "__main__":
    main()
