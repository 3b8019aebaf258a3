"""Webhook endpoints as the official SDK handles them; URLs that may not be called."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.conftest import CASES, Live
from tests.test_main import assert_envelope
from tests.webhooks.receiver import Receiver, receiving

ENDPOINTS = "/v1/webhook_endpoints"
SUCCEEDED: Any = "fine_tuning.job.succeeded"
HOSTILE = [
    *json.loads((CASES / "C13b_urls.json").read_text())["dataset_or_webhook_urls"],
    "http://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[fe80::1]/",
    "https://2130706433/",
    "https://0x7f.1/",
    "https://127.1/",
    "https://0.0.0.0/",
    "https://100.64.0.1/",
    "https://192.168.0.1:8443/x",
    "https://224.0.0.1/",
    "https://user:password@example.org/",
    "http://example.org/",
    "https:///x",
    "https://example.org:99999/",
    "https://exa mple.org/",
    "gopher://example.org/",
    "not a url",
    "",
]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def create(client: OpenAI, url: str = "https://203.0.113.9.nip.invalid/hook") -> Any:
    return client.webhooks.create(name="ops", url=url, event_types=[SUCCEEDED])


def test_the_sdk_makes_reads_changes_lists_and_deletes_endpoints(client: OpenAI) -> None:
    created = create(client)
    assert created.id.startswith("we_")
    assert (created.object, created.name, created.event_types) == ("webhook_endpoint", "ops", [SUCCEEDED])
    assert created.signing_secret.startswith("whsec_")
    read = client.webhooks.retrieve(created.id)
    assert read.signing_secret_hint == f"whsec_...{created.signing_secret[-5:]}"
    assert created.signing_secret not in str(read.to_dict())
    changed = client.webhooks.update(created.id, name="on call", event_types=["fine_tuning.job.failed"])
    assert (changed.name, changed.event_types, changed.url) == ("on call", ["fine_tuning.job.failed"], created.url)
    assert [one.id for one in client.webhooks.list().data] == [created.id]
    rotated = client.webhooks.rotate_secret(created.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret not in ("", created.signing_secret)
    deleted = client.webhooks.delete(created.id)
    assert (deleted.deleted, deleted.object) == (True, "webhook_endpoint.deleted")
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(created.id)


def test_openais_types_and_our_own_are_listed(client: OpenAI) -> None:
    types = client.webhooks.event_types.list().data
    assert {SUCCEEDED, "fine_tuning.job.failed", "fine_tuning.job.cancelled", "fine_tuning.job.paused"} <= set(types)


def test_another_projects_endpoint_is_not_there(client: OpenAI, other: OpenAI) -> None:
    endpoint = create(client).id
    for call in (other.webhooks.retrieve, other.webhooks.delete, other.webhooks.rotate_secret, other.webhooks.update):
        with pytest.raises(openai.NotFoundError):
            call(endpoint)
    assert other.webhooks.list().data == []


@pytest.mark.parametrize("url", HOSTILE)
def test_a_url_that_may_not_be_called_is_refused(http: httpx2.Client, url: str) -> None:
    answer = http.post(ENDPOINTS, json={"name": "a", "url": url, "event_types": [SUCCEEDED]})
    error = assert_envelope(answer, 400)
    assert (error["code"], error["param"]) == ("url_not_allowed", "url")


def test_a_change_of_url_is_held_to_the_same(client: OpenAI) -> None:
    endpoint = create(client).id
    with pytest.raises(openai.BadRequestError) as caught:
        client.webhooks.update(endpoint, url="https://10.0.0.5/")
    assert caught.value.code == "url_not_allowed"


@pytest.mark.parametrize("url", json.loads((CASES / "C13b_urls.json").read_text())["dataset_or_webhook_urls"])
def test_the_same_urls_are_no_training_data(http: httpx2.Client, url: str) -> None:
    answer = http.post("/v1/fine_tuning/jobs", json={"model": "openai/gpt-oss-20b", "training_file": url})
    assert assert_envelope(answer, 400)["param"] == "training_file"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "a", "url": "https://example.org", "event_types": []}, "event_types"),
        ({"name": "a", "url": "https://example.org", "event_types": ["batch.completed"]}, "event_types"),
        ({"name": "", "url": "https://example.org", "event_types": [SUCCEEDED]}, "name"),
    ],
)
def test_what_makes_no_endpoint_is_named(http: httpx2.Client, body: dict[str, object], param: str) -> None:
    found = assert_envelope(http.post(ENDPOINTS, json=body), 422)["param"]
    assert (found or "").startswith(param)


def test_nobody_may_be_tried_who_may_not_be_called(live: Live, client: OpenAI, receiver: Receiver) -> None:
    with pytest.raises(openai.BadRequestError):
        create(client, receiver.url)
    with pytest.raises(openai.BadRequestError) as caught:
        client.webhooks.test(create(client).id, event_type=SUCCEEDED)
    assert caught.value.code == "webhook_not_answered"
    assert receiver.got == []
