"""The audit log. The database refuses to change or delete its lines."""

import sqlalchemy as sa
from alembic import op

revision = "0013_audit_log"
down_revision = "0012_webhooks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("effective_at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(512), nullable=True),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("key_id", sa.String(64), nullable=True),
        sa.Column("operator", sa.String(64), nullable=True),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.Column("ip_address", sa.String(64), nullable=True),
        sa.Column("user_agent", sa.String(256), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entries"),
    )
    op.create_index("ix_audit_entries_effective", "audit_entries", ["effective_at", "id"])
    op.create_index("ix_audit_entries_object", "audit_entries", ["object_id"])
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_entries_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entries "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_entries_no_{change.lower()} BEFORE {change} ON audit_entries "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )


def downgrade() -> None:
    op.drop_table("audit_entries")
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_change()")
