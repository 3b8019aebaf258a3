"""The trainer's log of a job's newest attempt. A running attempt's supervisor uploads it again and again under the same key."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from app import storage
from app.errors import InvalidRequest

BLOCK_BYTES = 1 << 16
LOG_NAME = "trainer.log"


@dataclass(frozen=True)
class Position:
    """How far a reader has come: the byte offset in the log of one attempt. `attempt:offset` on the wire."""

    attempt: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        match = re.fullmatch(r"(\d{1,9}):(\d{1,18})", text)
        if match is None:
            raise InvalidRequest("`Last-Event-ID` must be the id of an event of this stream.", param="Last-Event-ID")
        return cls(int(match[1]), int(match[2]))


def log_key(job_id: str, attempt: int) -> str:
    """Where the log of an attempt lies in storage."""
    return f"jobs/{job_id}/attempt-{attempt}/{LOG_NAME}"


def tail(job_id: str, attempt: int, lines: int) -> tuple[Position, str]:
    """The last lines of the newest log up to an attempt, and the position behind them."""
    for found, file in _newest(job_id, attempt):
        start, end = _last_lines(file, lines)
        file.seek(start)
        return Position(found, end), file.read(end - start).decode(errors="replace")
    return Position(), ""


def read_on(job_id: str, attempt: int, position: Position, *, to_end: bool) -> tuple[Position, str]:
    """What has come since `position`: whole lines, and with `to_end` the rest, too. A newer attempt is read from its start."""
    for found, file in _newest(job_id, attempt):
        offset = position.offset if position.attempt == found else 0
        file.seek(offset)
        block = file.read(BLOCK_BYTES)
        is_rest = to_end and len(block) < BLOCK_BYTES
        size = len(block) if is_rest else block.rfind(b"\n") + 1
        if not size and len(block) == BLOCK_BYTES:  # a line longer than a block
            size = BLOCK_BYTES
        return Position(found, offset + size), block[:size].decode(errors="replace")
    return position, ""


def _newest(job_id: str, attempt: int) -> Iterator[tuple[int, IO[bytes]]]:
    """The log of the newest attempt that has one, or nothing."""
    for number in range(attempt, 0, -1):
        try:
            file = storage.open_read(log_key(job_id, number))
        except FileNotFoundError:
            continue
        with file:
            yield number, file
        return


def _last_lines(file: IO[bytes], lines: int) -> tuple[int, int]:
    """Start and end of the last lines, found from the end: a log may be long."""
    end = start = file.seek(0, 2)
    needed = lines + 1  # the newline before the first wanted line; the file's last byte usually is one, too
    while start > 0 and needed > 0:
        size = min(BLOCK_BYTES, start)
        file.seek(start - size)
        block = file.read(size)
        if start == end and not block.endswith(b"\n"):
            needed -= 1
        cut = len(block)
        while needed > 0 and (cut := block.rfind(b"\n", 0, cut)) >= 0:
            needed -= 1
        if needed == 0:
            return start - size + cut + 1, end
        start -= size
    return 0, end
