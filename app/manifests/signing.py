"""The signature of a manifest: Ed25519, by the one key of this service."""

import base64
import binascii
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from app import keyfile
from app.config import get_settings


def sign(content: bytes) -> bytes:
    """The content of a signature file: one line of base64."""
    return base64.b64encode(_private_key().sign(content)) + b"\n"


def is_signed(content: bytes, signature: bytes, public_key: Ed25519PublicKey) -> bool:
    """Whether a signature file is this key's over exactly these bytes."""
    try:
        public_key.verify(base64.b64decode(signature.strip(), validate=True), content)
    except (InvalidSignature, binascii.Error):
        return False
    return True


def public_key_pem() -> str:
    """What a verifier needs, as PEM."""
    return _private_key().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def parse_public_key(text: str) -> Ed25519PublicKey:
    """A public key as PEM, or as GET /v1/signing_key answers it; ValueError for anything else."""
    try:
        pem = json.loads(text)["public_key"] if text.lstrip().startswith("{") else text
        key = load_pem_public_key(pem.encode())
    except (ValueError, KeyError, AttributeError, UnsupportedAlgorithm) as error:
        raise ValueError("it holds no public key in PEM form") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("its key is not of the kind Ed25519")
    return key


def key_path() -> Path:
    """Where the private key lies unless a setting gives it."""
    return get_settings().data_dir.resolve() / "signing-key"


def _private_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(keyfile.load(get_settings().signing_key, key_path()))
