"""/v1/organization/audit_logs"""

from typing import Annotated

from fastapi import APIRouter, Query

from app.audit import service
from app.audit.schemas import EntryOut
from app.auth import AdminRoute, ProjectId
from app.dependencies import Read
from app.schemas import After, ListOut

router = APIRouter(prefix="/v1/organization/audit_logs", tags=["Audit log"], route_class=AdminRoute)
LARGEST_TIME = 2**40


def several(name: str, what: str) -> object:
    """A list as the SDK sends it: `name[]=a&name[]=b`."""
    return Query(alias=f"{name}[]", max_length=100, description=what)


@router.get("", summary="List who did what")
def list_audit_logs(
    _own_project_id: ProjectId,
    connection: Read,
    event_types: Annotated[list[str], several("event_types", "As `job.cancelled`.")] = [],  # noqa: B006
    project_ids: Annotated[list[str], several("project_ids", "Whose keys.")] = [],  # noqa: B006
    actor_ids: Annotated[list[str], several("actor_ids", "Ids of keys.")] = [],  # noqa: B006
    resource_ids: Annotated[list[str], several("resource_ids", "Ids of what was changed.")] = [],  # noqa: B006
    since: Annotated[int | None, Query(alias="effective_at[gte]", ge=0, le=LARGEST_TIME)] = None,
    before: Annotated[int | None, Query(alias="effective_at[lt]", ge=0, le=LARGEST_TIME)] = None,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ListOut[EntryOut]:
    """Newest first, of all projects. Needs the scope `admin`."""
    wanted = service.Filter(event_types, project_ids, actor_ids, resource_ids, since, before)
    rows, has_more = service.list_entries(connection, wanted, after=after, limit=limit)
    return ListOut[EntryOut].of([EntryOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)
