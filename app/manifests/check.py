"""Check a downloaded result offline: is the manifest this service's, and is every file the one it names?"""

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from app.manifests import signing

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"


def check_folder(folder: Path, public_key: Ed25519PublicKey) -> tuple[int, list[str]]:
    """How many files the manifest names, and everything wrong with the folder, a line each."""
    for name in (MANIFEST, SIGNATURE):
        if not (folder / name).is_file():
            return 0, [f"{name} is missing: nothing can be checked"]
    content = (folder / MANIFEST).read_bytes()
    if not signing.is_signed(content, (folder / SIGNATURE).read_bytes(), public_key):
        return 0, [f"{MANIFEST} is not signed by this key: it was changed, or another service made it"]
    files: dict[str, dict[str, object]] = json.loads(content)["files"]
    named = [problem for name, facts in files.items() if (problem := _problem(folder / name, name, facts))]
    return len(files), named + [f"{name} is not in the manifest" for name in _found(folder) if name not in files]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(path: Path, name: str, facts: dict[str, object]) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != facts["bytes"]:
        return f"{name} has {path.stat().st_size} bytes, not {facts['bytes']}"
    return None if sha256_of(path) == facts["sha256"] else f"{name} was changed: its SHA-256 is another one"


def _found(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [name for name in names if name not in (MANIFEST, SIGNATURE)]
