"""Fine-tuned models: names for the weights that jobs made."""

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now


class FineTunedModel(Base):
    """A finished model or a usable checkpoint of one; its files lie in storage under `storage_key`."""

    __tablename__ = "models"
    __table_args__ = (Index("ix_models_project_created", "project_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(512), primary_key=True)
    """`ft:<base>:<owner>:<suffix>:<job>`, for checkpoints with `:ckpt-step-<N>` behind."""
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    base_model: Mapped[str] = mapped_column(String(512))
    storage_key: Mapped[str] = mapped_column(String(1024))
    step: Mapped[int | None]
    """The checkpoint's step; None for the finished model."""
    created_at: Mapped[float] = mapped_column(default=now())
    deleted_at: Mapped[float | None]
