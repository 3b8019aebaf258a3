"""Secrets on the wire: values come in and never go out."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, SecretStr
from sqlalchemy import Row

from app.schemas import RequestModel
from app.secrets.tables import Secret

NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
MIN_CHARACTERS, MAX_CHARACTERS = 8, 4096


def _one_word(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    # What is short or has spaces could not be told from other text when it is taken out of logs.
    if not (MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(f"must be {MIN_CHARACTERS} to {MAX_CHARACTERS} ASCII characters without spaces")
    return value


class SecretCreate(RequestModel):
    """A value to keep under a name."""

    name: str = Field(pattern=NAME, description="What specs and integrations call it.")
    value: Annotated[SecretStr, AfterValidator(_one_word)] = Field(description="Never shown again.")


class SecretOut(BaseModel):
    """That there is a secret, and since when."""

    name: str
    object: Literal["secret"] = "secret"
    created_at: int

    @classmethod
    def of(cls, secret: Secret | Row[Any]) -> Self:
        return cls(name=secret.name, created_at=int(secret.created_at))
