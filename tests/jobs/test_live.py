"""Streams: events and logs as they come, resumed where a reader had come to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import pytest
from sqlalchemy import text

from app import db
from tests import factories
from tests.conftest import Live

JOBS = "/v1/fine_tuning/jobs"
STREAM = {"Accept": "text/event-stream"}


@dataclass
class Received:
    """One event of a stream as a browser sees it."""

    id: str = ""
    event: str = ""
    data: str = ""


def read(lines: Iterator[str]) -> Iterator[Received]:
    received = Received()
    for line in lines:
        name, _, value = line.partition(": ")
        if name in ("id", "event"):
            setattr(received, name, value)
        elif name == "data":
            received.data += ("\n" if received.data else "") + value
        elif not line and received != Received():
            yield received
            received = Received()


@contextmanager
def stream(http: httpx2.Client, path: str, **headers: str) -> Iterator[tuple[httpx2.Response, Iterator[Received]]]:
    with http.stream("GET", path, headers=STREAM | headers) as answer:
        yield answer, read(answer.iter_lines())


class TestEventStream:
    def test_a_finished_jobs_story_is_told_whole_and_ends(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="succeeded")
        factories.add_events(job_id, "one", "two")
        with stream(http, f"{JOBS}/{job_id}/events") as (answer, events):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["x-request-id"].startswith("req_")
            received = list(events)
        assert [(event.id, event.event) for event in received] == [("1", "message"), ("2", "message")]
        listed = http.get(f"{JOBS}/{job_id}/events").json()["data"]
        assert [json.loads(event.data) for event in received] == listed[::-1]

    def test_events_arrive_while_the_job_runs_and_the_stream_ends_with_it(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="running")
        factories.add_events(job_id, "one")
        with stream(http, f"{JOBS}/{job_id}/events") as (_, events):
            assert next(events).id == "1"
            factories.add_events(job_id, "two", kind="metrics", data={"step": 1})
            second = next(events)
            assert (second.id, second.event, json.loads(second.data)["data"]) == ("2", "metrics", {"step": 1})
            factories.add_events(job_id, "three")
            factories.update_job(job_id, status="failed")
            assert [event.id for event in events] == ["3"]

    def test_a_reader_goes_on_after_the_last_event_it_had(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="succeeded")
        factories.add_events(job_id, *(f"event {number}" for number in range(10)))
        with stream(http, f"{JOBS}/{job_id}/events", **{"Last-Event-ID": "7"}) as (_, events):
            assert [event.id for event in events] == ["8", "9", "10"]

    def test_a_story_longer_than_one_read_has_no_gap(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="succeeded")
        factories.add_events(job_id, *(f"event {number}" for number in range(1001)))
        with stream(http, f"{JOBS}/{job_id}/events") as (_, events):
            assert [int(event.id) for event in events] == list(range(1, 1002))

    def test_a_position_that_is_none_is_refused_before_the_stream_begins(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        answer = http.get(f"{JOBS}/{job_id}/events", headers=STREAM | {"Last-Event-ID": "yesterday"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Last-Event-ID")

    def test_forty_open_streams_hold_no_connection_and_hinder_nobody(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="running")
        factories.add_events(job_id, "one")
        streams = [stream(http, f"{JOBS}/{job_id}/events") for _ in range(40)]
        try:
            for opened in streams:
                assert next(opened.__enter__()[1]).id == "1"
            assert http.get(f"{JOBS}/{job_id}").status_code == 200
            assert _connections() <= 12  # the server's pool, and this test's own
        finally:
            for opened in streams:
                opened.__exit__(None, None, None)

    @pytest.mark.slow
    def test_a_silent_job_is_heard_of_every_fifteen_seconds(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="running")
        with http.stream("GET", f"{JOBS}/{job_id}/events", headers=STREAM, timeout=20) as answer:
            assert next(answer.iter_lines()).startswith(":")


class TestLogs:
    def test_the_tail_of_the_newest_attempt(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, attempt=2)
        factories.write_log(job_id, 1, "old\n")
        factories.write_log(job_id, 2, "".join(f"line {number}\n" for number in range(5000)))
        answer = http.get(f"{JOBS}/{job_id}/logs", params={"tail": 3})
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text == "line 4997\nline 4998\nline 4999\n"
        assert len(http.get(f"{JOBS}/{job_id}/logs").text.splitlines()) == 200

    @pytest.mark.parametrize(
        ("content", "tail", "expected"), [("a\nb", 1, "b"), ("a\nb", 9, "a\nb"), ("a\n", 0, ""), ("", 5, "")]
    )
    def test_logs_that_end_anyhow(self, http: httpx2.Client, live: Live, content: str, tail: int, expected: str) -> None:
        job_id = factories.create_job(live.project_id, attempt=1)
        factories.write_log(job_id, 1, content)
        assert http.get(f"{JOBS}/{job_id}/logs", params={"tail": tail}).text == expected

    def test_an_attempt_without_a_log_yet_shows_the_one_before(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, attempt=2)
        factories.write_log(job_id, 1, "old\n")
        assert http.get(f"{JOBS}/{job_id}/logs").text == "old\n"

    def test_a_job_that_never_ran_has_an_empty_log(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        answer = http.get(f"{JOBS}/{job_id}/logs")
        assert (answer.status_code, answer.text) == (200, "")

    def test_a_growing_log_is_followed_to_the_end_of_the_job(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="running", attempt=1)
        factories.write_log(job_id, 1, "one\ntwo\n")
        with stream(http, f"{JOBS}/{job_id}/logs") as (_, events):
            first = next(events)
            assert (first.id, first.data) == ("1:8", "one\ntwo")
            factories.write_log(job_id, 1, "one\ntwo\nthree\nhalf a li")
            assert next(events).data == "three"
            factories.write_log(job_id, 1, "one\ntwo\nthree\nhalf a line")
            factories.update_job(job_id, status="succeeded")
            assert [event.data for event in events] == ["half a line"]

    def test_a_reader_goes_on_where_it_had_come_to(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="failed", attempt=1)
        factories.write_log(job_id, 1, "one\ntwo\nthree\n")
        with stream(http, f"{JOBS}/{job_id}/logs", **{"Last-Event-ID": "1:4"}) as (_, events):
            assert [event.data for event in events] == ["two\nthree"]

    def test_following_as_plain_text(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="failed", attempt=1)
        factories.write_log(job_id, 1, "one\ntwo\n")
        assert http.get(f"{JOBS}/{job_id}/logs", params={"follow": "true", "tail": 1}).text == "two\n"


def _connections() -> int:
    with db.read() as connection:
        if connection.dialect.name == "sqlite":
            return 0
        counted = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return int(connection.execute(counted).scalar_one())
