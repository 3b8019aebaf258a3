"""How far an ended job has been swept."""

import sqlalchemy as sa
from alembic import op

revision = "0006_retention"
down_revision = "0005_attempts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("swept_until_s", sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("jobs", "swept_until_s")
