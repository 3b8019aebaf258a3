"""Database access of a request, as typed aliases. Both end before the response is sent: nothing is held while it streams."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Annotated

from fastapi import Depends
from sqlalchemy import Connection
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app import db

# A request holds its connection from one thread to the next. Were there as many such requests as connections, every thread
# could come to wait for a connection, and none be left for those that have one: 100 calls at once then ended in 503.
READERS = db.POOL_SIZE // 2
_reading = asyncio.Semaphore(READERS)


def _write() -> Iterator[Session]:
    with db.write() as session:  # it connects where it is used first, in the thread that works with it
        yield session


async def _read() -> AsyncIterator[Connection]:
    async with _reading:
        with ExitStack() as stack:
            connection = await run_in_threadpool(stack.enter_context, db.read())
            try:
                yield connection
            finally:
                await run_in_threadpool(stack.close)


Write = Annotated[Session, Depends(_write, scope="function")]
Read = Annotated[Connection, Depends(_read, scope="function")]
