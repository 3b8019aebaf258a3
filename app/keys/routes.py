"""/v1/projects: projects, their quotas, and their keys"""

from typing import Annotated

from fastapi import APIRouter, Query

from app.auth import AdminRoute, ProjectId
from app.dependencies import Read, Write
from app.keys import service
from app.keys.schemas import KeyCreate, KeyOut, KeyRotate, NewKeyOut, ProjectCreate, ProjectOut, ProjectUpdate
from app.schemas import After, Deleted, ListOut

router = APIRouter(prefix="/v1/projects", tags=["Projects"], route_class=AdminRoute)
Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("", summary="Create a project")
def create_project(body: ProjectCreate, _own_project_id: ProjectId, session: Write) -> ProjectOut:
    """Needs the scope `admin`, as everything here."""
    project = service.create_project(session, body.name)
    return ProjectOut.of(service.update_project(session, project.id, body.model_dump(exclude_unset=True, exclude={"name"})))


@router.get("", summary="List projects")
def list_projects(_own_project_id: ProjectId, connection: Read, after: After = None, limit: Limit = 20) -> ListOut[ProjectOut]:
    rows, has_more = service.list_projects(connection, after=after, limit=limit)
    return ListOut[ProjectOut].of([ProjectOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.patch("/{project_id}", summary="Set a project's weight and quotas")
def update_project(project_id: str, body: ProjectUpdate, _own_project_id: ProjectId, session: Write) -> ProjectOut:
    return ProjectOut.of(service.update_project(session, project_id, body.model_dump(exclude_unset=True)))


@router.post("/{project_id}/api_keys", summary="Create a key")
def create_api_key(project_id: str, body: KeyCreate, _own_project_id: ProjectId, session: Write) -> NewKeyOut:
    """The answer holds the key; nothing shows it again."""
    return NewKeyOut.of_new(
        service.create_key(session, project_id, body.name, scopes=body.scopes, lifetime_s=body.expires_in_s)
    )


@router.get("/{project_id}/api_keys", summary="List a project's keys")
def list_api_keys(
    project_id: str, _own_project_id: ProjectId, connection: Read, after: After = None, limit: Limit = 20
) -> ListOut[KeyOut]:
    rows, has_more = service.list_keys(connection, project_id, after=after, limit=limit)
    return ListOut[KeyOut].of([KeyOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.post("/{project_id}/api_keys/{key_id}/rotate", summary="Replace a key")
def rotate_api_key(
    project_id: str, key_id: str, _own_project_id: ProjectId, session: Write, body: KeyRotate | None = None
) -> NewKeyOut:
    """Another key with the same name, scopes and lifetime. The old one ends, at once or after `keep_old_s`."""
    keep_old_s = (body or KeyRotate()).keep_old_s
    return NewKeyOut.of_new(service.rotate_key(session, project_id, key_id, keep_old_s=keep_old_s))


@router.delete("/{project_id}/api_keys/{key_id}", summary="Revoke a key")
def delete_api_key(project_id: str, key_id: str, _own_project_id: ProjectId, session: Write) -> Deleted:
    """At once and for good; it stays in the list."""
    service.revoke_key(session, project_id, key_id)
    return Deleted(id=key_id, object="project.api_key")
