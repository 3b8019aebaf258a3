"""Secrets, taken out of everything that a job says: values it was given, and whatever else has the shape of a token."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from app.redaction import MASK, without_tokens, without_tokens_in_bytes


class Redactor:
    """Replaces the values it knows, and tokens unless told not to. They hold no line breaks: text is cleaned line by line."""

    def __init__(self, values: Iterable[str] = (), *, tokens: bool = True) -> None:
        self._tokens = tokens
        # The longest first: one value may be part of another.
        self._values = sorted(set(values), key=len, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._values)

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, MASK)
        return without_tokens(text) if self._tokens else text

    def plain(self, value: Any) -> Any:
        """The same for a value of JSON, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.plain(inner) for inner in value]
        return value

    def copy_log(self, source: IO[bytes], target: IO[bytes]) -> None:
        """A log without secrets, and of each line what a terminal would show at its end: a progress bar redraws it a thousand
        times. Lines that are whole stay as they are when the log grows: readers go on by offset."""
        for line in source:
            target.write(without_tokens_in_bytes(self._known_in(_last_drawn(line))))

    def clean(self, folder: Path, *patterns: str) -> None:
        """Rewrite the text files below a folder that hold a value; nothing may still be writing to them.

        Tokens stay: among the files are rows and tokenizers, which are the user's own.
        """
        if not self:
            return
        for path in (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()):
            temporary = path.with_name(path.name + ".clean")
            with path.open("rb") as lines, temporary.open("wb") as cleaned:
                cleaned.writelines(map(self._known_in, lines))
            temporary.replace(path)

    def _known_in(self, line: bytes) -> bytes:
        for value in self._values:
            line = line.replace(value.encode(), MASK.encode())
        return line


def _last_drawn(line: bytes) -> bytes:
    body = line.rstrip(b"\r\n")
    return body[body.rfind(b"\r") + 1 :] + line[len(body) :].replace(b"\r", b"")
