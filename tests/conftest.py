"""Fixtures: real databases and servers, a project of its own for each test."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI
from sqlalchemy import make_url

from app import db, migrate, storage
from app.config import get_settings
from app.keys import service as keys
from tests import servers

CASES = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Live:
    """A running service as one project sees it. The test process shares its database and storage."""

    url: str
    project_id: str
    api_key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres_server: servers.Postgres) -> str | None:
    """The name of a migrated database; copies of it cost a tenth of migrating again."""
    url = postgres_server.create_database()
    migrate.upgrade(url)
    return make_url(url).database


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "tuneyard.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    """A Valkey server on a private Unix socket."""
    with servers.valkey() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of each kind with nothing in it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server: servers.Postgres = request.getfixturevalue("postgres_server")
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated database of each kind, for one test."""
    yield from _database(request, tmp_path)


@pytest.fixture
def database(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same, as the database of this process; storage and everything else lies in the test's folder."""
    yield from configured(
        monkeypatch, {"TUNEYARD_DATABASE_URL": database_url, "TUNEYARD_DATA_DIR": str(tmp_path)}, database_url
    )


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def api_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, broker_url: str
) -> Iterator[servers.Api]:
    """The API as a process, once per kind of database: tests share it, each with a project of its own."""
    folder = tmp_path_factory.mktemp(f"api-{request.param}")
    for url in _database(request, folder):
        environment = {
            "TUNEYARD_DATABASE_URL": url,
            "TUNEYARD_DATA_DIR": str(folder),
            "TUNEYARD_BROKER_URL": broker_url,
            "TUNEYARD_MAX_UPLOAD_BYTES": str(16 * 1024**2),
        }
        with servers.api(environment, folder) as server:
            yield server


@pytest.fixture
def live(api_server: servers.Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """The running service for a new project."""
    for _ in configured(monkeypatch, dict(api_server.environment), None):
        yield Live(api_server.url, *_new_project())


@pytest.fixture
def client(live: Live) -> Iterator[OpenAI]:
    """The official SDK, as anybody uses it."""
    with OpenAI(base_url=f"{live.url}/v1", api_key=live.api_key) as sdk:
        yield sdk


@pytest.fixture
def other(live: Live) -> Iterator[OpenAI]:
    """The SDK with the key of another project."""
    with OpenAI(base_url=f"{live.url}/v1", api_key=_new_project()[1]) as sdk:
        yield sdk


@pytest.fixture
def async_client(live: Live) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.url}/v1", api_key=live.api_key)


@pytest.fixture
def http(live: Live) -> Iterator[httpx2.Client]:
    """Plain HTTP with the key, for what the SDK has no call for."""
    with httpx2.Client(base_url=live.url, headers=live.headers, timeout=60) as plain:
        yield plain


def _new_project() -> tuple[str, str]:
    """The id of a new project, and a key for it."""
    with db.write() as session:
        project = keys.create_project(session, f"test {uuid4().hex}")
        return project.id, keys.create_key(session, project.id, "test").plaintext


def _database(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")
        (folder / "tuneyard.db").write_bytes(template.read_bytes())
        yield f"sqlite:///{folder / 'tuneyard.db'}"
        return
    server: servers.Postgres = request.getfixturevalue("postgres_server")
    url = server.create_database(request.getfixturevalue("postgres_template"))
    yield url
    server.drop_database(url)


def configured(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], result: Any) -> Iterator[Any]:
    """This process under other settings, for one test."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _forget()
    yield result
    db.get_engine().dispose()
    _forget()


def _forget() -> None:
    for cached in (get_settings, db.get_engine, storage._store):
        cached.cache_clear()
