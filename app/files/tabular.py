"""Rows of CSV, TSV and Parquet, value by value as they stand in the file."""

import codecs
import csv
import json
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from app.files.problems import Problem, Refused

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROW_BYTES = 64 * 1024**2  # the longest row seen in public data sets is a fifth of this
MAX_COLUMNS = 10_000
BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20
COPY_BYTES = 1 << 20

Numbered = tuple[int, int | None, dict[str, Any]]
"""Line or row number, byte offset of the line, and the values."""


def read_csv(stream: IO[bytes], separator: str) -> Iterator[Numbered | Problem]:
    """Every row under the names of the first. Every cell is text: a blank one is empty, and `null` and `NA` are words."""
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _Lines(stream)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        lines.begin_row()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # Where a quote is left open, nobody knows which row the next line belongs to.
            yield Problem("bad_table", f"Not valid CSV: {error}.", lines.first, offset=lines.offset)
            return
        except Refused as refused:
            yield refused.problem
            return
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = cells
            _check_header(header)
        elif len(cells) != len(header):
            message = f"The row has {len(cells)} cells, the header {len(header)}."
            yield Problem("wrong_cell_count", message, lines.first, offset=lines.offset)
        else:
            yield lines.first, lines.offset, dict(zip(header, cells, strict=True))


def _check_header(header: list[str]) -> None:
    if len(header) > MAX_COLUMNS:
        raise Refused(Problem("bad_table", f"The header names more than {MAX_COLUMNS} columns.", 1))
    if len(set(header)) < len(header):
        name = next(name for name in header if header.count(name) > 1)
        raise Refused(Problem("dataset_duplicate_key", f"The header names the column `{name[:80]}` twice.", 1))


class _Lines:
    """The lines of a file as text, with the place of the row that is being read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.number, self.position = 0, 0
        self.first, self.offset = 1, 0

    def begin_row(self) -> None:
        self.first, self.offset = self.number + 1, self.position

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self.stream.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.position += len(line)
        if self.position - self.offset > MAX_ROW_BYTES:
            message = f"The row is longer than {MAX_ROW_BYTES} bytes: a quote may not be closed."
            raise Refused(Problem("row_too_large", message, self.first, offset=self.offset))
        try:
            return (line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line).decode()
        except UnicodeDecodeError as error:
            message = f"Not UTF-8 at byte {error.start + 1} of the line."
            raise Refused(Problem("dataset_bad_encoding", message, self.number, offset=self.position - len(line))) from None


def read_parquet(stream: IO[bytes], unread: dict[str, str], *, is_seekable: bool) -> Iterator[Numbered | Problem]:
    """Every row, a few hundred in memory at a time; columns that JSON has no values for go to `unread` with their type.

    A packed stream is copied to a temporary file first: Parquet is read from its end.
    """
    if is_seekable:
        yield from _read_parquet(stream, unread)
        return
    with tempfile.TemporaryFile() as copy:
        while block := stream.read(COPY_BYTES):
            copy.write(block)
        yield from _read_parquet(copy, unread)


def _read_parquet(stream: IO[bytes], unread: dict[str, str]) -> Iterator[Numbered | Problem]:
    import pyarrow as pa  # large, and only needed here
    import pyarrow.parquet as pq

    stream.seek(0)
    number = 0
    try:
        file = pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False, memory_map=False)
        schema = file.schema_arrow
        if len(set(schema.names)) < len(schema.names):
            raise Refused(Problem("dataset_duplicate_key", "The file has two columns of one name."))
        unread |= {column.name: str(column.type) for column in schema if not _is_plain(column.type)}
        columns = [name for name in schema.names if name not in unread]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield (number, None, row) if _is_json(row) else _no_json(number)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        yield Problem("bad_table", f"Not a Parquet file that can be read: {reason}", number + 1 if number else None)


def _is_plain(kind: "pa.DataType") -> bool:
    """Whether every value of a type is one that JSON has too."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean, types.is_integer)
    return types.is_floating(kind) or types.is_null(kind) or any(is_type(kind) for is_type in plain)


def _is_json(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(number: int) -> Problem:
    return Problem("unsupported_value", "The row holds a number that is none (NaN or infinite), or broken text.", number)
