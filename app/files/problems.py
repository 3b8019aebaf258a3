"""What can be wrong with training data: where, by which rule, what was found, and how to fix it."""

from dataclasses import dataclass
from typing import Any

FIXES = {
    "ambiguous_thinking": "Keep one of `thinking`, `reasoning_content` and `reasoning`.",
    "archive_broken": "Pack the file again, and upload all of it.",
    "archive_encrypted": "Upload it without a password.",
    "archive_in_archive": "Upload the inner file.",
    "archive_too_large": "Upload the file of rows without the archive around it.",
    "bad_table": "Write the file again with a current library, or export it as JSON Lines.",
    "dataset_bad_encoding": "Save the file as UTF-8.",
    "dataset_bad_json": 'Write one whole JSON object per line, with `\\"` for quotes inside a text.',
    "dataset_bad_unicode": "Write the character in full, or leave it out.",
    "dataset_duplicate_key": "Keep one of the two.",
    "dataset_empty": "Upload a file with at least one row.",
    "empty_assistant_turn": "Fill in the answer, or leave the row out.",
    "empty_text": "Fill it in, or leave the row out.",
    "equal_answers": "Give two different answers, or leave the row out.",
    "invalid_content": "Give text, a list of text parts, or null.",
    "invalid_label": "Write true or false, without quotes.",
    "invalid_message": "Write each message as an object with `role` and `content`.",
    "invalid_preference": "Give a prompt and two answers, as docs/api.md shows.",
    "invalid_text": "Write it as a text.",
    "invalid_tool_arguments": "Give the arguments as a JSON object, or as its text.",
    "invalid_tool_calls": "Give a list of objects with `function.name` and `function.arguments`.",
    "invalid_tools": "Give a list of function tools.",
    "invalid_weight": "Write 0 or 1.",
    "last_turn_not_assistant": "End the row with the assistant's answer.",
    "missing_content": "Add `content`.",
    "mixed_row_formats": "Split the file by format.",
    "no_assistant_turn": "Add the assistant's answer.",
    "no_messages": "Give a list of at least one message.",
    "not_readable": "Upload it again; a very large one in several files.",
    "no_trainable_turn": "Leave one answer without `weight`: 0.",
    "not_trainable": "Change the row or spec.data, as the message says.",
    "row_not_object": "Write each row as a JSON object.",
    "row_too_large": "Split the row, or leave it out.",
    "several_data_files": "Upload each file on its own; join them first if they belong together.",
    "unknown_message_field": "Remove the field, or rename it to one that is read.",
    "unknown_role": "Use one of the roles that are named.",
    "unknown_row_format": "Rename the columns to those of one format.",
    "unsafe_archive": "Pack the file of rows alone.",
    "unsupported_content_part": "Leave out images, audio and files.",
    "unsupported_format": "Save it as JSON Lines, a JSON array, CSV, TSV or Parquet; gzip, zip and tar around it are read.",
    "unsupported_value": "Convert the column to text, numbers, lists and objects.",
    "wrong_cell_count": "Give the row as many cells as the header; quote cells that hold the separator.",
    "wrong_row_format": "Choose the method that learns from such rows, or convert them.",
}
"""How to fix what each code names."""


@dataclass(frozen=True)
class Problem:
    """Why a row, or the whole file, cannot be used, and where."""

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    path: str | None = None
    offset: int | None = None
    """Where the row begins, in bytes from the start of the file (as unpacked)."""

    def __str__(self) -> str:
        where = [f"line {self.line}" if self.line else "", f"column {self.column}" if self.column else "", self.path or ""]
        place = ", ".join(part for part in where if part)
        return f"{place}: {self.message} ({self.code})" if place else f"{self.message} ({self.code})"

    def as_json(self) -> dict[str, Any]:
        """As a report shows it."""
        where = {"line": self.line, "column": self.column, "byte_offset": self.offset, "path": self.path}
        return {"code": self.code, **where, "message": self.message, "fix": FIXES.get(self.code)}


class Refused(Exception):
    """A whole file cannot be read on."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
