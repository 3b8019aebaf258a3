"""Projects and their API keys."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now


class Project(Base):
    """Whose jobs, files and models; nothing is seen across projects."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    """Its part of the nodes where projects compete, against the weights of the others."""
    usage: Mapped[float] = mapped_column(default=0.0)
    """Slot-seconds of jobs that gave their slots back, halved with each half-life, as of `usage_at`."""
    usage_at: Mapped[float] = mapped_column(default=0.0)
    max_running_jobs: Mapped[int | None]
    max_gpus: Mapped[int | None]
    max_gpu_hours_per_month: Mapped[float | None]
    max_storage_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(default=now())


class ApiKey(Base):
    """A key as we know it: its SHA-256, and its last characters for people to tell keys apart."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(32))
    scopes: Mapped[list[Any]]
    """What it opens, as `scopes.py` names it."""
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """Within a minute."""
    revoked_at: Mapped[float | None]
