"""Who did what."""

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, now


class Entry(Base):
    """One change that somebody made. The database itself refuses to change or delete one (see its migration)."""

    __tablename__ = "audit_entries"
    __table_args__ = (
        Index("ix_audit_entries_effective", "effective_at", "id"),
        Index("ix_audit_entries_object", "object_id"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    effective_at: Mapped[float] = mapped_column(default=now())
    type: Mapped[str] = mapped_column(String(64))
    """`OBJECT.DONE`, as `job.cancelled`."""
    object_id: Mapped[str | None] = mapped_column(String(512))
    project_id: Mapped[str | None] = mapped_column(String(64))
    """Whose key it was."""
    key_id: Mapped[str | None] = mapped_column(String(64))
    operator: Mapped[str | None] = mapped_column(String(64))
    """Who ran a command on the service's machine; then there is no key."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    ip_address: Mapped[str | None] = mapped_column(String(64))
    user_agent: Mapped[str | None] = mapped_column(String(256))
