"""The database: one synchronous colour of code for PostgreSQL and SQLite.

Times are unix seconds by the database's clock, as doubles: hosts' clocks differ, the database's is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sqlalchemy import JSON, Connection, Double, Engine, MetaData, create_engine, event, make_url
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.sql.functions import FunctionElement

from app.config import get_settings

# A server that has gone silent is an error within seconds; without these a caller waits for a quarter of an hour.
# A host that loses power inside a transaction must not hold its row locks until the kernel notices, two hours later.
POSTGRESQL_TIMEOUTS = {
    "connect_timeout": 5,  # seconds; the others are milliseconds
    "tcp_user_timeout": 10_000,
    "options": "-c lock_timeout=5000 -c statement_timeout=30000 -c idle_in_transaction_session_timeout=30000",
}
AWAY = (OperationalError, PoolTimeoutError)
"""What a database that cannot be reached now raises."""
POOL_SIZE = 10  # 5 to 10 connections a process gave the best rate (docs/design.md); more only wait in the server
READ_ONLY = {"tuneyard_read_only": True}
# None is SQL NULL, never JSON's null: `IS NULL` finds it.
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class Base(DeclarativeBase):
    """All tables. Constraint names are fixed so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: Json, list[Any]: Json, float: Double}  # noqa: RUF012


class now(FunctionElement[float]):
    """The database's clock in unix seconds, at the moment the statement runs."""

    type = Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgresql(element: object, compiler: object, **kw: object) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


@compiles(now, "sqlite")
def _now_sqlite(element: object, compiler: object, **kw: object) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@cache
def get_engine() -> Engine:
    """The engine of this process, made at first use."""
    return make_engine(get_settings().resolved_database_url)


def make_engine(url: str) -> Engine:
    """An engine for a SQLite or PostgreSQL URL; `postgresql://` means psycopg 3."""
    # 5 to 10 connections a process gave the best rate (docs/design.md); more only wait in the server.
    is_postgresql = make_url(url).get_backend_name() == "postgresql"
    limits = POSTGRESQL_TIMEOUTS if is_postgresql else {}
    engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0, pool_timeout=10, pool_pre_ping=True, connect_args=limits)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    return engine


@contextmanager
def write() -> Iterator[Session]:
    """One transaction: committed when the block ends, rolled back when it raises."""
    with Session(get_engine(), expire_on_commit=False) as session, session.begin():
        yield session


@contextmanager
def read() -> Iterator[Connection]:
    """A connection for single SELECTs: no transaction around them, so polls cost one round trip."""
    engine = get_engine()
    options = READ_ONLY if engine.dialect.name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}
    with engine.connect().execution_options(**options) as connection:
        yield connection


def storable(value: Any) -> Any:
    """The same with what no database can hold replaced: NUL characters and halves of surrogate pairs."""
    if isinstance(value, dict):
        return {storable(key): storable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [storable(inner) for inner in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    return value


def _sqlite_connect(connection: DBAPIConnection, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once: a deferred BEGIN fails in the lock upgrade, where busy_timeout does not apply.
    if not connection.get_execution_options().get("tuneyard_read_only"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
