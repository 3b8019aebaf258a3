"""Named secrets; per job the hashes of its rows, the job it repeats, its runs in trackers."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0002_secrets_and_data_hashes"
down_revision = "0001_first_tables"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("data_sha256", JSON, nullable=True))
    op.add_column("jobs", sa.Column("rerun_of", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("tracking", JSON, nullable=True))
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_secrets_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_secrets")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_secrets_project_id")),
    )


def downgrade() -> None:
    op.drop_table("secrets")
    op.drop_column("jobs", "tracking")
    op.drop_column("jobs", "rerun_of")
    op.drop_column("jobs", "data_sha256")
