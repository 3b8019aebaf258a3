"""The service's own keys: 32 random bytes, from a setting or from a file that only this user reads."""

import base64
import binascii
import os
import secrets
from pathlib import Path

from pydantic import SecretStr

KEY_BYTES = 32


def load(given: SecretStr | None, path: Path) -> bytes:
    """The key of a setting (base64), else the one in the file, which is made at first use."""
    if given is not None:
        return _decode(given.get_secret_value(), "the setting")
    if not path.exists():
        _create(path)
    return _decode(path.read_text(), str(path))


def _create(path: Path) -> None:
    """Written beside and linked whole: of two processes that both find no file, the second takes the first one's key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _decode(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"{where} is no key: it must be {KEY_BYTES} bytes in base64, as `openssl rand -base64 32` prints")
    return key
