"""What a key may do: `AREA:read`, `AREA:write`, or `AREA:*` for both. `admin` opens what concerns the whole service."""

from collections.abc import Collection

ADMIN = "admin"
PROJECT_SCOPES = ("jobs:*", "files:*", "models:*", "chat")
ALL_SCOPES = (*PROJECT_SCOPES, ADMIN)
KNOWN = frozenset({f"{area}:{use}" for area in ("jobs", "files", "models") for use in ("read", "write", "*")} | {"chat", ADMIN})


def needed(area: str, method: str) -> str:
    """The scope that a request with this HTTP method needs."""
    return area if area in KNOWN else f"{area}:{'read' if method in ('GET', 'HEAD') else 'write'}"


def allow(scopes: Collection[str], scope: str) -> bool:
    """Whether a key with these scopes may do what needs `scope`."""
    return scope in scopes or f"{scope.partition(':')[0]}:*" in scopes
