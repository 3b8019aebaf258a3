"""Manifests on the wire."""

from typing import Literal

from pydantic import BaseModel


class SigningKeyOut(BaseModel):
    """The key that signs the manifests of all results of this service."""

    object: Literal["signing_key"] = "signing_key"
    algorithm: Literal["ed25519"] = "ed25519"
    public_key: str
