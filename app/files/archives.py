"""Gzip, zip and tar: the one file of rows in an archive, read as a stream. Nothing is ever written under a name from inside.

What an archive may become is bounded by a ratio and by a size, while it is read: what it says of itself is not believed.
"""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO

from app.files.problems import Problem, Refused

MAX_RATIO = 200  # text rows shrink to a tenth, very repetitive ones to a fiftieth
ALWAYS_ALLOWED_BYTES = 64 * 1024**2  # a small file may shrink as far as it likes
MAX_INFLATED_BYTES = 256 * 1024**3
MAX_READ_BYTES = 128 * 1024**2  # at once: a header that claims more is a lie
MAX_MEMBERS = 10_000
MAX_DIRECTORY_BYTES = 4 * 1024**2
MAX_LISTED = 100
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
GZIP, ZIP = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
TAR_MAGIC = slice(257, 262)
# What a broken or hostile archive makes the readers raise.
BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    RuntimeError,
    MemoryError,
)


@dataclass
class Opened:
    """The bytes of the rows, and where they were found."""

    stream: IO[bytes]
    name: str
    archives: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Members that hold no rows: Finder's and other hidden files, and what is no table."""


@contextmanager
def opened(stream: IO[bytes], filename: str) -> Iterator[Opened]:
    """The rows' bytes, out of whatever they are packed in: gzip, zip, tar, or a tar in gzip. Raises Refused."""
    with ExitStack() as stack:
        found = Opened(stream, filename)
        try:
            _unpack(found, stack)
            yield found
        except BROKEN as error:
            if not found.archives:
                raise
            raise Refused(_broken(found.archives[-1], error)) from error


def _unpack(found: Opened, stack: ExitStack) -> None:
    start = _start(found.stream)
    limit = _limit(found.stream)
    if start.startswith(GZIP):
        found.archives.append("gzip")
        found.name = found.name.removesuffix(".gz").removesuffix(".tgz")
        found.stream = stack.enter_context(_bounded(gzip.GzipFile(fileobj=found.stream), limit))
        start = _start(found.stream)
    if start[TAR_MAGIC] == b"ustar":
        found.archives.append("tar")
        _open_tar(found, stack, limit)
    elif start.startswith(ZIP) and not found.archives:
        found.archives.append("zip")
        _open_zip(found, stack, limit)
    if found.archives and (start := _start(found.stream)).startswith((GZIP, *ZIP)):
        raise Refused(Problem("archive_in_archive", "The file in the archive is an archive again."))


def _open_zip(found: Opened, stack: ExitStack, limit: int) -> None:
    _check_directory(found.stream)
    archive = stack.enter_context(zipfile.ZipFile(found.stream))
    members = [member for member in archive.infolist() if not member.is_dir()]
    name = _only_rows([member.filename for member in members], found)
    member = next(member for member in members if member.filename == name)
    if member.flag_bits & 1:
        raise Refused(Problem("archive_encrypted", "The archive is encrypted."))
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused(Problem("unsupported_format", "The archive is packed by a method other than deflate."))
    found.stream, found.name = stack.enter_context(_bounded(archive.open(member), limit)), name


def _check_directory(stream: IO[bytes]) -> None:
    """Python reads a zip's whole directory into memory: a file may be nothing else."""
    end = zipfile._EndRecData(stream)  # type: ignore[attr-defined] # the record's own reader
    if not end:
        raise zipfile.BadZipFile("no end record")
    if end[zipfile._ECD_SIZE] > MAX_DIRECTORY_BYTES or end[zipfile._ECD_ENTRIES_TOTAL] > MAX_MEMBERS:  # type: ignore[attr-defined]
        raise Refused(Problem("archive_too_large", f"The archive holds more than {MAX_MEMBERS} files."))
    stream.seek(0)


def _open_tar(found: Opened, stack: ExitStack, limit: int) -> None:
    # Also a tar that is not packed is bounded: it may claim to hold more bytes than it has.
    found.stream.seek(0)
    archive = stack.enter_context(tarfile.open(fileobj=_bounded(found.stream, limit), mode="r:"))  # noqa: SIM115 # the stack is one
    names: list[str] = []
    members: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        if len(names) >= MAX_MEMBERS:
            raise Refused(Problem("archive_too_large", f"The archive holds more than {MAX_MEMBERS} files."))
        if member.isdir():
            continue
        if not member.isfile():
            raise Refused(Problem("unsafe_archive", f"`{member.name[:200]}` in the archive is a link or a device."))
        names.append(member.name)
        members[member.name] = member
    name = _only_rows(names, found)
    stream = archive.extractfile(members[name])
    assert stream is not None  # a regular file
    found.stream, found.name = stack.enter_context(_bounded(stream, limit)), name


def _only_rows(names: list[str], found: Opened) -> str:
    """The one member that holds rows. Several are not put together: one may be there to validate the other."""
    if unsafe := next((name for name in names if _leads_out(name)), None):
        raise Refused(Problem("unsafe_archive", f"`{unsafe[:200]}` in the archive leads out of it."))
    plain = [name for name in names if not _is_hidden(name)]
    rows = [name for name in plain if name.lower().endswith(SUFFIXES)] or (plain if len(plain) == 1 else [])
    if not rows:
        raise Refused(Problem("dataset_empty", f"The archive holds no file of rows ({', '.join(SUFFIXES)})."))
    if len(rows) > 1:
        listed = ", ".join(f"`{name[:80]}`" for name in rows[:8])
        raise Refused(Problem("several_data_files", f"The archive holds {len(rows)} files of rows: {listed}."))
    found.ignored = [name for name in names if name != rows[0]][:MAX_LISTED]
    return rows[0]


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or "\0" in name or name[1:2] == ":"


def _is_hidden(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not parts or parts[0] == "__MACOSX" or any(part.startswith(".") for part in parts) or parts[-1] == "Thumbs.db"


def _start(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    start = stream.read(512)
    stream.seek(0)
    return start


def _limit(stream: IO[bytes]) -> int:
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return min(MAX_INFLATED_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * size))


def _broken(kind: str, error: Exception) -> Problem:
    return Problem("archive_broken", f"The {kind} archive is damaged or incomplete ({type(error).__name__}).")


def _bounded(stream: IO[bytes] | gzip.GzipFile, limit: int) -> IO[bytes]:
    return io.BufferedReader(_Bounded(stream, limit), 1 << 18)


class _Bounded(io.RawIOBase):
    """A stream that ends with an error once it has given more than `limit` bytes."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit = stream, limit

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        if len(buffer) > MAX_READ_BYTES:
            raise Refused(Problem("archive_broken", "The archive claims a header larger than any has."))
        data = self.stream.read(len(buffer))
        if self.stream.tell() > self.limit:
            message = f"The archive inflates to more than {MAX_RATIO} times its size, or over {MAX_INFLATED_BYTES} bytes."
            raise Refused(Problem("archive_too_large", message))
        buffer[: len(data)] = data
        return len(data)
