"""What one key may ask for at once and in a minute, and what becomes of uploads that never end."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import httpx2
import pytest
from openai import OpenAI
from starlette.exceptions import HTTPException
from starlette.requests import Request

from app import auth, db, limits
from app.errors import RateLimited
from app.keys import service as keys
from tests import factories, servers
from tests.conftest import Live, configured
from tests.service import wait_until
from tests.test_main import assert_envelope

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def key_id(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A key that may send three requests a minute, at second 20 of one."""
    monkeypatch.setattr(time, "time", lambda: 1_200_000_020.0)
    environment = {"TUNEYARD_BROKER_URL": broker_url, "TUNEYARD_REQUESTS_PER_MINUTE": "3", "TUNEYARD_MAX_OPEN_STREAMS": "2"}
    monkeypatch.setattr(limits, "_broker_away_until", 0.0)
    yield from configured(monkeypatch, environment, f"key_{uuid4().hex}")


class TestRequests:
    def test_beyond_the_limit_a_key_waits_for_the_next_minute(self, key_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        left = [limits.count_request(key_id)["x-ratelimit-remaining-requests"] for _ in range(3)]
        assert left == ["2", "1", "0"]
        with pytest.raises(RateLimited) as caught:
            limits.count_request(key_id)
        assert caught.value.headers["Retry-After"] == "41"
        assert caught.value.headers["x-ratelimit-limit-requests"] == "3"
        assert limits.count_request("key_another")
        monkeypatch.setattr(time, "time", lambda: 1_200_000_020.0 + 41)
        assert limits.count_request(key_id)["x-ratelimit-remaining-requests"] == "2"

    def test_a_broker_that_is_away_refuses_nobody_and_is_left_alone_for_a_while(
        self, key_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for _ in configured(monkeypatch, {"TUNEYARD_BROKER_URL": f"redis+socket://{tmp_path}/nowhere"}, None):
            assert [limits.count_request(key_id) for _ in range(10)] == [{}] * 10
            assert limits._broker_away_until > time.monotonic()

    def test_zero_is_no_limit(self, key_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in configured(monkeypatch, {"TUNEYARD_REQUESTS_PER_MINUTE": "0"}, None):
            assert [limits.count_request(key_id) for _ in range(10)] == [{}] * 10

    def test_another_api_process_counts_on(self, live: Live, http: httpx2.Client, client: OpenAI) -> None:
        """This process is one too: it shares the service's broker."""
        window = "x-ratelimit-reset-requests"
        while True:  # again if the minute ends in between
            theirs = http.get("/v1/models").headers
            ours = limits.count_request(_key_id(live))
            if int(ours[window][:-1]) <= int(theirs[window][:-1]):
                break
        left = [int(headers["x-ratelimit-remaining-requests"]) for headers in (theirs, ours)]
        assert left[0] - left[1] == 1

    def test_the_answer_is_a_429_that_says_when(self, live: Live, api_server: servers.Api, tmp_path: Path) -> None:
        environment = dict(api_server.environment) | {"TUNEYARD_REQUESTS_PER_MINUTE": "2"}
        with servers.api(environment, tmp_path) as strict:
            answers = [httpx2.get(f"{strict.url}/v1/models", headers=live.headers) for _ in range(6)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert assert_envelope(refused[0], 429)["code"] == "rate_limit_exceeded"
        assert 0 < int(refused[0].headers["retry-after"]) <= limits.WINDOW_S
        assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"


class TestStreams:
    def test_one_too_many_is_refused_until_another_closes(self, key_id: str) -> None:
        for _ in range(2):
            limits.open_stream(key_id)
        with pytest.raises(RateLimited):
            limits.open_stream(key_id)
        limits.open_stream("key_another")
        limits.close_stream(key_id)
        limits.open_stream(key_id)

    def test_over_http_too_and_a_client_that_goes_away_makes_room(
        self, live: Live, api_server: servers.Api, tmp_path: Path
    ) -> None:
        job_id = factories.create_job(live.project_id)
        environment = dict(api_server.environment) | {"TUNEYARD_MAX_OPEN_STREAMS": "2"}
        headers = live.headers | {"Accept": "text/event-stream"}
        path = f"{JOBS}/{job_id}/events"
        with servers.api(environment, tmp_path) as strict, httpx2.Client(base_url=strict.url, headers=headers) as http:
            with ExitStack() as open_ones:
                for _ in range(2):
                    open_ones.enter_context(http.stream("GET", path))
                refused = http.get(path)
                assert assert_envelope(refused, 429)["code"] == "rate_limit_exceeded"
                assert refused.headers["retry-after"]
                assert http.get(path, headers={"Accept": "application/json"}).status_code == 200
            wait_until(lambda: _opens(http, path), "there is room for a stream again")


class TestUploads:
    def test_one_that_breaks_off_leaves_nothing_and_works_again(
        self, live: Live, client: OpenAI, api_server: servers.Api
    ) -> None:
        data = b"x" * (4 * 1024**2)
        storage = Path(api_server.environment["TUNEYARD_DATA_DIR"]) / "storage"
        before = {path for path in storage.rglob("*") if path.is_file()}
        address = urlsplit(live.url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            head = f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {live.api_key}\r\n"
            head += f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(data)}\r\n\r\n"
            part = '--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            connection.sendall((head + part).encode() + data[: len(data) // 2])
        assert client.files.list().data == []
        file = client.files.create(file=("a.jsonl", data), purpose="user_data")
        assert [one.id for one in client.files.list()] == [file.id]
        after = {path for path in storage.rglob("*") if path.is_file()}
        assert len(after - before) == 1

    @pytest.mark.anyio
    async def test_one_that_goes_silent_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "IDLE_BODY_S", 0.05)
        parts: list[dict[str, Any]] = [{"type": "http.request", "body": b"a", "more_body": True}]
        receive = auth._limited(_request(parts), 100)
        assert (await receive())["body"] == b"a"
        with pytest.raises(HTTPException) as caught:
            await receive()
        assert caught.value.status_code == 408

    @pytest.mark.anyio
    async def test_a_whole_one_may_take_its_time_to_be_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "IDLE_BODY_S", 0.05)
        receive = auth._limited(_request([{"type": "http.request", "body": b"a", "more_body": False}]), 100)
        await receive()
        with anyio.move_on_after(0.3) as waiting:
            await receive()
        assert waiting.cancelled_caught


def _request(parts: list[dict[str, Any]]) -> Request:
    """A request of which these parts come, and then nothing."""

    async def receive() -> dict[str, Any]:
        if not parts:
            await anyio.sleep_forever()
        return parts.pop(0)

    return Request({"type": "http", "headers": [], "method": "POST", "path": "/"}, receive)


def _opens(http: httpx2.Client, path: str) -> bool:
    with http.stream("GET", path) as answer:
        return answer.status_code == 200


def _key_id(live: Live) -> str:
    with db.read() as connection:
        return keys.authenticate(connection, live.api_key).key_id
