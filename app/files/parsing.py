"""Bytes to rows, each with the physical line it begins on: JSON Lines, a JSON array, CSV, TSV or Parquet, packed or not.

Memory is bounded by the longest row, whatever the size of the file. A value is never changed on its way.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from app.files import archives, tabular
from app.files.archives import Opened
from app.files.problems import Problem, Refused

MAX_ROW_BYTES = tabular.MAX_ROW_BYTES
MAX_PROBLEM_CHARACTERS = 300
BLOCK_BYTES = 1 << 20
SIGNATURES = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xd0\xcf\x11\xe0": "a workbook or document", b"%PDF": "PDF"}
SUFFIXES = {
    "xlsx": "a workbook",
    "xls": "a workbook",
    "ods": "a workbook",
    "bz2": "bzip2",
    "xz": "xz",
    "zst": "zstd",
    "7z": "7z",
}
PACKED = {"zip", "gz", "tgz", "tar", "parquet"}
SEPARATORS = {"csv": ",", "tsv": "\t"}
WHITESPACE = " \t\r\n"


@dataclass(frozen=True)
class Parsed:
    """An object as it stands in the file."""

    line: int
    """The physical line it begins on; in Parquet the number of the row."""
    value: dict[str, Any]
    offset: int | None = None


@dataclass
class Source:
    """What a file turned out to be, known once its first row is read."""

    archives: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    format: str | None = None
    unread: dict[str, str] = field(default_factory=dict)
    """Columns that hold what JSON has no values for, with their types."""


class _DuplicateKey(ValueError):
    pass


def exact_json(text: str) -> Any:
    """The value of a whole JSON text; ValueError or RecursionError where a key stands twice or a number is none."""
    return _DECODER.decode(text)


def parse(stream: IO[bytes], filename: str, source: Source | None = None) -> Iterator[Parsed | Problem]:
    """Every object of the file in order; a broken line is a Problem, and the lines after it are still read."""
    source = source or Source()
    try:
        with archives.opened(stream, filename) as opened:
            source.archives, source.ignored = opened.archives, opened.ignored
            yield from _parse_opened(opened, source)
    except Refused as refused:
        yield refused.problem


def _parse_opened(opened: Opened, source: Source) -> Iterator[Parsed | Problem]:
    stream = opened.stream
    head = stream.read(BLOCK_BYTES)
    stream.seek(0)
    source.format = _format(head, opened.name)
    if source.format in SEPARATORS:
        yield from map(_parsed, tabular.read_csv(stream, SEPARATORS[source.format]))
    elif source.format == "parquet":
        yield from map(_parsed, tabular.read_parquet(stream, source.unread, is_seekable=not opened.archives))
    else:
        yield from _parse_array(stream) if source.format == "json_array" else _parse_lines(stream)


def _parsed(found: tabular.Numbered | Problem) -> Parsed | Problem:
    return found if isinstance(found, Problem) else Parsed(found[0], found[2], found[1])


def _format(head: bytes, name: str) -> str:
    """By what stands in the file; only CSV is known by its name."""
    extension = name.rpartition(".")[2].lower() if "." in name else ""
    if head.startswith(b"PAR1"):
        return "parquet"
    if any(head.startswith(start) for start in SIGNATURES) or extension in SUFFIXES:
        kind = next((kind for start, kind in SIGNATURES.items() if head.startswith(start)), SUFFIXES.get(extension))
        raise Refused(Problem("unsupported_format", f"The file is {kind}, which is not read."))
    if extension in PACKED:
        raise Refused(Problem("unsupported_format", f"The file's name ends in .{extension}, its bytes are something else."))
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if extension in SEPARATORS and first not in (b"{", b"["):
        return extension
    return "json_array" if first == b"[" else "jsonl"


def _parse_lines(stream: IO[bytes]) -> Iterator[Parsed | Problem]:
    number, end = 0, 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number, start, end = number + 1, end, end + len(line)
        if len(line) > MAX_ROW_BYTES:
            yield Problem("row_too_large", f"The row is longer than {MAX_ROW_BYTES} bytes.", number, offset=start)
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES)
                end += len(line)
            continue
        text = _decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number)
        if isinstance(text, Problem):
            yield replace(text, offset=start)
        elif text.strip(WHITESPACE):
            yield _parse_line(text.rstrip(WHITESPACE), number, start)


def _parse_line(text: str, number: int, offset: int) -> Parsed | Problem:
    start = len(text) - len(text.lstrip(WHITESPACE))
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return replace(_bad_json(error.msg, number, error.pos + 1), offset=offset)
    except _REFUSED as error:
        return replace(_refused_value(error, number), offset=offset)
    if text[end:].strip(WHITESPACE):
        return replace(_bad_json("more text after the object", number, end + 1), offset=offset)
    return _object(value, text, number, offset)


def _parse_array(stream: IO[bytes]) -> Iterator[Parsed | Problem]:
    """The elements of a JSON array. Nothing can be read after a broken one: where the next begins is not known."""
    text = _ArrayText(stream)
    try:
        text.expect("[")
        if text.peek() == "]":
            return
        while True:
            text.peek()
            line, offset = text.line, text.offset
            value, raw = text.element()
            yield _object(value, raw, line, offset)
            if text.peek() == "]":
                break
            text.expect(",")
        text.position += 1
        if text.peek():
            yield _bad_json("more text after the array", text.line, text.column)
    except _Broken as broken:
        yield broken.problem


class _Broken(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


class _ArrayText:
    """The text of an array, read block by block; `position` is where reading stands in `buffer`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.position = "", 0
        self.line, self.column = 1, 1
        self.counted = 0
        self.offset = 0

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            self.position = _BLANK.match(self.buffer, self.position).end()  # type: ignore[union-attr] # matches anything
            if self.position < len(self.buffer):
                self._count()
                return self.buffer[self.position]
            if not self._more(BLOCK_BYTES):
                return ""

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise _Broken(_bad_json(f"expected `{character}`", self.line, self.column))
        self.position += 1

    def element(self) -> tuple[Any, str]:
        """The value that begins here. It may be cut off by the end of the buffer: then read as much again and retry."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                length, behind = len(self.buffer) - self.position, error.pos - self.position
                if length > MAX_ROW_BYTES or not self._more(max(BLOCK_BYTES, length)):
                    self.position += behind
                    self._count()
                    raise _Broken(_bad_json(error.msg, self.line, self.column)) from None
            except _REFUSED as error:
                raise _Broken(_refused_value(error, self.line)) from None
            else:
                raw, self.position = self.buffer[self.position : end], end
                return value, raw

    def _more(self, size: int) -> bool:
        """Drop what was read and append the next `size` bytes; False where the file has ended."""
        self._count()
        block = self.stream.read(size)
        try:
            text = self.decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _Broken(_bad_encoding(error, None)) from None
        self.buffer, self.position, self.counted = self.buffer[self.position :] + text, 0, 0
        return bool(block)

    def _count(self) -> None:
        self.offset += len(self.buffer[self.counted : self.position].encode())
        newlines = self.buffer.count("\n", self.counted, self.position)
        self.line += newlines
        start = self.buffer.rfind("\n", self.counted, self.position) + 1 if newlines else self.counted
        self.column = self.position - start + (1 if newlines else self.column)
        self.counted = self.position


def _object(value: Any, raw: str, line: int, offset: int) -> Parsed | Problem:
    if not isinstance(value, dict):
        message = f"A row must be a JSON object, this is {_json_name(value)}."
        return Problem("row_not_object", message, line, offset=offset)
    if ("\\ud" in raw or "\\uD" in raw) and not _is_encodable(value):
        message = "A text holds half of a surrogate pair (\\ud800 to \\udfff): no UTF-8 can."
        return Problem("dataset_bad_unicode", message, line, offset=offset)
    return Parsed(line, value, offset)


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(line: bytes, number: int) -> str | Problem:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return _bad_encoding(error, number)


def _bad_encoding(error: UnicodeDecodeError, line: int | None) -> Problem:
    where = f" at byte {error.start + 1} of the line" if line else ""
    return Problem("dataset_bad_encoding", f"Not UTF-8{where}: save the file as UTF-8.", line)


def _bad_json(reason: str, line: int, column: int) -> Problem:
    return Problem("dataset_bad_json", f"Not valid JSON: {reason}. Each line must hold one whole object.", line, column)


def _refused_value(error: Exception, line: int) -> Problem:
    if isinstance(error, _DuplicateKey):
        return Problem("dataset_duplicate_key", f"The key `{error}` stands twice in one object.", line)
    if isinstance(error, RecursionError):
        return Problem("dataset_bad_json", "The row is nested too deeply.", line)
    return Problem("dataset_bad_json", f"Not valid JSON: {str(error)[:MAX_PROBLEM_CHARACTERS]}.", line)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1)[:MAX_PROBLEM_CHARACTERS])
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
_REFUSED = (ValueError, RecursionError)
