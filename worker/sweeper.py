"""What has served its time goes: rows and storage from the control worker, workspaces from each node. docs/operating.md
has the limits.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from app import db
from app.config import get_settings
from app.files import service as files
from app.jobs import history, retention
from app.previews import service as previews
from app.webhooks import service as webhooks
from worker.launch import MARK
from worker.workspace import Run

log = logging.getLogger(__name__)

EVERY_S = 600.0
GB = 1e9


def start(sweep: Callable[[], object]) -> None:
    """Sweep now and again from a thread of this process for as long as it lives."""
    threading.Thread(target=_sweep_for_ever, args=(sweep,), name="sweep", daemon=True).start()


def _sweep_for_ever(sweep: Callable[[], object]) -> None:
    pause = threading.Event()
    while True:
        try:
            sweep()
        except Exception:  # database or storage is away: what is left comes with the next sweep
            log.warning("sweep failed; trying again later", exc_info=True)
        pause.wait(EVERY_S)


def sweep_storage() -> None:
    """Everything that all nodes share."""
    retention.sweep()
    files.sweep_expired()
    previews.sweep()
    webhooks.sweep(get_settings().retention_deliveries_s)
    limit_s = get_settings().retention_orphans_s
    files.sweep_orphans(limit_s)
    retention.sweep_orphans(limit_s)


@dataclass(frozen=True)
class Folder:
    """The workspace of an attempt that has ended, and for how long it has."""

    path: Path
    ended_s: float

    @property
    def bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.path.rglob("*"))


def sweep_workspaces() -> None:
    """Remove the folders of attempts that ended too long ago, and the oldest while all of them take too much."""
    settings = get_settings()
    total = 0
    for folder in sorted(ended_folders(settings.resolved_workspace_dir), key=lambda folder: folder.ended_s):
        size = folder.bytes
        if folder.ended_s > settings.retention_workspaces_s or total + size > settings.retention_workspaces_gb * GB:
            remove(folder)
        else:
            total += size


def ended_folders(workspace_dir: Path) -> list[Folder]:
    """The workspaces on this machine that no attempt and no process needs any more."""
    folders = {Run(path.parent.name, int(path.name)): path for path in workspace_dir.glob("ftjob-*/*") if path.name.isdigit()}
    # First what goes on, then who lives: an attempt that ends in between only stays for another round.
    with db.read() as connection:
        ended_s = history.seconds_since_end(connection, {run.job_id for run in folders})
    living = _named_by_processes()
    return [
        Folder(path, seconds)
        for run, path in folders.items()
        if run.job_id not in living and (seconds := ended_s.get((run.job_id, run.attempt), _age_s(path))) is not None
    ]


def remove(folder: Folder) -> None:
    """Remove a workspace, and the job's folder with the last of them; what a crash leaves is removed by the next sweep."""
    log.info("removing %s", folder.path)
    shutil.rmtree(folder.path, ignore_errors=True)
    if folder.path.parent.is_dir() and not any(folder.path.parent.iterdir()):
        shutil.rmtree(folder.path.parent, ignore_errors=True)


def _age_s(path: Path) -> float:
    """Of a folder whose attempt the database does not know, as after a restored backup: both stamps are this machine's."""
    return time.time() - path.stat().st_mtime


def _named_by_processes() -> set[str]:
    """Every word of every command line and every mark: supervisors, trackers and trainers name their job in one of them."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            found |= {*process.cmdline(), process.environ().get(MARK, "").partition(".")[0]}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
