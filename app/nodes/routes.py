"""/v1/nodes"""

from fastapi import APIRouter

from app.auth import AdminRoute, KeyedRoute, ProjectId
from app.dependencies import Read, Write
from app.nodes import service
from app.nodes.schemas import NodeOut
from app.schemas import ListOut

router = APIRouter(prefix="/v1/nodes", tags=["Nodes"], route_class=KeyedRoute)
operations = APIRouter(prefix="/v1/nodes", tags=["Nodes"], route_class=AdminRoute)


@router.get("", summary="List nodes")
def list_nodes(_project_id: ProjectId, connection: Read) -> ListOut[NodeOut]:
    """The machines that run jobs, and what is free on them."""
    nodes = [NodeOut.of(row) for row in service.list_nodes(connection)]
    return ListOut[NodeOut].of(nodes, [node.id for node in nodes])


@operations.post("/{node_id}/drain", summary="Give a node no new jobs")
def drain_node(node_id: str, _project_id: ProjectId, session: Write) -> NodeOut:
    """What runs there goes on. Needs an admin key."""
    service.drain(session, node_id)
    return NodeOut.of(service.get_node(session.connection(), node_id))


@operations.post("/{node_id}/resume", summary="Let a node take jobs again")
def resume_node(node_id: str, _project_id: ProjectId, session: Write) -> NodeOut:
    """Also on its GPUs that were kept back after a job. Needs an admin key."""
    service.resume(session, node_id)
    return NodeOut.of(service.get_node(session.connection(), node_id))
