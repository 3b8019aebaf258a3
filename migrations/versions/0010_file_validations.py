"""What was found in a file is kept, and files that were validated before get their report too."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0010_file_validations"
down_revision = "0009_data_rows"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "file_validations",
        sa.Column("file_id", sa.String(64), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=False),
        sa.Column("report", JSON, nullable=True),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="fk_file_validations_file_id_files", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", name="pk_file_validations"),
    )
    unread = sa.text("report IS NULL")
    op.create_index(
        "ix_file_validations_waiting", "file_validations", ["leased_until"], postgresql_where=unread, sqlite_where=unread
    )
    op.execute(
        "INSERT INTO file_validations (file_id, tries, leased_until) SELECT id, 0, 0 FROM files WHERE purpose = 'fine-tune'"
    )


def downgrade() -> None:
    op.drop_table("file_validations")
