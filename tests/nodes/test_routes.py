"""What a caller sees of the machines."""

import httpx2
from sqlalchemy import delete

from app import db
from app.nodes import service
from app.nodes.tables import Node
from tests.conftest import Live

GPUS = [{"uuid": "GPU-1", "name": "H200", "memory_bytes": 1}]


def test_a_node_shows_what_is_free_and_whether_it_is_heard_of(http: httpx2.Client, live: Live) -> None:
    with db.write() as session:
        service.register(session, service.NodeReport("a-node-of-a-test", "10.0.0.1", "gpu", 1, GPUS, {"cpus": 8}))
    nodes = {node["id"]: node for node in http.get("/v1/nodes").json()["data"]}
    node = nodes["a-node-of-a-test"]
    assert (node["object"], node["status"], node["slots"], node["free_slots"]) == ("node", "ready", 1, 1)
    assert node["gpus"] == GPUS
    with db.write() as session:  # other tests create jobs, and what those may ask for depends on the nodes there are
        session.execute(delete(Node).where(Node.id == node["id"]))
