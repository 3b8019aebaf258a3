"""Placeholder: registration and heartbeats come from another branch."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from app.nodes.tables import Node


def list_nodes(connection: Connection) -> Sequence[Row[Any]]:
    """All nodes, by name."""
    return connection.execute(select(*Node.__table__.columns).order_by(Node.id)).all()
