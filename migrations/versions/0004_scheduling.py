"""What the scheduler needs of jobs, nodes and projects, and what it says of the queue."""

import sqlalchemy as sa
from alembic import op

revision = "0004_scheduling"
down_revision = "0003_node_states"
branch_labels = None
depends_on = None

JOBS = (
    sa.Column("demand", sa.Text(), nullable=True),
    sa.Column("time_limit_s", sa.Integer(), nullable=True),
    sa.Column("max_wait_s", sa.Integer(), nullable=True),
    sa.Column("queued_at", sa.Double(), nullable=False, server_default="0"),
    sa.Column("reserved_at", sa.Double(), nullable=True),
    sa.Column("preempted_by", sa.String(length=64), nullable=True),
)
PROJECTS = (
    sa.Column("weight", sa.Double(), nullable=False, server_default="1"),
    sa.Column("usage", sa.Double(), nullable=False, server_default="0"),
    sa.Column("usage_at", sa.Double(), nullable=False, server_default="0"),
    sa.Column("max_running_jobs", sa.Integer(), nullable=True),
    sa.Column("max_gpus", sa.Integer(), nullable=True),
    sa.Column("max_gpu_hours_per_month", sa.Double(), nullable=True),
    sa.Column("max_storage_bytes", sa.BigInteger(), nullable=True),
)


def upgrade() -> None:
    for column in JOBS:
        op.add_column("jobs", column)
    op.execute("UPDATE jobs SET queued_at = created_at")
    op.drop_column("jobs", "wait_reason")
    for column in PROJECTS:
        op.add_column("projects", column)
    op.add_column("nodes", sa.Column("distrusted_until", sa.Double(), nullable=False, server_default="0"))
    op.create_index("ix_placements_state", "placements", ["state"])
    op.create_table(
        "waits",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=512), nullable=False),
        sa.Column("blocking_resource", sa.String(length=32), nullable=True),
        sa.Column("estimated_start", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_waits_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_waits")),
    )


def downgrade() -> None:
    op.drop_table("waits")
    op.drop_index("ix_placements_state", "placements")
    op.drop_column("nodes", "distrusted_until")
    for column in reversed(PROJECTS):
        op.drop_column("projects", column.name)
    op.add_column("jobs", sa.Column("wait_reason", sa.String(length=512), nullable=True))
    for column in reversed(JOBS):
        op.drop_column("jobs", column.name)
