"""Follow the trainer's files: new lines become rows and events, once and in order.

A file's position moves on only after its lines are committed, so a database that is away delays lines and loses none.
"""

import json
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from app import db, storage
from app.jobs import attempts
from app.jobs.attempts import StepRecord
from app.jobs.events import NewEvent
from app.jobs.tables import Job
from app.models import naming
from worker.redaction import Redactor
from worker.workspace import CHECKPOINT_MARKER, Run, Workspace

# Uploading the log again costs its whole size: every 2 s while it is small, the more seldom the longer it is.
LOG_UPLOAD_S = 2.0
LOG_UPLOAD_BYTES_PER_S = 1 << 20
_SPEED_WINDOW = 50


class LineFile:
    """A growing JSONL file and how far it has been taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def peek(self) -> tuple[list[dict[str, Any]], int]:
        """The whole lines after the position, and the position behind them."""
        if not self.path.exists():
            return [], self.position
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], self.position + len(whole)


class Reporter:
    """Carries one attempt's lines into the database and its checkpoints and log into storage."""

    def __init__(
        self, workspace: Workspace, run: Run, job: Job, keep: int, redactor: Redactor, *, keep_best: bool = False
    ) -> None:
        self.workspace = workspace
        self.run = run
        self.model_id = naming.finished_name(job.model, job.suffix, job.id)
        self.keep = keep
        self.keep_best = keep_best
        self.redactor = redactor
        self._log = LineFile(workspace.log)
        self._metrics = LineFile(workspace.metrics)
        self._checkpoints = LineFile(workspace.checkpoint_lines)
        self._uploaded_log = (0.0, -1)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_SPEED_WINDOW)

    def poll(self) -> None:
        """Take what is new since the last call."""
        self._report_log_lines()
        self._report_metrics()
        self._report_checkpoints()
        self.upload_log()

    def upload_log(self, *, at_once: bool = False) -> None:
        """Store the trainer's log where readers find it, if it has grown."""
        path = self.workspace.trainer_log
        uploaded_at, uploaded_bytes = self._uploaded_log
        pause = max(LOG_UPLOAD_S, uploaded_bytes / LOG_UPLOAD_BYTES_PER_S)
        if not path.exists() or (not at_once and time.monotonic() - uploaded_at < pause):
            return
        size = path.stat().st_size
        if size != uploaded_bytes:
            self._store_log(path)
        self._uploaded_log = (time.monotonic(), size)

    def _store_log(self, path: Path) -> None:
        with path.open("rb") as log, storage.writer(f"{attempt_key(self.run)}/trainer.log") as target:
            self.redactor.copy_log(log, target)

    def _report_log_lines(self) -> None:
        lines, position = self._log.peek()
        if lines:
            lines = self.redactor.plain(lines)
            told = [NewEvent(line["message"], level=line["level"], data=line["data"] or None) for line in lines]
            with db.write() as session:
                attempts.tell(session, self.run.job_id, self.run.attempt, told)
                for counts in filter(None, map(_row_counts, lines)):
                    attempts.record_rows(session, self.run.job_id, self.run.attempt, counts)
            self._log.position = position

    def _report_metrics(self) -> None:
        lines, position = self._metrics.peek()
        if lines:
            records = [self._step_record(line) for line in lines]
            with db.write() as session:
                attempts.record_steps(session, self.run.job_id, self.run.attempt, records)
            self._metrics.position = position

    def _report_checkpoints(self) -> None:
        lines, position = self._checkpoints.peek()
        # Only what retention still keeps is worth storing, and the trainer may have deleted the rest already.
        for line in lines if self.keep_best else lines[-self.keep :]:
            self._store_checkpoint(line)
        self._checkpoints.position = position

    def _store_checkpoint(self, line: dict[str, Any]) -> None:
        folder = self.workspace.root / line["path"]
        step, key = line["step"], f"{attempt_key(self.run)}/checkpoints/checkpoint-{line['step']}"
        if not _store_folder(folder, key):
            storage.delete(key)  # the trainer, ahead of us, has deleted it to keep its number
            return
        model_id = naming.checkpoint_name(self.model_id, step)
        with db.write() as session:
            held = attempts.record_checkpoint(session, self.run.job_id, self.run.attempt, step, line["metrics"], key, model_id)
            forget = partial(attempts.forget_checkpoints, session, self.run.job_id, self.keep, keep_best=self.keep_best)
            dropped = forget() if held else [key]
        for old in dropped:
            storage.delete(old)

    def _step_record(self, line: dict[str, Any]) -> StepRecord:
        self._steps.append((line["at"], line["step"]))
        # An evaluation has no speed of its own, and must not take away its step's.
        speed = {} if line["tokens_per_second"] is None else {"tokens_per_second": line["tokens_per_second"]}
        return StepRecord(
            step=line["step"],
            total_steps=line["total_steps"],
            values=line["values"] | {"epoch": line["epoch"]} | speed,
            trained_tokens=line["trained_tokens"],
            tokens_per_second=line["tokens_per_second"],
            seconds_left=self._seconds_left(line["total_steps"]),
        )

    def _seconds_left(self, total_steps: int) -> float | None:
        (first_at, first_step), (last_at, last_step) = self._steps[0], self._steps[-1]
        done = last_step - first_step
        return None if done <= 0 else (total_steps - last_step) * (last_at - first_at) / done


def _store_folder(folder: Path, key: str) -> bool:
    """Store a checkpoint's files; False where it vanished meanwhile. Its marker goes first when the trainer deletes it."""
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                storage.put(path, f"{key}/{path.relative_to(folder)}")
    except FileNotFoundError:
        return False
    return (folder / CHECKPOINT_MARKER).exists()


def attempt_key(run: Run) -> str:
    """Where an attempt's files lie in storage."""
    return f"jobs/{run.job_id}/attempt-{run.attempt}"


def _row_counts(line: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What became of a file's rows when they were tokenized, where the line tells that."""
    data = line["data"] or {}
    if "split" not in data or "trained_tokens" not in data:
        return None
    split = "training" if data["split"] == "train" else data["split"]
    tokenized = {name: data[name] for name in ("rows_truncated", "rows_split", "tokens", "trained_tokens", "longest_row")}
    return {split: tokenized | {"rows_used": data["rows_used"], "rows_skipped_tokenized": data["rows_skipped"]}}
