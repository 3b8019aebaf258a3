"""Projects and their API keys."""

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now


class Project(Base):
    """Whose jobs, files and models; nothing is seen across projects."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[float] = mapped_column(default=now())


class ApiKey(Base):
    """A key as we know it: its SHA-256 only."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float] = mapped_column(default=now())
    is_admin: Mapped[bool] = mapped_column(default=False)
    """Whether it also opens what concerns the whole service: its nodes, its projects."""
    revoked_at: Mapped[float | None]
