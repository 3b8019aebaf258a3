"""Projects on the wire."""

from typing import Literal, Self

from pydantic import BaseModel, Field

from app.keys.tables import Project
from app.schemas import RequestModel


class ProjectUpdate(RequestModel):
    """What an operator gives a project. A field that is left out stays as it is; null lifts a quota."""

    weight: float = Field(default=1.0, gt=0, le=1000, description="Its part of the nodes where projects compete.")
    max_running_jobs: int | None = Field(default=None, ge=0, le=1_000_000, description="More jobs wait.")
    max_gpus: int | None = Field(default=None, ge=0, le=1_000_000, description="At once; jobs beyond it wait.")
    max_gpu_hours_per_month: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="By UTC's calendar; once used, new jobs are refused and running ones go on.",
    )
    max_storage_bytes: int | None = Field(
        default=None, ge=0, le=2**60, description="Files and results; uploads and jobs beyond it are refused."
    )


class ProjectOut(BaseModel):
    """A project, its weight and its quotas; null where there is none."""

    id: str
    object: Literal["project"] = "project"
    name: str
    weight: float
    max_running_jobs: int | None
    max_gpus: int | None
    max_gpu_hours_per_month: float | None
    max_storage_bytes: int | None
    created_at: int

    @classmethod
    def of(cls, project: Project) -> Self:
        quotas = {name: getattr(project, name) for name in ProjectUpdate.model_fields}
        return cls(id=project.id, name=project.name, created_at=int(project.created_at), **quotas)
