"""Secrets of a job, taken out of everything that it says."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

MASK = "***"


class Redactor:
    """Replaces the values it knows. They hold no line breaks, so text can be cleaned line by line."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        # The longest first: one value may be part of another.
        self._values = sorted(set(values), key=len, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._values)

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, MASK)
        return text

    def plain(self, value: Any) -> Any:
        """The same for a value of JSON, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.plain(inner) for inner in value]
        return value

    def copy(self, source: Path, target: Path) -> None:
        """A text file without secrets."""
        with source.open("rb") as lines, target.open("wb") as cleaned:
            for line in lines:
                for value in self._values:
                    line = line.replace(value.encode(), MASK.encode())
                cleaned.write(line)

    def clean(self, folder: Path, *patterns: str) -> None:
        """Rewrite the text files below a folder that hold a secret; nothing may still be writing to them."""
        if not self:
            return
        for path in (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()):
            temporary = path.with_name(path.name + ".clean")
            self.copy(path, temporary)
            temporary.replace(path)
