"""Keys with scopes, an end and a last use. Those there were go on opening what they opened."""

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
PROJECT_SCOPES = ["jobs:*", "files:*", "models:*", "chat"]

revision = "0011_key_scopes"
down_revision = "0010_file_validations"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("scopes", JSON, nullable=False, server_default=json.dumps(PROJECT_SCOPES)))
    op.add_column("api_keys", sa.Column("hint", sa.String(32), nullable=False, server_default="sk-..."))
    op.add_column("api_keys", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", sa.Double(), nullable=True))
    keys = sa.table("api_keys", sa.column("scopes", JSON), sa.column("is_admin", sa.Boolean()))
    op.execute(keys.update().where(keys.c.is_admin).values(scopes=[*PROJECT_SCOPES, "admin"]))
    op.drop_column("api_keys", "is_admin")


def downgrade() -> None:
    op.add_column("api_keys", sa.Column("is_admin", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE api_keys SET is_admin = true WHERE CAST(scopes AS TEXT) LIKE '%\"admin\"%'")
    for name in ("last_used_at", "expires_at", "hint", "scopes"):
        op.drop_column("api_keys", name)
