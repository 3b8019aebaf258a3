"""/v1/projects"""

from fastapi import APIRouter

from app.auth import AdminRoute, ProjectId
from app.dependencies import Write
from app.keys import service
from app.keys.schemas import ProjectOut, ProjectUpdate

router = APIRouter(prefix="/v1/projects", tags=["Projects"], route_class=AdminRoute)


@router.patch("/{project_id}", summary="Set a project's weight and quotas")
def update_project(project_id: str, body: ProjectUpdate, _own_project_id: ProjectId, session: Write) -> ProjectOut:
    """Needs an admin key."""
    return ProjectOut.of(service.update_project(session, project_id, body.model_dump(exclude_unset=True)))
