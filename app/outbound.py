"""Calls to addresses that users name. What an address is, is checked when it is connected to: a name may change in between."""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from app.config import get_settings

DEADLINE_S = 15.0  # for everything: a server that sends a byte a second is no better than a silent one
CONNECT_S, MOST_ADDRESSES = 5.0, 3
NAT64 = ipaddress.ip_network("64:ff9b::/96")
_tls = ssl.create_default_context()


class NotAllowed(Exception):
    """The service does not call this; the message says why, and nothing about what is there."""


class NoAnswer(Exception):
    """Nobody answered, or not in time."""


def check_url(url: str) -> None:
    """Raises NotAllowed for a URL that may not be called. A name that nobody knows yet passes: each call looks it up."""
    parts = _parts(url)
    try:
        _addresses(parts)
    except NoAnswer:
        return


def post(url: str, body: bytes, headers: Mapping[str, str]) -> int:
    """The status of the answer; its body is not read and no redirect is followed. Raises NotAllowed, NoAnswer."""
    parts = _parts(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = _Connection(parts)
    deadline = threading.Timer(DEADLINE_S, connection.cut)
    deadline.start()
    try:
        connection.request("POST", path, body, dict(headers))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(_in_words(error)) from error
    finally:
        deadline.cancel()
        connection.close()


class _Connection(http.client.HTTPConnection):
    """HTTP or HTTPS to an address that was checked, and to no other."""

    def __init__(self, parts: SplitResult) -> None:
        super().__init__(parts.hostname or "", _port(parts), timeout=DEADLINE_S)
        self.parts = parts

    def connect(self) -> None:
        error: OSError | None = None
        for family, address in _addresses(self.parts)[:MOST_ADDRESSES]:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            self.sock.settimeout(CONNECT_S)
            try:
                self.sock.connect(address)
                break
            except OSError as caught:
                self.sock.close()
                error = caught
        else:
            raise error or OSError("no address")
        self.sock.settimeout(DEADLINE_S)
        if self.parts.scheme == "https":
            self.sock = _tls.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def cut(self) -> None:
        """End it, whatever it waits for."""
        if (sock := self.sock) is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise NotAllowed("This is no URL.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment or port == 0:
        raise NotAllowed("A URL of `https://HOST/PATH` is needed.")
    if parts.username is not None or parts.password is not None:
        raise NotAllowed("A URL with a user or a password in it would show them in logs: leave them out.")
    if any(not character.isprintable() or character == " " for character in url) or not url.isascii():
        raise NotAllowed("A URL has no spaces and only ASCII characters: encode them.")
    if parts.scheme == "http" and not _is_listed(parts.hostname):
        raise NotAllowed("`https://` is needed; `http://` is for hosts that the operator listed.")
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _addresses(parts: SplitResult) -> list[tuple[int, tuple[str, int]]]:
    """Where the host is now. One address that is not allowed spoils them all."""
    host = parts.hostname or ""
    try:
        found = socket.getaddrinfo(host, _port(parts), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoAnswer("the name is not known") from error
    targets = [(int(family), (str(address[0]), int(address[1]))) for family, _, _, _, address in found]
    if not _is_listed(host) and not all(_is_public(address) or _is_listed(address) for _, (address, _) in targets):
        raise NotAllowed("This address is not a public one: the operator lists others in TUNEYARD_OUTBOUND_ALLOWED_HOSTS.")
    return targets


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None or ip in NAT64:  # another address inside: who knows where that leads
            return False
    return ip.is_global and not ip.is_multicast


def _is_listed(host: str) -> bool:
    """Whether the operator listed this name, this address, or a network that it is in."""
    allowed = get_settings().outbound_allowed_hosts
    if host.lower() in (entry.lower() for entry in allowed):
        return True
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(ip in network for entry in allowed if (network := _network(entry)) is not None)


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        return None


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {DEADLINE_S:.0f} s"
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the server's certificate is not valid"
    if isinstance(error, ssl.SSLError):
        return "no TLS connection could be made"
    return "the connection broke" if isinstance(error, OSError) else "the answer is no HTTP"
