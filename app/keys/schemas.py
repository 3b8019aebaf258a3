"""Projects on the wire."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator
from sqlalchemy import Row

from app.keys.scopes import KNOWN, PROJECT_SCOPES
from app.keys.service import NewKey
from app.keys.tables import ApiKey, Project
from app.schemas import RequestModel

NAME = r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"


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


class ProjectCreate(ProjectUpdate):
    """A new project."""

    name: str = Field(pattern=NAME, max_length=128, description="One of its own among all projects.")


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
    def of(cls, project: Project | Row[Any]) -> Self:
        quotas = {name: getattr(project, name) for name in ProjectUpdate.model_fields}
        return cls(id=project.id, name=project.name, created_at=int(project.created_at), **quotas)


class KeyCreate(RequestModel):
    """A new key of a project."""

    name: str = Field(pattern=NAME, max_length=128, description="For people.")
    scopes: Annotated[list[str], Field(min_length=1, max_length=20)] = Field(
        default=list(PROJECT_SCOPES),
        description="What it opens: `jobs`, `files` and `models`, each with `:read`, `:write` or `:*`; `chat`; `admin`.",
    )
    expires_in_s: float | None = Field(default=None, gt=0, le=1e9, description="Seconds until it ends. Default: never.")

    @field_validator("scopes")
    @classmethod
    def _known(cls, scopes: list[str]) -> list[str]:
        unknown = [scope for scope in scopes if scope not in KNOWN]
        if unknown:
            raise ValueError(f"`{unknown[0]}` is no scope; there are {', '.join(sorted(KNOWN))}")
        return scopes


class KeyRotate(RequestModel):
    """How a key is replaced."""

    keep_old_s: float = Field(default=0.0, ge=0, le=30 * 24 * 3600.0, description="How long the old one still opens.")


class KeyOut(BaseModel):
    """A key as it can be shown: never the key itself."""

    id: str
    object: Literal["project.api_key"] = "project.api_key"
    name: str
    project_id: str
    redacted_value: str
    scopes: list[str]
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    revoked_at: int | None

    @classmethod
    def of(cls, key: ApiKey | Row[Any], **more: Any) -> Self:
        times = {name: _whole(getattr(key, name)) for name in ("expires_at", "last_used_at", "revoked_at")}
        shown = {name: getattr(key, name) for name in ("id", "name", "project_id", "scopes")}
        return cls(**shown, **times, **more, redacted_value=key.hint, created_at=int(key.created_at))


class NewKeyOut(KeyOut):
    """A key at its creation."""

    value: str = Field(description="The key. Shown this once.")

    @classmethod
    def of_new(cls, key: NewKey) -> Self:
        return cls.of(key.row, value=key.plaintext)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
