"""The audit log on the wire: OpenAI's fields, and the request beside them."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Row


class ApiKeyActor(BaseModel):
    """The key that asked."""

    id: str
    type: Literal["service_account"] = "service_account"


class Actor(BaseModel):
    """Who: a key, or whoever ran a command on the service's machine."""

    type: Literal["api_key", "operator"]
    api_key: ApiKeyActor | None = None
    operator: str | None = None


class ProjectOfEntry(BaseModel):
    """Whose key it was."""

    id: str


class EntryOut(BaseModel):
    """A change that was made. Under its type's name stands the object's id, as with OpenAI."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["organization.audit_log"] = "organization.audit_log"
    type: str
    effective_at: int
    actor: Actor
    project: ProjectOfEntry | None
    object_id: str | None = Field(description="What was changed.")
    request_id: str | None
    ip_address: str | None
    user_agent: str | None

    @classmethod
    def of(cls, entry: Row[Any]) -> Self:
        key = ApiKeyActor(id=entry.key_id) if entry.key_id else None
        names = ("id", "type", "object_id", "request_id", "ip_address", "user_agent")
        shown = {name: getattr(entry, name) for name in names} | {entry.type: {"id": entry.object_id}}
        return cls(
            **shown,
            effective_at=int(entry.effective_at),
            actor=Actor(type="api_key" if key else "operator", api_key=key, operator=entry.operator),
            project=ProjectOfEntry(id=entry.project_id) if entry.project_id else None,
        )
