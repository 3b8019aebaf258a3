"""Answer one preview, in a process of its own: `python -m worker.preview PREVIEW_ID`. It touches no GPU and no weights."""

import os
import sys
import threading
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from sqlalchemy import Row as TableRow

from app import db, storage
from app.errors import TuneyardError
from app.files import dataset
from app.files import service as files
from app.files.observations import Row
from app.files.problems import Problem
from app.jobs.spec import TrainingSpec
from app.previews import service as previews
from app.previews.tables import Preview as Question
from app.secrets.service import reveal
from worker import aside
from worker.redaction import Redactor

SHOWN_ROWS = 3
MAX_LISTED = 100
MAX_TOKENIZED_ROWS = 20_000  # of a larger file the rows after are read, and tokenized only where they are to be shown
MAX_COMPARED_ROWS = 1_000_000


def run(preview: TableRow[Any], stop: threading.Event) -> None:
    """Start the process that answers, and see to it that there is an answer when it has ended."""
    match aside.run("worker.preview", preview.id, previews.TIME_LIMIT_S, stop):
        case "ended":
            previews.fail(preview.id, "internal_error", "The process that was to answer was killed.")
        case "stopped":
            previews.give_back(preview.id)
        case "late":
            message = (
                f"The file could not be read and tokenized in {previews.TIME_LIMIT_S:.0f} seconds: ask for one with fewer rows."
            )
            previews.fail(preview.id, "preview_timeout", message)


def main() -> None:
    """Answer, or say why not."""
    preview = previews.load(sys.argv[1])
    spec = TrainingSpec.stored(preview.spec)
    redactor = Redactor()
    try:
        with db.read() as connection:
            secrets = reveal(connection, preview.project_id, spec.secrets)
        redactor = Redactor(secrets.values(), tokens=False)  # rows are shown as they are
        os.environ.update(secrets)
        previews.answer(preview.id, redactor.plain(look(preview, spec)))
    except TuneyardError as error:
        previews.fail(preview.id, error.code or "invalid_request", redactor.text(error.message), error.param)


def look(preview: Question | TableRow[Any], spec: TrainingSpec) -> dict[str, Any]:
    """The answer to a question; TuneyardError where the model has no tokenizer that can be used."""
    from worker.trainer.failures import TrainerError  # torch reads the environment when it is imported
    from worker.trainer.model import load_tokenizer, within_context
    from worker.trainer.preview import Preview

    try:
        tokenizer, spec = load_tokenizer(spec), within_context(spec)
    except TrainerError as error:
        failure = error.failure
        raise TuneyardError(failure.message, code=failure.code, param=failure.param) from error
    shown, report = Preview(spec, tokenizer, set(preview.lines)), dataset.Report()
    seen: set[bytes] = set()
    for found in _rows(preview.project_id, preview.file_id):
        report.add(found)
        if not isinstance(found, Row):
            continue
        if not preview.lines and len(shown.lines) < SHOWN_ROWS:
            shown.lines = {*shown.lines, found.line}
        if shown.counts.rows_read < MAX_TOKENIZED_ROWS or found.line in shown.lines:
            shown.add(found.line, found.value)
        if preview.validation_file and len(seen) < MAX_COMPARED_ROWS:
            seen.add(_digest(found))
    overlap = _overlap(preview.project_id, preview.validation_file, seen) if preview.validation_file else None
    tokenized = shown.as_json()
    return {
        **tokenized,
        "rows_read": report.rows_read,
        "rows_tokenized": tokenized["rows_read"],
        "num_unreadable": report.num_problems,
        "unreadable": [problem.as_json() for problem in report.problems[:MAX_LISTED]],
        "overlap": overlap,
    }


def _rows(project_id: str, file_id: str) -> Iterator[Row | Problem]:
    with db.read() as connection:
        file = files.file_of_job(connection, project_id, file_id)
    with storage.open_read(file.storage_key) as stream:
        yield from dataset.scan(stream, file.filename)


def _overlap(project_id: str, file_id: str, seen: set[bytes]) -> dict[str, Any]:
    """Rows of the validation file that are the same as one of the training file: they measure nothing."""
    read, lines = 0, []
    for found in _rows(project_id, file_id):
        read += 1
        if isinstance(found, Row) and _digest(found) in seen:
            lines.append(found.line)
    return {"rows_read": read, "rows_in_both": len(lines), "lines": lines[:MAX_LISTED]}


def _digest(row: Row) -> bytes:
    return blake2b(dataset.canonical_line(row.value).encode(), digest_size=12).digest()


if __name__ == "__main__":
    main()
