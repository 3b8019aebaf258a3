"""Hosts as network namespaces on one bridge: each has an address of its own, and a link that can be cut."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A namespace that reaches the bridge and the other hosts by one link."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """No packet leaves or arrives any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        _ip("-n", self.namespace, "link", "set", "eth0", "up")


@dataclass(frozen=True)
class Network:
    """The bridge, with this process on it at `address`, and the hosts."""

    address: str
    hosts: list[Host]


def why_impossible() -> str | None:
    """What the kernel or our rights forbid, in words; None where networks can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        return f"no network namespaces here: {told.decode(errors='replace').strip()}"


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """A bridge and hosts on it, gone after the block."""
    # Two test runs at once must not meet: a bridge and a subnet per process.
    tag, subnet = f"{os.getpid() % 0xFFFFF:05x}", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    bridge = f"ty{tag}"
    hosts = [Host(f"tuneyard-{tag}-{index}", f"{subnet}.{index + 2}") for index in range(num_hosts)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            _connect(host, bridge, f"ty{tag}v{index}")
        yield Network(f"{subnet}.1", hosts)
    finally:
        for host in hosts:
            _ip("netns", "delete", host.namespace, check=False)
        _ip("link", "delete", bridge, check=False)


def _connect(host: Host, bridge: str, link: str) -> None:
    _ip("netns", "add", host.namespace)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("link", "set", link, "master", bridge, "up")
    for name in ("lo", "eth0"):
        _ip("-n", host.namespace, "link", "set", name, "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)
