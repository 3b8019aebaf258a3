"""The one reader of training data: upload, job and trainer see the same rows in the same canonical form.

    {"messages": [{"role", "content", "thinking"?, "tool_calls"?, "tool_call_id"?, "name"?, "weight"?}], "tools"?}
    {"prompt": str, "completion": str}
    {"text": str}
    {"prompt", "chosen", "rejected"}: text, or lists of messages with `tools`?; for preferences
    {"prompt", "completion", "label": bool}: the same; one answer, good or not

ShareGPT's `conversations`, Alpaca's `instruction` and conversational prompt-completion rows become `messages`, OpenAI's
`input` with `preferred_output` and `non_preferred_output` becomes `prompt`, `chosen` and `rejected`. Other columns are
left out.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from app.files import rows
from app.files.observations import Observations, Row
from app.files.parsing import Parsed, Source, parse
from app.files.problems import Problem

MAX_PROBLEMS = 1000
SHOWN_PROBLEMS = 5
MAX_SUMMARY_CHARACTERS = 4000


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
    codes: Counter[str] = field(default_factory=Counter)
    source: Source = field(default_factory=Source)
    observed: Observations = field(default_factory=Observations)

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
        self.rows_read += isinstance(found, Row) or found.line is not None
        if isinstance(found, Row):
            self.rows_used += 1
            self.observed.add(found)
            return
        self.num_problems += 1
        self.codes[found.code] += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(found)

    def as_json(self) -> dict[str, Any]:
        """As it is stored and shown."""
        source, observed = self.source, self.observed
        return {
            "rows_read": self.rows_read,
            "rows_used": self.rows_used,
            "rows_skipped": self.rows_read - self.rows_used,
            "detected_format": {"archives": source.archives, "file": source.format, "rows": observed.form},
            "ignored_members": source.ignored,
            "num_errors": self.num_problems,
            "error_counts": dict(self.codes),
            "errors": [problem.as_json() for problem in self.problems],
            "warnings": observed.warnings(source.unread),
            "turns": observed.turns(),
            "duplicates": {"rows": observed.num_duplicates, "compared": len(observed.seen) + observed.num_duplicates},
        }


def read_rows(source: IO[bytes] | Path, filename: str) -> Iterator[Row]:
    """The rows of a file in canonical form; InvalidDataset at the first one that cannot be used."""
    for found in scan(source, filename):
        if isinstance(found, Problem):
            raise InvalidDataset(found)
        yield found


def canonical_line(value: dict[str, Any]) -> str:
    """A canonical row as the trainer reads it. The SHA-256 over all of them is a data set's identity."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def canonical_hash(source: IO[bytes] | Path, filename: str, *, skip_bad: bool = False) -> str:
    """The SHA-256 of a whole file's rows in canonical form; InvalidDataset where one cannot be used and none is skipped."""
    digest = hashlib.sha256()
    for row in scan(source, filename) if skip_bad else read_rows(source, filename):
        if isinstance(row, Row):
            digest.update(canonical_line(row.value).encode())
    return digest.hexdigest()


def check(source: IO[bytes] | Path, filename: str, each_row: Callable[[], None] = lambda: None) -> Report:
    """Read a file to its end and report everything wrong with it; what `each_row` raises ends the reading."""
    report = Report()
    for found in scan(source, filename, report.source):
        report.add(found)
        each_row()
    return report


def scan(source: IO[bytes] | Path, filename: str, facts: Source | None = None) -> Iterator[Row | Problem]:
    """Every row of a file, usable or not, in order; `facts` learns what the file is."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from scan(stream, filename, facts)
        return
    yield from canonical_rows(parse(source, filename, facts))


def canonical_rows(found: Iterable[Parsed | Problem]) -> Iterator[Row | Problem]:
    """Every row in canonical form, or why it cannot be used. All must be of one kind."""
    kind: str | None = None
    is_empty = True
    for parsed in found:
        is_empty = False
        if isinstance(parsed, Problem):
            yield parsed
            continue
        try:
            value = rows.canonical(parsed.value)
            found_kind = rows.kind(value)
            kind = kind or found_kind
            if found_kind != kind:
                raise rows.Unusable(
                    "mixed_row_formats", f"The rows before hold `{kind}`, this one does not: keep one format a file."
                )
        except rows.Unusable as error:
            yield Problem(error.code, error.message, parsed.line, path=error.path, offset=parsed.offset)
        else:
            yield Row(parsed.line, value, parsed.value)
    if is_empty:
        yield Problem("dataset_empty", "The file holds no rows.")
