"""Alembic's entry: connects to the database that app.migrate names and runs the revisions in one transaction."""

from alembic import context
from sqlalchemy import text

import app.audit.tables
import app.files.tables
import app.jobs.tables
import app.keys.tables
import app.models.tables
import app.nodes.tables
import app.previews.tables
import app.secrets.tables
import app.webhooks.tables  # noqa: F401 - each import adds tables to Base
from app.db import Base, make_engine

MIGRATION_LOCK = 0x74756E65  # any number nobody else uses: two hosts that start at once migrate one after the other


def run() -> None:
    engine = make_engine(context.config.attributes["url"])
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # a migration may take as long as its table is large
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, transactional_ddl=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
