"""Database access of a request, as typed aliases. Both end before the response is sent: nothing is held while it streams."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from app import db


def _write() -> Iterator[Session]:
    with db.write() as session:
        yield session


def _read() -> Iterator[Connection]:
    with db.read() as connection:
        yield connection


Write = Annotated[Session, Depends(_write, scope="function")]
Read = Annotated[Connection, Depends(_read, scope="function")]
