"""/v1/nodes"""

from fastapi import APIRouter

from app.auth import KeyedRoute, ProjectId
from app.dependencies import Read
from app.nodes import service
from app.nodes.schemas import NodeOut
from app.schemas import ListOut

router = APIRouter(prefix="/v1/nodes", tags=["Nodes"], route_class=KeyedRoute)


@router.get("", summary="List nodes")
def list_nodes(_project_id: ProjectId, connection: Read) -> ListOut[NodeOut]:
    """The machines that run jobs, and what is free on them."""
    nodes = [NodeOut.of(row) for row in service.list_nodes(connection)]
    return ListOut[NodeOut].of(nodes, [node.id for node in nodes])
