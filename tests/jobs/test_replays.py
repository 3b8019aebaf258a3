"""A request whose answer was lost is sent again: one job, whoever answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from app import db
from app.jobs import replays
from app.keys import service as keys
from tests import factories, servers
from tests.conftest import Live

JOBS = "/v1/fine_tuning/jobs"
BODY = {"model": "openai/gpt-oss-20b", "training_file": "hf://datasets/a/b", "suffix": "once"}
KEY = {"Idempotency-Key": "a key"}


def post(http: httpx2.Client, key: dict[str, str] = KEY, **changes: Any) -> httpx2.Response:
    return http.post(JOBS, json=BODY | changes, headers=key)


def jobs(client: OpenAI) -> list[str]:
    return [job.id for job in client.fine_tuning.jobs.list()]


def test_the_second_request_finds_the_first_ones_job(http: httpx2.Client, client: OpenAI) -> None:
    first, second = post(http), post(http)
    assert (first.status_code, second.status_code) == (200, 200)
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.json() == first.json()
    assert jobs(client) == [first.json()["id"]]


def test_also_when_both_are_under_way_at_once(http: httpx2.Client, client: OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(http).json()["id"], range(8)))
    assert jobs(client) == [answers[0]]
    assert set(answers) == {answers[0]}


def test_also_after_the_api_was_started_anew(http: httpx2.Client, live: Live, api_server: servers.Api, tmp_path: Any) -> None:
    job_id = post(http).json()["id"]
    with servers.api(api_server.environment, tmp_path) as another:
        answer = httpx2.post(another.url + JOBS, json=BODY, headers=live.headers | KEY)
    assert answer.json()["id"] == job_id
    assert answer.headers["idempotency-replayed"] == "true"


def test_the_answer_is_the_job_as_it_stands(http: httpx2.Client) -> None:
    job_id = post(http).json()["id"]
    http.post(f"{JOBS}/{job_id}/cancel")
    assert post(http).json()["status"] == "cancelled"


def test_another_key_another_job(http: httpx2.Client, client: OpenAI) -> None:
    ids = {post(http, key).json()["id"] for key in (KEY, {"Idempotency-Key": "another"}, {}, {})}
    assert len(ids) == 4


def test_a_key_for_another_request_is_refused(http: httpx2.Client) -> None:
    job_id = post(http).json()["id"]
    answer = post(http, seed=1)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    assert job_id in error["message"]


def test_a_request_that_was_refused_may_be_mended_under_its_key(http: httpx2.Client) -> None:
    assert post(http, training_file="nothing").status_code == 400
    assert post(http).status_code == 200


def test_a_key_is_its_projects_own(http: httpx2.Client, other: OpenAI) -> None:
    job_id = post(http).json()["id"]
    theirs = other.fine_tuning.jobs.create(
        model=BODY["model"], training_file=BODY["training_file"], suffix=BODY["suffix"], extra_headers=KEY
    )
    assert theirs.id != job_id
    with pytest.raises(openai.NotFoundError):
        other.fine_tuning.jobs.retrieve(job_id)


class TestTheSdksOwnRetries:
    """It sends no key, but the number of the repetition."""

    def test_an_answer_that_was_lost_on_its_way_makes_no_second_job(self, live: Live, client: OpenAI) -> None:
        with losing_first_answer(live) as url, OpenAI(base_url=f"{url}/v1", api_key=live.api_key) as sdk:
            job = sdk.fine_tuning.jobs.create(model=BODY["model"], training_file=BODY["training_file"])
        assert jobs(client) == [job.id]

    def test_a_repetition_that_comes_while_the_first_is_under_way_waits_for_it(
        self, http: httpx2.Client, client: OpenAI
    ) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda count: post(http, retry(count + 1)).json()["id"], range(8)))
        assert jobs(client) == [answers[0]]
        assert set(answers) == {answers[0]}

    def test_without_a_repetition_equal_requests_make_jobs_of_their_own(self, http: httpx2.Client, client: OpenAI) -> None:
        ids = {post(http, retry(0)).json()["id"] for _ in range(2)}
        assert len(ids) == 2
        again = post(http, retry(1))
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json()["id"] == jobs(client)[0]

    def test_a_repetition_of_what_never_arrived_makes_the_job(self, http: httpx2.Client) -> None:
        first = post(http, retry(1))
        assert "idempotency-replayed" not in first.headers
        assert post(http, retry(2)).json()["id"] == first.json()["id"]

    def test_other_bodies_other_keys_and_old_jobs_are_not_meant(self, http: httpx2.Client, live: Live) -> None:
        job_id = post(http, retry(0)).json()["id"]
        with db.write() as session:
            key = keys.create_key(session, live.project_id, "another").plaintext
        ids = {post(http, retry(1), seed=1).json()["id"]}
        ids.add(post(http, retry(1) | {"Authorization": f"Bearer {key}"}).json()["id"])
        factories.update_job(job_id, created_at=db.now() - replays.RETRY_WINDOW_S)
        ids.add(post(http, retry(1)).json()["id"])
        assert len(ids - {job_id}) == 3


def retry(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}


@contextmanager
def losing_first_answer(live: Live) -> Iterator[str]:
    """The service behind a proxy that passes the first request on and then breaks the connection."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = httpx2.post(live.url + self.path, content=body, headers=headers)
            asked.append(self.headers["x-stainless-retry-count"])
            if len(asked) == 1:
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            for name in ("content-type", "idempotency-replayed"):
                self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == ["0", "1"]
