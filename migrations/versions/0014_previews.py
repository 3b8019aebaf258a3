"""Looks at what a model would learn from a file, and the check of a job's rows before it waits for GPUs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0014_previews"
down_revision = "0013_audit_log"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "previews",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("file_id", sa.String(64), nullable=False),
        sa.Column("validation_file", sa.String(64), nullable=True),
        sa.Column("lines", JSON, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=False),
        sa.Column("result", JSON, nullable=True),
        sa.Column("error", JSON, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_previews_project_id_projects"),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="fk_previews_file_id_files", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_previews"),
    )
    op.create_index("ix_previews_created", "previews", ["created_at"])
    op.add_column("jobs", sa.Column("check_until", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("check_tries", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("jobs", "check_tries")
    op.drop_column("jobs", "check_until")
    op.drop_table("previews")
