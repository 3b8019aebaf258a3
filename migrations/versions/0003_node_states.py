"""Nodes that are drained, with labels, with GPUs kept back; keys that may do this."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0003_node_states"
down_revision = "0002_secrets_and_data_hashes"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("labels", JSON, nullable=False, server_default="{}"))
    op.add_column("nodes", sa.Column("is_draining", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("quarantined", JSON, nullable=False, server_default="[]"))
    op.add_column("api_keys", sa.Column("is_admin", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE api_keys SET is_admin = true WHERE name = 'admin' AND project_id = 'proj_default'")


def downgrade() -> None:
    op.drop_column("api_keys", "is_admin")
    op.drop_column("nodes", "quarantined")
    op.drop_column("nodes", "is_draining")
    op.drop_column("nodes", "labels")
