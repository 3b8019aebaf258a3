"""Files on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel
from sqlalchemy import Row

from app.files.tables import File

UploadPurpose = Literal["fine-tune", "user_data", "evals"]
Purpose = Literal["fine-tune", "user_data", "evals", "fine-tune-results"]


class FileOut(BaseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None

    @classmethod
    def of(cls, file: File | Row[Any]) -> Self:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=int(file.created_at),
            expires_at=None if file.expires_at is None else int(file.expires_at),
            filename=file.filename,
            purpose=file.purpose,
            status=file.status,
            status_details=file.status_details,
        )


class Found(BaseModel):
    """One thing that is wrong, where, and how to fix it."""

    code: str
    message: str
    fix: str | None
    line: int | None
    column: int | None
    byte_offset: int | None
    path: str | None


class Warned(BaseModel):
    """What is no error and may still surprise; `rows` where rows were counted."""

    code: str
    message: str
    path: str | None
    rows: int | None = None


class Detected(BaseModel):
    """What the file is: what it is packed in, how it is written, and the form of its rows."""

    archives: list[str]
    file: str | None
    rows: str | None


class Turns(BaseModel):
    """Messages per chat, and how many there are of each role."""

    fewest: int
    most: int
    mean: float
    roles: dict[str, int]


class Duplicates(BaseModel):
    """Rows that stand in the file more than once, of those that were compared."""

    rows: int
    compared: int


class ValidationOut(BaseModel):
    """Everything found in a file: all errors are counted, the first 1,000 are listed."""

    object: Literal["file.validation"] = "file.validation"
    rows_read: int
    rows_used: int
    rows_skipped: int
    detected_format: Detected
    ignored_members: list[str]
    num_errors: int
    error_counts: dict[str, int]
    errors: list[Found]
    warnings: list[Warned]
    turns: Turns | None
    duplicates: Duplicates
