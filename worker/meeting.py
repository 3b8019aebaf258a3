"""Where the ranks of a job meet: torch elastic's rendezvous, one per attempt, on the address of its first node.

torch elastic ignores `--node-rank` here and numbers the nodes by their addresses, as text; the scheduler places them in that
order, and what would end in another is refused before anything starts.
"""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from app import db
from app.config import get_settings
from app.nodes import gangs
from app.nodes.gangs import Member
from worker.failures import JobFailed
from worker.workspace import Run

LOOPBACK = "127.0.0.1"
POLL_S = 0.5
# How long an agent looks for the host's, which has published its port and is about to start.
READ_TIMEOUT_S = 300


@dataclass(frozen=True)
class Meeting:
    """What torch elastic on one node needs to find the others."""

    endpoint: str
    own_address: str = LOOPBACK
    environment: dict[str, str] = field(default_factory=dict)

    def conf(self, node_rank: int) -> str:
        """Without `is_host` two agents may both come up as clients: a name or an address is not always known as one's own."""
        limits = f"join_timeout={get_settings().join_timeout_s:.0f},read_timeout={READ_TIMEOUT_S}"
        return f"is_host={int(node_rank == 0)},{limits}"


def alone() -> Meeting:
    """For a job on one node, which needs no network."""
    return Meeting(endpoint=_endpoint(LOOPBACK, _free_port(LOOPBACK)))


def host(run: Run) -> Meeting:
    """Choose a port on this node, the job's first, and tell it to the others. Raises JobFailed(node_unreachable)."""
    with db.write() as session:
        members = gangs.members(session, run.job_id, run.attempt)
        check_addresses(members)
        own = members[0].address
        port = _free_port(own)
        gangs.publish_port(session, run.job_id, run.attempt, port)
    return Meeting(_endpoint(own, port), own, socket_environment(own))


def join(run: Run, raise_if_stopped: Callable[[], None]) -> Meeting:
    """Wait until the job's first node is ready: the job's rows lie in storage then."""
    while True:
        raise_if_stopped()
        with db.write() as session:
            members = gangs.members(session, run.job_id, run.attempt)
        if port := members[0].rendezvous_port:
            own = members[run.node_rank].address
            return Meeting(_endpoint(members[0].address, port), own, socket_environment(own))
        time.sleep(POLL_S)


def check_addresses(members: Sequence[Member]) -> None:
    """Every node must have an address of its own that the others can reach."""
    addresses = [member.address for member in members]
    for member in members:
        if addresses.count(member.address) > 1 or (_is_loopback(member.address) and not all(map(_is_loopback, addresses))):
            raise JobFailed(
                "node_unreachable",
                f"Node {member.node} has the address {member.address}, at which other nodes do not reach it: set "
                "TUNEYARD_NODE_ADDRESS on each node.",
                "parallelism.nnodes",
            )


def socket_environment(address: str) -> dict[str, str]:
    """The network interface that gloo and NCCL use: what the operator says, else the one that has the node's address."""
    interface = get_settings().network_interface or interface_of(address)
    if interface is None:
        return {}
    # NCCL takes a name for the beginning of one unless it follows a `=`.
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def interface_of(address: str) -> str | None:
    """The interface that has an address, or the address of a name; None where none has, as behind a translation."""
    with contextlib.suppress(OSError):
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
        for interface, addresses in psutil.net_if_addrs().items():
            if wanted & {entry.address.partition("%")[0] for entry in addresses}:
                return str(interface)
        if all(map(_is_loopback, wanted)):
            return "lo"  # which has all of 127.0.0.0/8, and lists one
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _free_port(address: str) -> int:
    """A port that nothing on this machine listens on; the system chooses."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
