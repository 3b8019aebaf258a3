"""Sending stored objects: conditional requests, single byte ranges, and names any client can read (RFC 9110, RFC 6266)."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from app import storage
from app.errors import NotFound

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredObject:
    """What is known of an object before its bytes are read. Its SHA-256 is its strong ETag."""

    key: str
    size: int
    sha256: str
    filename: str

    @property
    def etag(self) -> str:
        return f'"{self.sha256}"'


def json_with_etag(request: Request, body: BaseModel) -> Response:
    """The body as JSON, or 304 for a poller that has it already."""
    payload = body.model_dump_json().encode()
    etag = f'"{hashlib.sha256(payload).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if _names(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(payload, media_type="application/json", headers=headers)


def send(request: Request, stored: StoredObject) -> Response:
    """The object's bytes, or the part of them the request asks for."""
    headers = {
        "ETag": stored.etag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": content_disposition(stored.filename),
        "X-Content-Type-Options": "nosniff",  # a browser must not run what somebody uploaded
    }
    if _names(request.headers.get("if-none-match"), stored.etag):
        return Response(status_code=304, headers=headers)
    wanted = _range(request, stored)
    if wanted is not None and not wanted:
        return Response(status_code=416, headers=headers | {"Content-Range": f"bytes */{stored.size}"})
    part = wanted if wanted is not None else range(stored.size)
    headers["Content-Length"] = str(len(part))
    if wanted is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{stored.size}"
    status, media_type = (200 if wanted is None else 206), "application/octet-stream"
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    return StreamingResponse(_blocks(_open(stored.key), part), status, headers, media_type)


def content_disposition(filename: str) -> str:
    """A download's name: exact in UTF-8, and near enough in ASCII for old clients."""
    plain = unicodedata.normalize("NFKD", filename).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^\w.()\[\] -]", "_", plain).strip() or "download"
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


def _names(header: str | None, etag: str) -> bool:
    """Does an If-None-Match header name this version?"""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return etag in tags or "*" in tags


def _range(request: Request, stored: StoredObject) -> range | None:
    """The bytes asked for: None for all of them, an empty range for one outside the object."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "").replace(" ", ""))
    if match is None or match[0] == "bytes=-":
        return None  # other units and several ranges may be ignored
    if request.headers.get("if-range") not in (None, stored.etag):
        return None  # the client's part is of another version
    first, last = match[1], match[2]
    if not first:
        return range(max(0, stored.size - int(last)), stored.size)
    return range(int(first), min(int(last) + 1 if last else stored.size, stored.size))


def _open(key: str) -> IO[bytes]:
    try:
        return storage.open_read(key)
    except FileNotFoundError:
        raise NotFound("The bytes of this object are no longer in storage.", code="content_missing") from None


def _blocks(file: IO[bytes], part: range) -> Iterator[bytes]:
    with file:
        file.seek(part.start)
        left = len(part)
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            yield block
