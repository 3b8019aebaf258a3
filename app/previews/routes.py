"""/v1/files/{file_id}/preview"""

from fastapi import APIRouter

from app import db
from app.auth import KeyedRoute, ProjectId
from app.dependencies import Read
from app.previews import service
from app.previews.schemas import PreviewCreate, PreviewOut


class PreviewRoute(KeyedRoute):
    """A route that shows what is in files."""

    area = "files"


router = APIRouter(prefix="/v1/files/{file_id}/preview", tags=["Files"], route_class=PreviewRoute)


@router.post("", summary="Show what a model would learn from a file")
def create_preview(file_id: str, body: PreviewCreate, project_id: ProjectId) -> PreviewOut:
    """A node reads the file on its CPU. Where it takes longer than a few seconds the answer is `waiting`: ask for it again."""
    with db.write() as session:
        preview_id = service.create_preview(session, project_id, file_id, body)
    service.wait_for_answer(preview_id)
    with db.read() as connection:  # only now: nothing is held while the node works
        return PreviewOut.of(service.get_preview(connection, project_id, file_id, preview_id))


@router.get("/{preview_id}", summary="Retrieve a preview")
def retrieve_preview(file_id: str, preview_id: str, project_id: ProjectId, connection: Read) -> PreviewOut:
    return PreviewOut.of(service.get_preview(connection, project_id, file_id, preview_id))
