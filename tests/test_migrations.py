"""The migrations make exactly the tables the code expects, and can take them away again."""

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

import app.main  # noqa: F401 - all tables
from app import migrate
from app.db import Base, make_engine


def test_upgrade_makes_the_tables_of_the_code_without_drift(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    engine = make_engine(empty_database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_upgrading_twice_changes_nothing(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    migrate.upgrade(empty_database_url)


def test_downgrade_leaves_nothing_of_ours(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    migrate.downgrade(empty_database_url)
    engine = make_engine(empty_database_url)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()
