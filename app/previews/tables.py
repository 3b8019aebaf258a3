"""Looks at what a model would learn from a file."""

from typing import Any

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.files.tables import File
from app.keys.tables import Project


class Preview(Base):
    """One question and its answer, which a node gives."""

    __tablename__ = "previews"
    __table_args__ = (Index("ix_previews_created", "created_at"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey(Project.id))
    file_id: Mapped[str] = mapped_column(ForeignKey(File.id, ondelete="CASCADE"))
    validation_file: Mapped[str | None] = mapped_column(String(64))
    lines: Mapped[list[Any]]
    """The lines of the rows to show; empty for the first ones."""
    spec: Mapped[dict[str, Any]]
    """The resolved TrainingSpec."""
    tries: Mapped[int] = mapped_column(default=0)
    leased_until: Mapped[float] = mapped_column(default=0.0)
    """Until then a node is at it; in the past, it waits for one."""
    result: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(default=now())
