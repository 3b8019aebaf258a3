"""Uploaded and produced files."""

from sqlalchemy import BigInteger, ForeignKey, Index, String
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
