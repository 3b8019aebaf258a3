"""Gangs over nodes: each placement's own heartbeat, where the ranks meet, and how each node's part ended."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0008_gangs"
down_revision = "0007_idempotency_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("placements", sa.Column("heartbeat_at", sa.Double(), nullable=True))
    op.add_column("placements", sa.Column("rendezvous_port", sa.Integer(), nullable=True))
    op.add_column("placements", sa.Column("failure", JSON, nullable=True))
    op.add_column("placements", sa.Column("stopped_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("placements", "stopped_at")
    op.drop_column("placements", "failure")
    op.drop_column("placements", "rendezvous_port")
    op.drop_column("placements", "heartbeat_at")
