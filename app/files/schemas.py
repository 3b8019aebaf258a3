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
