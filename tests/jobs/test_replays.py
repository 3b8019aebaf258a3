"""A request whose answer was lost is sent again: one job, whoever answers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests import servers
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
