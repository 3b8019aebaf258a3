"""Uploaded and produced files."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.keys.tables import Project


class File(Base):
    """One file; its bytes lie in storage under `storage_key`."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_project_created", "project_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey(Project.id))
    filename: Mapped[str] = mapped_column(String(1024))
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))
    status_details: Mapped[str | None] = mapped_column(String(4096))
    storage_key: Mapped[str] = mapped_column(String(1024))
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float | None]


class Validation(Base):
    """The reading of one file of training data: who is at it, and what was found."""

    __tablename__ = "file_validations"
    __table_args__ = (
        Index(
            "ix_file_validations_waiting",
            "leased_until",
            postgresql_where=text("report IS NULL"),
            sqlite_where=text("report IS NULL"),
        ),
    )

    file_id: Mapped[str] = mapped_column(ForeignKey(File.id, ondelete="CASCADE"), primary_key=True)
    tries: Mapped[int] = mapped_column(default=0)
    leased_until: Mapped[float] = mapped_column(default=0.0)
    """Until then a control worker reads it; in the past, the file waits for one."""
    report: Mapped[dict[str, Any] | None]
