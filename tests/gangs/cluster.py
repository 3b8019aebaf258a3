"""Tuneyard on several hosts, as docs/operating.md says: API and control worker here, a node worker on each host."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import servers
from tests.gangs.network import Host, network
from tests.service import Service, wait_until

KEY = "sk-a-key-for-the-tests-of-gangs"
LEASE_S = 12.0
HEARTBEAT_S = 0.5


@dataclass
class Node:
    """A host's node worker, and everything it has started. Its folder is its own disk: no other host sees it."""

    host: Host
    name: str
    folder: Path
    environment: dict[str, str]
    worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = self.host.command(sys.executable, "-m", "app.cli", "node")
        with (self.folder / "node.log").open("ab") as log:
            self.worker = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self.environment)

    def processes(self) -> list[psutil.Process]:
        """All that runs on this host: worker, supervisors, torch elastic, ranks."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def trainers(self) -> list[psutil.Process]:
        """Torch elastic and the ranks: what must be gone for the host to be down."""
        return [process for process in self.processes() if _says(process, "worker.trainer.train")]

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.trainers() if not _says(process, "torch.distributed.run")]

    def supervisor(self) -> psutil.Process:
        return next(process for process in self.processes() if _says(process, "worker.supervisor"))

    def kill(self) -> None:
        """As a power cut does it: everything at once, nothing can say goodbye."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.worker is not None:
            self.worker.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and (process.environ().get("TUNEYARD_NODE_NAME") == self.name or _says(process, f"{self.folder}/"))
        except psutil.Error:
            return False


@dataclass
class Cluster(Service):
    """The service as its users see it, and its nodes."""

    address: str = ""
    nodes: list[Node] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}/v1"

    @property
    def key(self) -> str:
        return KEY

    def node_ranks(self) -> list[Node]:
        """The nodes in the order in which a gang numbers them."""
        return sorted(self.nodes, key=lambda node: node.host.address)


@contextlib.contextmanager
def cluster(folder: Path, models: Path, num_nodes: int = 2, **environment: str) -> Iterator[Cluster]:
    """A cluster for the block; all it started is gone after it."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(num_nodes))
        database = stack.enter_context(servers.postgres(net.address)).create_database()
        broker = stack.enter_context(servers.valkey(address=net.address))
        common = {
            "TUNEYARD_DATABASE_URL": database,
            "TUNEYARD_BROKER_URL": broker,
            "TUNEYARD_STORAGE_URL": f"file://{folder / 'storage'}",
            "TUNEYARD_MODEL_ROOTS": f'["{models}"]',
            "TUNEYARD_ADMIN_API_KEY": KEY,
            "TUNEYARD_HEARTBEAT_S": str(HEARTBEAT_S),
            "TUNEYARD_LEASE_S": str(LEASE_S),
            "TUNEYARD_NODE_TIMEOUT_S": "5",
            "TUNEYARD_MAX_ATTEMPTS": "5",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        service = Cluster(folder, servers.free_port(), common, address=net.address)
        service.nodes += [_node(host, f"host-{index}", folder, common) for index, host in enumerate(net.hosts)]
        stack.callback(_kill_all, service.nodes)
        own = common | {"TUNEYARD_DATA_DIR": str(folder)}
        subprocess.run([sys.executable, "-m", "app.cli", "migrate"], check=True, env=os.environ | own)
        uvicorn = ["uvicorn", "--factory", "app.main:create_app", "--host", net.address, "--port", str(service.port)]
        for name, command in {"api": uvicorn, "control": ["app.cli", "control"]}.items():
            with (folder / f"{name}.log").open("wb") as log:
                process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log, env=os.environ | own)
            stack.callback(process.wait)
            stack.callback(process.kill)
        for node in service.nodes:
            node.start()
        wait_until(lambda: _num_ready(service) == num_nodes, "all nodes are registered")
        yield service
        for client in service.clients:
            client.close()


def _node(host: Host, name: str, folder: Path, common: dict[str, str]) -> Node:
    own = folder / name
    own.mkdir()
    environment = common | {
        "TUNEYARD_DATA_DIR": str(own),
        "TUNEYARD_NODE_NAME": name,
        "TUNEYARD_NODE_ADDRESS": host.address,
    }
    return Node(host, name, own, environment)


def _num_ready(service: Cluster) -> int:
    with contextlib.suppress(Exception):  # the API may not listen yet
        listed = service.client.get("/nodes", cast_to=object)
        assert isinstance(listed, dict)
        return sum(node["status"] == "ready" for node in listed["data"])
    return 0


def _kill_all(nodes: list[Node]) -> None:
    for node in nodes:
        node.kill()


def _says(process: psutil.Process, words: str) -> bool:
    try:
        return any(words in part for part in process.cmdline())
    except psutil.Error:
        return False
