"""Fine-tuned models: names for the weights that jobs made. Checkpoints have names, too; they live with their job."""

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.jobs.tables import Job
from app.keys.tables import Project


class FineTunedModel(Base):
    """A finished model; its files are the artifacts of its job."""

    __tablename__ = "models"
    __table_args__ = (Index("ix_models_project_created", "project_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(512), primary_key=True)
    """`ft:<base>:<owner>:<suffix>:<job>`."""
    project_id: Mapped[str] = mapped_column(ForeignKey(Project.id))
    job_id: Mapped[str] = mapped_column(ForeignKey(Job.id))
    base_model: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[float] = mapped_column(default=now())
    deleted_at: Mapped[float | None]
