"""Who is told of what, and everything that is or was to be told."""

from typing import Any

from sqlalchemy import ForeignKey, Index, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now
from app.keys.tables import Project


class Endpoint(Base):
    """A URL of a user's that is called."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey(Project.id), index=True)
    name: Mapped[str] = mapped_column(String(128))
    url: Mapped[str] = mapped_column(String(2048))
    event_types: Mapped[list[Any]]
    secret: Mapped[bytes] = mapped_column(LargeBinary)
    """Encrypted, like the one before it."""
    old_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    old_secret_until: Mapped[float | None]
    hint: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float] = mapped_column(default=now())
    updated_at: Mapped[float] = mapped_column(default=now())


class Delivery(Base):
    """One event for one endpoint: written with the change it tells of, sent later, kept for a while."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_due", "status", "due_at"),
        Index("ix_webhook_deliveries_endpoint", "endpoint_id", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey(Endpoint.id, ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(String(64))
    event_type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16), default="pending")
    """`pending`, `delivered`, or `failed` once a day has passed."""
    tries: Mapped[int] = mapped_column(default=0)
    """Also the fence of whoever sends it."""
    due_at: Mapped[float] = mapped_column(default=now())
    """When it is sent next; while it is being sent, when others may try."""
    is_claimed: Mapped[bool] = mapped_column(default=False)
    give_up_at: Mapped[float]
    status_code: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[float] = mapped_column(default=now())
    ended_at: Mapped[float | None]
