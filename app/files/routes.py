"""/v1/files"""

from typing import Annotated, Literal

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile

from app import downloads
from app.auth import KeyedRoute, ProjectId
from app.config import get_settings
from app.dependencies import Read
from app.files import service
from app.files.schemas import FileOut, Purpose, UploadPurpose, ValidationOut
from app.schemas import After, Deleted, ListOut, Order

MULTIPART_OVERHEAD_BYTES = 64 * 1024  # boundaries and the fields beside the file


class UploadRoute(KeyedRoute):
    """A route that takes as many bytes as an operator allows."""

    area = "files"

    @property
    def max_body_bytes(self) -> int:
        return get_settings().max_upload_bytes + MULTIPART_OVERHEAD_BYTES


router = APIRouter(prefix="/v1/files", tags=["Files"], route_class=UploadRoute)


@router.post("", summary="Upload a file")
def create_file(
    project_id: ProjectId,
    file: Annotated[
        UploadFile, File(description="The file: for `fine-tune` rows in JSON Lines, a JSON array, CSV, TSV or Parquet.")
    ],
    purpose: Annotated[UploadPurpose, Form(description="What the file is for; `fine-tune` files are validated.")],
    expires_anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    expires_after_s: Annotated[int | None, Form(alias="expires_after[seconds]", ge=3600, le=2_592_000)] = None,
) -> FileOut:
    return FileOut.of(service.create_file(project_id, file.file, file.filename or "", purpose, expires_after_s))


@router.get("", summary="List files")
def list_files(
    project_id: ProjectId,
    connection: Read,
    purpose: Purpose | None = None,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
) -> ListOut[FileOut]:
    rows, has_more = service.list_files(connection, project_id, purpose=purpose, order=order, after=after, limit=limit)
    return ListOut[FileOut].of([FileOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.get("/{file_id}", summary="Retrieve a file's facts")
def retrieve_file(file_id: str, project_id: ProjectId, connection: Read) -> FileOut:
    return FileOut.of(service.get_file(connection, project_id, file_id))


@router.get("/{file_id}/validation", summary="Report everything found in a file of training data")
def retrieve_file_validation(file_id: str, project_id: ProjectId, connection: Read) -> ValidationOut:
    """There once the file is `processed` or `error`; 409 before."""
    return ValidationOut.model_validate(service.validation_report(connection, project_id, file_id))


@router.get("/{file_id}/content", summary="Download a file", response_class=Response)
@router.head("/{file_id}/content", include_in_schema=False)
def retrieve_file_content(file_id: str, project_id: ProjectId, connection: Read, request: Request) -> Response:
    file = service.get_file(connection, project_id, file_id)
    return downloads.send(request, downloads.StoredObject(file.storage_key, file.bytes, file.sha256, file.filename))


@router.delete("/{file_id}", summary="Delete a file")
def delete_file(file_id: str, project_id: ProjectId) -> Deleted:
    service.delete_file(project_id, file_id)
    return Deleted(id=file_id, object="file")
