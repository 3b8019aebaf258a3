"""The one reader of training data: upload, job and trainer see the same rows in the same canonical form.

    {"messages": [{"role", "content", "thinking"?, "tool_calls"?, "tool_call_id"?, "name"?, "weight"?}], "tools"?}
    {"prompt": str, "completion": str}
    {"text": str}
    {"prompt", "chosen", "rejected"}: text, or lists of messages with `tools`?; for preferences
    {"prompt", "completion", "label": bool}: the same; one answer, good or not

ShareGPT's `conversations` and conversational prompt-completion rows become `messages`, OpenAI's `input` with
`preferred_output` and `non_preferred_output` becomes `prompt`, `chosen` and `rejected`. Other columns are left out.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from app.files import rows
from app.files.parsing import Problem, parse

MAX_PROBLEMS = 1000
SHOWN_PROBLEMS = 5
MAX_SUMMARY_CHARACTERS = 4000


@dataclass(frozen=True)
class Row:
    """One example, and the physical line it begins on."""

    line: int
    value: dict[str, Any]


class InvalidDataset(ValueError):
    """The first thing wrong with a data set that must have nothing wrong."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass
class Report:
    """What one reading of a whole file found: every problem is counted, the first ones are kept."""

    rows_read: int = 0
    rows_used: int = 0
    num_problems: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        return self.num_problems == 0

    @property
    def summary(self) -> str:
        """The first problems in one text for a person."""
        shown = "; ".join(str(problem) for problem in self.problems[:SHOWN_PROBLEMS])
        more = self.num_problems - SHOWN_PROBLEMS
        return (shown + (f"; and {more} more" if more > 0 else ""))[:MAX_SUMMARY_CHARACTERS]

    def add(self, found: Row | Problem) -> None:
        if isinstance(found, Row):
            self.rows_used += 1
            return
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(found)


def read_rows(source: IO[bytes] | Path, filename: str) -> Iterator[Row]:
    """The rows of a file in canonical form; InvalidDataset at the first one that cannot be used."""
    for found in scan(source, filename):
        if isinstance(found, Problem):
            raise InvalidDataset(found)
        yield found


def canonical_line(value: dict[str, Any]) -> str:
    """A canonical row as the trainer reads it. The SHA-256 over all of them is a data set's identity."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def canonical_hash(source: IO[bytes] | Path, filename: str) -> str:
    """The SHA-256 of a whole file's rows in canonical form; InvalidDataset where one cannot be used."""
    digest = hashlib.sha256()
    for row in read_rows(source, filename):
        digest.update(canonical_line(row.value).encode())
    return digest.hexdigest()


def check(source: IO[bytes] | Path, filename: str) -> Report:
    """Read a file to its end and report everything wrong with it."""
    report = Report()
    for found in scan(source, filename):
        report.rows_read += isinstance(found, Row) or found.line is not None
        report.add(found)
    return report


def scan(source: IO[bytes] | Path, filename: str) -> Iterator[Row | Problem]:
    """Every row of a file, usable or not, in order."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from scan(stream, filename)
        return
    kind: str | None = None
    is_empty = True
    for parsed in parse(source, filename):
        is_empty = False
        if isinstance(parsed, Problem):
            yield parsed
            continue
        try:
            value = rows.canonical(parsed.value)
            kind = kind or rows.kind(value)
            if rows.kind(value) != kind:
                raise rows.Unusable(
                    "mixed_row_formats", f"The rows before hold `{kind}`, this one does not: keep one format a file."
                )
        except rows.Unusable as error:
            yield Problem(error.code, error.message, parsed.line, path=error.path)
        else:
            yield Row(parsed.line, value)
    if is_empty:
        yield Problem("dataset_empty", "The file holds no rows.")
