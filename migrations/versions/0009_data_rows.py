"""What became of a job's rows."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0009_data_rows"
down_revision = "0008_gangs"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("data_rows", JSON, nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "data_rows")
