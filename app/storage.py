"""Files and artifacts in a folder or an object store, through fsspec. A key is a relative path below the storage URL."""

from collections.abc import Iterator
from contextlib import contextmanager
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


def delete(key: str) -> None:
    """Delete an object, or everything below a prefix; nothing where there is none."""
    fs, root = _store()
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
