"""The key under which a job was asked for, so that a request sent again finds it."""

import sqlalchemy as sa
from alembic import op

revision = "0007_idempotency_keys"
down_revision = "0006_retention"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("idempotency_key", sa.String(255)))
    op.add_column("jobs", sa.Column("request_sha256", sa.String(64)))
    op.create_index("ix_jobs_idempotency_key", "jobs", ["project_id", "idempotency_key"], unique=True)


def downgrade() -> None:
    op.drop_index("ix_jobs_idempotency_key", "jobs")
    op.drop_column("jobs", "request_sha256")
    op.drop_column("jobs", "idempotency_key")
