"""What a caller sees of the machines."""

from collections.abc import Iterator

import httpx2
import pytest
from sqlalchemy import delete, update

from app import db
from app.keys import service as keys
from app.keys.scopes import ALL_SCOPES
from app.nodes import service
from app.nodes.tables import Node
from tests.conftest import Live

GPUS = [{"uuid": "GPU-1", "name": "H200", "memory_bytes": 1}]


@pytest.fixture
def node_id(live: Live) -> Iterator[str]:
    report = service.NodeReport("a-node-of-a-test", "10.0.0.1", "gpu", 1, GPUS, {"cpus": 8}, {"zone": "b"})
    with db.write() as session:
        service.register(session, report)
    yield report.name
    with db.write() as session:  # other tests create jobs, and what those may ask for depends on the nodes there are
        session.execute(delete(Node).where(Node.id == report.name))


@pytest.fixture
def admin(live: Live) -> dict[str, str]:
    """The headers of a key that may do everything."""
    with db.write() as session:
        return {"Authorization": f"Bearer {keys.create_key(session, live.project_id, 'admin', scopes=ALL_SCOPES).plaintext}"}


def test_a_node_shows_what_is_free_and_whether_it_is_heard_of(http: httpx2.Client, live: Live, node_id: str) -> None:
    nodes = {node["id"]: node for node in http.get("/v1/nodes").json()["data"]}
    node = nodes[node_id]
    assert (node["object"], node["status"], node["slots"], node["free_slots"]) == ("node", "ready", 1, 1)
    assert node["gpus"] == [GPUS[0] | {"quarantined": False}]
    assert node["labels"] == {"zone": "b"}


def test_an_admin_drains_and_resumes_a_node(http: httpx2.Client, live: Live, node_id: str, admin: dict[str, str]) -> None:
    assert http.post(f"/v1/nodes/{node_id}/drain", headers=admin).json()["status"] == "draining"
    assert status(http, node_id) == "draining"
    assert http.post(f"/v1/nodes/{node_id}/resume", headers=admin).json()["status"] == "ready"


def test_any_other_key_may_not(http: httpx2.Client, live: Live, node_id: str) -> None:
    answer = http.post(f"/v1/nodes/{node_id}/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    assert status(http, node_id) == "ready"


def test_draining_a_node_that_is_not_there_says_so(http: httpx2.Client, live: Live, admin: dict[str, str]) -> None:
    answer = http.post("/v1/nodes/no-such-node/drain", headers=admin)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "node_id")


def test_a_node_whose_every_gpu_is_kept_back_is_quarantined(http: httpx2.Client, live: Live, node_id: str) -> None:
    with db.write() as session:
        service.quarantine(session, node_id, ["GPU-1"])
    assert status(http, node_id) == "quarantined"


def test_a_silent_node_is_lost(http: httpx2.Client, live: Live, node_id: str) -> None:
    with db.write() as session:
        session.execute(update(Node).where(Node.id == node_id).values(heartbeat_at=1.0))
    assert status(http, node_id) == "lost"


def status(http: httpx2.Client, node_id: str) -> str:
    return next(str(node["status"]) for node in http.get("/v1/nodes").json()["data"] if node["id"] == node_id)
