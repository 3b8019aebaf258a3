"""Files and artifacts in a folder or an object store, through fsspec. A key is a relative path below the storage URL."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from fsspec.core import url_to_fs

from app.config import get_settings


@contextmanager
def writer(key: str) -> Iterator[IO[bytes]]:
    """Write an object: it appears under its key only when the block ends without an error."""
    fs, root = _store()
    final = f"{root}/{key}"
    temporary = f"{final}.{uuid4().hex}.part"
    fs.makedirs(fs._parent(final), exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            yield file
        fs.mv(temporary, final)
    except BaseException:
        if fs.exists(temporary):
            fs.rm(temporary)
        raise


def put(path: Path, key: str) -> None:
    """Store a local file under `key`."""
    with path.open("rb") as source, writer(key) as target:
        while block := source.read(1 << 20):
            target.write(block)


def get(key: str, path: Path) -> None:
    """Copy an object to a local file; FileNotFoundError where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fs, root = _store()
    fs.get_file(f"{root}/{key}", str(path))


def get_tree(prefix: str, folder: Path) -> None:
    """Copy every object below `prefix` into a local folder."""
    for key in keys(prefix):
        get(key, folder / key.removeprefix(prefix).lstrip("/"))


def open_read(key: str) -> IO[bytes]:
    """An object's bytes, seekable; FileNotFoundError where there is none."""
    fs, root = _store()
    file: IO[bytes] = fs.open(f"{root}/{key}", "rb")
    return file


def keys(prefix: str) -> list[str]:
    """The keys of all objects below `prefix`, sorted."""
    fs, root = _store()
    return sorted(path[len(root) + 1 :] for path in fs.find(f"{root}/{prefix}"))


def folders(prefix: str) -> list[str]:
    """The names of the folders right below `prefix`, sorted."""
    fs, root = _store()
    if not fs.exists(f"{root}/{prefix}"):
        return []
    entries = fs.ls(f"{root}/{prefix}", detail=True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def size(prefix: str) -> int:
    """The bytes of everything below `prefix`."""
    fs, root = _store()
    return int(fs.du(f"{root}/{prefix}")) if fs.exists(f"{root}/{prefix}") else 0


def age_s(key: str) -> float:
    """Seconds since an object was written, by its store's clock and ours; 0 where it is gone."""
    fs, root = _store()
    try:
        return time.time() - float(fs.modified(f"{root}/{key}").timestamp())
    except FileNotFoundError:
        return 0.0


def delete(key: str) -> None:
    """Delete an object, or everything below a prefix; nothing where there is none."""
    fs, root = _store()
    with suppress(FileNotFoundError):  # somebody else deletes it at this moment
        if fs.exists(f"{root}/{key}"):
            fs.rm(f"{root}/{key}", recursive=True)


def uri(key: str) -> str:
    """Where an object lies, as a URI an operator's tools can open."""
    fs, root = _store()
    return str(fs.unstrip_protocol(f"{root}/{key}"))


@cache
def _store() -> tuple[Any, str]:
    fs, root = url_to_fs(get_settings().resolved_storage_url)
    return fs, root.rstrip("/")
