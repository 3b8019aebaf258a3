"""A row for every try of a job."""

import sqlalchemy as sa
from alembic import op

revision = "0005_attempts"
down_revision = "0004_scheduling"
branch_labels = None
depends_on = None

# Of older tries it is known where and when they ran, and of the last one how the job ended.
FROM_PLACEMENTS = """
INSERT INTO attempts (job_id, number, placed_at, started_at, ended_at, "end", message)
SELECT jobs.id, placements.attempt, MIN(placed_at), MIN(claimed_at), MAX(released_at),
       CASE WHEN MAX(released_at) IS NULL THEN NULL
            WHEN placements.attempt = jobs.attempt AND jobs.status IN ('succeeded', 'failed', 'cancelled', 'paused')
            THEN jobs.status ELSE 'lost' END,
       NULL
FROM placements JOIN jobs ON jobs.id = placements.job_id
GROUP BY jobs.id, jobs.attempt, jobs.status, placements.attempt
"""


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", name="fk_attempts_job_id_jobs"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("placed_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        sa.Column("first_step", sa.Integer()),
        sa.Column("last_step", sa.Integer()),
        sa.Column("end", sa.String(16)),
        sa.Column("code", sa.String(64)),
        sa.Column("message", sa.Text()),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
    )
    op.execute(FROM_PLACEMENTS)


def downgrade() -> None:
    op.drop_table("attempts")
