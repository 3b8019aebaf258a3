"""Check whether a job could learn from its rows, before it waits for GPUs: `python -m worker.check JOB_ID`.

The rows are read as the job's node would read them, and tokenized by the trainer's own code, on CPU and without weights.
"""

import os
import sys
import threading
from typing import Any

from sqlalchemy import Row as TableRow

from app import db
from app.errors import TuneyardError
from app.files import dataset
from app.files.observations import Row
from app.files.problems import Problem
from app.jobs import validating
from app.jobs.spec import TrainingSpec
from app.secrets.service import reveal
from worker import aside
from worker.failures import JobFailed
from worker.prepare import for_method, rows_of
from worker.redaction import Redactor

MAX_TOLD = 100


def run(job: TableRow[Any], stop: threading.Event) -> None:
    """Start the process that checks; what came to no end is tried again, and in the end left to the trainer."""
    if aside.run("worker.check", job.id, validating.CHECK_LIMIT_S, stop) == "stopped":
        validating.give_back_check(job.id)
    else:
        validating.expire_check(job.id)  # nothing, where the job has moved on


def main() -> None:
    """Check, and move the job on."""
    with db.write() as session:
        job = validating.load(session, sys.argv[1])
    spec = TrainingSpec.stored(job.spec)
    with db.read() as connection:
        secrets = reveal(connection, job.project_id, spec.secrets)
    os.environ.update(secrets)
    redactor = Redactor(secrets.values())
    for param in ("training_file", "validation_file"):
        if (source := getattr(job, param)) is not None and (found := check(job.project_id, source, param, spec)) is not None:
            error, report = redactor.plain(found)
            validating.fail_check(job.id, error, report)
            return
    validating.pass_check(job.id)


def check(project_id: str, source: str, param: str, spec: TrainingSpec) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The error that ends a job on these rows, and the report; None where it can learn from them.

    Raises TrainerError where the model has no tokenizer: the trainer says so too, and a Hub that is away may come back.
    """
    from worker.trainer.model import load_tokenizer, within_context  # torch reads the environment when it is imported
    from worker.trainer.preview import Preview

    spec = within_context(spec)
    report, tokenized = dataset.Report(), Preview(spec, load_tokenizer(spec), ())
    try:
        for found in rows_of(source, param, project_id):
            checked = for_method(found, spec.method)
            if isinstance(checked, Row) and (reason := tokenized.add(checked.line, checked.value)) is not None:
                checked = Problem("not_trainable", reason, checked.line)
            report.add(checked)
    except JobFailed as error:
        return {"code": error.code, "message": error.message, "param": error.param}, {}
    except TuneyardError as error:
        return {"code": error.code or "invalid_training_file", "message": error.message, "param": param}, {}
    return _verdict(report, tokenized.as_json(), param, spec)


def _verdict(
    report: dataset.Report, tokenized: dict[str, Any], param: str, spec: TrainingSpec
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    is_left = tokenized["rows_used"] > 0
    if is_left and (report.is_usable or spec.data.on_bad_rows == "skip"):
        return None
    code = "dataset_no_trainable_rows" if spec.data.on_bad_rows == "skip" else "invalid_training_file"
    shown = report.as_json()
    shown["errors"] = shown["errors"][:MAX_TOLD]
    message = report.summary or "No row is left to train on."
    return {"code": code, "message": message, "param": param}, shown


if __name__ == "__main__":
    main()
