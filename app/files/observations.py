"""What is worth knowing of rows that can be used: columns that are left out, types that change, turns, duplicates.

Memory is bounded whatever the file holds.
"""

import marshal
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from app.files import rows

MAX_COMPARED_ROWS = 1_000_000
MAX_PATHS = 200
MAX_PATH_CHARACTERS = 120
MAX_DEPTH = 3


@dataclass(frozen=True)
class Row:
    """One example in canonical form, the physical line it begins on, and what stood there."""

    line: int
    value: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class Observations:
    """Gathered row by row."""

    form: str | None = None
    unused: Counter[str] = field(default_factory=Counter)
    """Column that is not read -> rows that have it."""
    types: dict[str, dict[str, int]] = field(default_factory=dict)
    """Path below an unread column -> type -> the first line with it."""
    roles: Counter[str] = field(default_factory=Counter)
    messages: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Fewest and most messages of a row, and all of them together."""
    num_chats: int = 0
    seen: set[bytes] = field(default_factory=set)
    num_duplicates: int = 0

    def add(self, row: Row) -> None:
        form = rows.form_of(row.given)
        self.form = self.form or form
        read = rows.FORMS[form] | rows.OPTIONAL[form]
        for column in row.given.keys() - read:
            self._count_unused(column, row)
        self._count_turns(row.value.get("messages") or [])
        self._compare(row)

    def warnings(self, unread: dict[str, str]) -> list[dict[str, Any]]:
        """Everything that is no error and may still surprise."""
        found: list[dict[str, Any]] = [
            {"code": "column_not_read", "path": column, "rows": count, "message": f"`{column}` is not read for training."}
            for column, count in self.unused.most_common()
        ]
        for path, types in self.types.items():
            if len(types) > 1:
                told = ", ".join(f"{kind} from line {line}" for kind, line in types.items())
                found.append(
                    {"code": "mixed_type_column", "path": path, "message": f"The values are of several types: {told}."}
                )
        for column, kind in unread.items():
            message = f"`{column}` holds {kind}, which JSON has no values for: it is not read."
            found.append({"code": "column_not_read", "path": column, "message": message})
        if self.num_duplicates:
            message = f"{self.num_duplicates} rows stand in the file more than once."
            found.append({"code": "duplicate_rows", "path": None, "message": message})
        return found

    def turns(self) -> dict[str, Any] | None:
        """How long the chats are; None where there are none."""
        if not self.num_chats:
            return None
        fewest, most, total = self.messages
        return {"fewest": fewest, "most": most, "mean": round(total / self.num_chats, 2), "roles": dict(self.roles)}

    def _count_unused(self, column: str, row: Row) -> None:
        name = column[:MAX_PATH_CHARACTERS]
        if name in self.unused or len(self.unused) < MAX_PATHS:
            self.unused[name] += 1
        self._note_types(name, row.given[column], row.line, MAX_DEPTH)

    def _note_types(self, path: str, value: Any, line: int, depth: int) -> None:
        if value is None or (path not in self.types and len(self.types) >= MAX_PATHS):
            return
        self.types.setdefault(path, {}).setdefault(_type_name(value), line)
        if isinstance(value, dict) and depth > 1:
            for key, inner in list(value.items())[:MAX_PATHS]:
                self._note_types(f"{path}.{key}"[:MAX_PATH_CHARACTERS], inner, line, depth - 1)

    def _count_turns(self, messages: list[rows.Message]) -> None:
        if not messages:
            return
        count = len(messages)
        self.messages = [
            min(self.messages[0] or count, count), max(self.messages[1], count), self.messages[2] + count
        ]  # fmt: skip
        self.num_chats += 1
        self.roles.update(message["role"] for message in messages)

    def _compare(self, row: Row) -> None:
        if len(self.seen) >= MAX_COMPARED_ROWS:
            return
        # Three times as fast as JSON; from format 3 on, equal values may be written differently.
        digest = blake2b(marshal.dumps(row.value, 2), digest_size=12).digest()
        if digest in self.seen:
            self.num_duplicates += 1
        self.seen.add(digest)


def _type_name(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)
