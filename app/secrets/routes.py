"""/v1/secrets"""

from typing import Annotated

from fastapi import APIRouter, Query

from app.auth import KeyedRoute, ProjectId
from app.dependencies import Read, Write
from app.schemas import After, Deleted, ListOut
from app.secrets import service
from app.secrets.schemas import SecretCreate, SecretOut

router = APIRouter(prefix="/v1/secrets", tags=["Secrets"], route_class=KeyedRoute)


@router.post("", summary="Create or replace a secret")
def create_secret(body: SecretCreate, project_id: ProjectId, session: Write) -> SecretOut:
    """The value can only be used from now on, not read: name it in `spec.secrets` or in an integration."""
    return SecretOut.of(service.put_secret(session, project_id, body.name, body.value.get_secret_value()))


@router.get("", summary="List secrets")
def list_secrets(
    project_id: ProjectId, connection: Read, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> ListOut[SecretOut]:
    """Names only."""
    rows, has_more = service.list_secrets(connection, project_id, after=after, limit=limit)
    return ListOut[SecretOut].of([SecretOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.delete("/{name}", summary="Delete a secret")
def delete_secret(name: str, project_id: ProjectId, session: Write) -> Deleted:
    service.delete_secret(session, project_id, name)
    return Deleted(id=name, object="secret")
