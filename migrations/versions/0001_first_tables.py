"""The first tables: projects and keys, files, jobs with their story, models, nodes and placements."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

revision = "0001_first_tables"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("address", sa.String(length=256), nullable=False),
        sa.Column("accelerator", sa.String(length=8), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("free_slots", sa.Integer(), nullable=False),
        sa.Column("gpus", JSON, nullable=False),
        sa.Column("facts", JSON, nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.CheckConstraint("free_slots >= 0 AND free_slots <= slots", name=op.f("ck_nodes_free_slots_in_range")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=1024), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("status_details", sa.String(length=4096), nullable=True),
        sa.Column("storage_key", sa.String(length=1024), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_files_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_project_created", "files", ["project_id", "created_at", "id"])

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=24), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("training_file", sa.String(length=1024), nullable=False),
        sa.Column("validation_file", sa.String(length=1024), nullable=True),
        sa.Column("suffix", sa.String(length=64), nullable=True),
        sa.Column("seed", sa.Integer(), nullable=False),
        sa.Column("method", JSON, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("metadata", JSON, nullable=True),
        sa.Column("integrations", JSON, nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("accelerator", sa.String(length=8), nullable=False),
        sa.Column("wait_reason", sa.String(length=512), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_starts", sa.Integer(), nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("cancel_requested_at", sa.Double(), nullable=True),
        sa.Column("pause_requested_at", sa.Double(), nullable=True),
        sa.Column("run_seconds", sa.Double(), nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=True),
        sa.Column("estimated_finish", sa.Double(), nullable=True),
        sa.Column("fine_tuned_model", sa.String(length=512), nullable=True),
        sa.Column("result_files", JSON, nullable=False),
        sa.Column("answers", JSON, nullable=False),
        sa.Column("error", JSON, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_jobs_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_project_created", "jobs", ["project_id", "created_at", "id"])
    op.create_index("ix_jobs_status", "jobs", ["status", "priority", "created_at"])

    op.create_table(
        "artifacts",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("storage_key", sa.String(length=1024), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("storage_key", sa.String(length=1024), nullable=False),
        sa.Column("model_id", sa.String(length=512), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "step", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("id", name=op.f("uq_checkpoints_id")),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", JSON, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
        sa.UniqueConstraint("id", name=op.f("uq_events_id")),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("values", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metrics_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_models_job_id_jobs")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_models_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_index("ix_models_project_created", "models", ["project_id", "created_at", "id"])

    op.create_table(
        "placements",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node_rank", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("gpu_uuids", JSON, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("supervisor_pid", sa.Integer(), nullable=True),
        sa.Column("placed_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("released_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_placements_job_id_jobs")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_placements_node_id_nodes")),
        sa.PrimaryKeyConstraint("job_id", "attempt", "node_rank", name=op.f("pk_placements")),
    )
    op.create_index("ix_placements_node_state", "placements", ["node_id", "state"])


def downgrade() -> None:
    op.drop_index("ix_placements_node_state", "placements")

    op.drop_table("placements")
    op.drop_index("ix_models_project_created", "models")

    op.drop_table("models")
    op.drop_table("metrics")
    op.drop_table("events")
    op.drop_table("checkpoints")
    op.drop_table("artifacts")
    op.drop_index("ix_jobs_status", "jobs")
    op.drop_index("ix_jobs_project_created", "jobs")

    op.drop_table("jobs")
    op.drop_index("ix_files_project_created", "files")

    op.drop_table("files")
    op.drop_table("api_keys")
    op.drop_table("projects")
    op.drop_table("nodes")
