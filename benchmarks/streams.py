"""500 open event streams, and what they cost everybody else.

    python -m benchmarks.streams [--streams 500] [--calls 100] [--pause 2.0]

One API process on a real PostgreSQL. Its baseline is the same calls in the same run without a stream open, before and after.
The streams are held by a process of their own; a job's event is written every `--pause` seconds while calls are timed.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psycopg

from app import db, migrate
from app.config import get_settings
from app.keys import service as keys
from tests import factories, servers

PATIENCE_S = 60.0


@dataclass
class Bench:
    """The service, a project's key, and a job whose events are followed."""

    url: str
    database_url: str
    api_key: str
    job_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    @property
    def path(self) -> str:
        return f"/v1/fine_tuning/jobs/{self.job_id}"

    def connections(self) -> int:
        """Database connections of the API that are in use now; idle ones stay in its pool."""
        with psycopg.connect(self.database_url) as connection:
            busy = "datname = current_database() AND state <> 'idle' AND pid <> pg_backend_pid()"
            query = f"SELECT count(*) FROM pg_stat_activity WHERE {busy}"
            row = connection.execute(query.encode()).fetchone()
        return int(row[0]) if row else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--pause", type=float, default=2.0)
    given = parser.parse_args()
    with service(given.streams) as bench:
        time_calls(bench, 50)  # warm
        without, at_rest = time_calls(bench, given.calls), bench.connections()
        with streams(bench, given.streams) as received, events(bench, given.pause):
            during, held = time_calls(bench, given.calls), bench.connections()
            reached = received.value
        after, at_end = time_calls(bench, given.calls), bench.connections()
    print(f"{given.streams} streams, all open while calls were timed; {reached} events reached them meanwhile")
    for name, times in (("without streams", without), ("with streams", during), ("after them", after)):
        print(f"GET job, {name}: {milliseconds(times)}")
    print(f"ratio of the middle: {statistics.median(during) / statistics.median(without):.2f}")
    print(f"database connections in use: {at_rest} without, {held} with, {at_end} after")


def milliseconds(times: list[float]) -> str:
    ordered = sorted(times)
    return f"{1000 * statistics.median(times):.1f} ms in the middle, {1000 * ordered[int(0.99 * len(ordered))]:.1f} ms at 99 %"


@contextmanager
def service(most_streams: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder, servers.postgres() as postgres, servers.valkey() as broker:
        url = postgres.create_database()
        environment = {
            "TUNEYARD_DATABASE_URL": url,
            "TUNEYARD_DATA_DIR": folder,
            "TUNEYARD_BROKER_URL": broker,
            "TUNEYARD_MAX_OPEN_STREAMS": str(most_streams),
            "TUNEYARD_REQUESTS_PER_MINUTE": "0",
        }
        with configured(environment), servers.api(environment, Path(folder)) as api:
            with db.write() as session:
                project = keys.create_project(session, "bench")
                key = keys.create_key(session, project.id, "bench").plaintext
            job_id = factories.create_job(project.id, status="running")
            db.get_engine().dispose()
            yield Bench(api.url, url, key, job_id)


@contextmanager
def configured(environment: dict[str, str]) -> Iterator[None]:
    """This process writes to the service's database too."""
    os.environ |= environment
    get_settings.cache_clear()
    migrate.upgrade()
    yield
    db.get_engine().dispose()


def time_calls(bench: Bench, calls: int) -> list[float]:
    times = []
    with httpx2.Client(base_url=bench.url, headers=bench.headers, timeout=PATIENCE_S) as http:
        for _ in range(calls):
            started = time.perf_counter()
            http.get(bench.path).raise_for_status()
            times.append(time.perf_counter() - started)
    return times


@contextmanager
def events(bench: Bench, pause_s: float) -> Iterator[None]:
    """The job tells something again and again."""
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(pause_s):
            factories.add_events(bench.job_id, "a line")
        db.get_engine().dispose()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


@contextmanager
def streams(bench: Bench, count: int) -> "Iterator[Synchronized[int]]":
    """So many streams, open for the block; how many events have come over all of them."""
    context = multiprocessing.get_context("spawn")
    opened, received = context.Value("i", 0), context.Value("i", 0)
    holder = context.Process(target=hold, args=(bench, count, opened, received), daemon=True)
    holder.start()
    deadline = time.monotonic() + PATIENCE_S
    while opened.value < count:
        assert time.monotonic() < deadline, f"only {opened.value} of {count} streams opened"
        time.sleep(0.05)
    try:
        yield received
        assert opened.value == count, f"{count - opened.value} streams were cut"
    finally:
        holder.terminate()
        holder.join()


def hold(bench: Bench, count: int, opened: "Synchronized[int]", received: "Synchronized[int]") -> None:
    asyncio.run(_hold_all(bench, count, opened, received))


async def _hold_all(bench: Bench, count: int, opened: "Synchronized[int]", received: "Synchronized[int]") -> None:
    await asyncio.gather(*(_hold_one(bench, opened, received) for _ in range(count)))


async def _hold_one(bench: Bench, opened: "Synchronized[int]", received: "Synchronized[int]") -> None:
    address = urlsplit(bench.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    request = f"GET {bench.path}/events HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {bench.api_key}\r\n"
    writer.write((request + "Accept: text/event-stream\r\n\r\n").encode())
    status = await reader.readline()
    assert b" 200 " in status, status
    opened.value += 1
    while line := await reader.readline():
        received.value += line.startswith(b"id:")
    opened.value -= 1


if __name__ == "__main__":
    main()
