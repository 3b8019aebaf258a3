"""Projects and keys over HTTP: made by an admin, limited by scopes, refused by name."""

from collections.abc import Iterator

import httpx2
import openai
import pytest
from openai import OpenAI

from app import db
from app.keys import service
from app.keys.scopes import ALL_SCOPES
from tests.conftest import Live
from tests.test_main import assert_envelope


@pytest.fixture
def admin(live: Live) -> Iterator[httpx2.Client]:
    with db.write() as session:
        key = service.create_key(session, live.project_id, "admin", scopes=ALL_SCOPES).plaintext
    with httpx2.Client(base_url=live.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        yield client


def keys_of(live: Live) -> str:
    return f"/v1/projects/{live.project_id}/api_keys"


def get(live: Live, path: str, key: str) -> httpx2.Response:
    return httpx2.get(live.url + path, headers={"Authorization": f"Bearer {key}"})


def test_an_admin_makes_a_project_and_a_key_that_works_with_the_sdk(admin: httpx2.Client, live: Live) -> None:
    project = admin.post("/v1/projects", json={"name": f"for {live.project_id}", "max_gpus": 8}).json()
    assert (project["object"], project["max_gpus"]) == ("project", 8)
    assert project["id"] in [one["id"] for one in admin.get("/v1/projects").json()["data"]]
    key = admin.post(f"/v1/projects/{project['id']}/api_keys", json={"name": "ci"}).json()
    with OpenAI(base_url=f"{live.url}/v1", api_key=key["value"]) as sdk:
        assert sdk.models.list().data
        assert sdk.fine_tuning.jobs.list().data == []


def test_a_key_is_shown_once_and_then_by_its_last_characters(admin: httpx2.Client, live: Live) -> None:
    created = admin.post(keys_of(live), json={"name": "ci", "scopes": ["files:read"], "expires_in_s": 3600}).json()
    assert get(live, "/v1/files", created["value"]).status_code == 200
    listed = admin.get(keys_of(live))
    assert created["value"] not in listed.text
    shown = next(key for key in listed.json()["data"] if key["id"] == created["id"])
    assert shown["redacted_value"] == f"sk-...{created['value'][-4:]}"
    assert (shown["scopes"], shown["expires_at"] - shown["created_at"]) == (["files:read"], 3600)
    assert shown["last_used_at"] >= shown["created_at"]


def test_a_rotated_key_and_a_revoked_one_open_nothing(admin: httpx2.Client, live: Live) -> None:
    old = admin.post(keys_of(live), json={"name": "ci"}).json()
    new = admin.post(f"{keys_of(live)}/{old['id']}/rotate").json()
    assert get(live, "/v1/models", old["value"]).status_code == 401
    assert get(live, "/v1/models", new["value"]).status_code == 200
    assert admin.delete(f"{keys_of(live)}/{new['id']}").json()["deleted"] is True
    assert get(live, "/v1/models", new["value"]).status_code == 401


@pytest.mark.parametrize(
    ("scope", "method", "path", "needed"),
    [
        ("jobs:read", "POST", "/v1/fine_tuning/jobs", "jobs:write"),
        ("jobs:read", "POST", "/v1/fine_tuning/jobs/ftjob-x/cancel", "jobs:write"),
        ("jobs:write", "GET", "/v1/fine_tuning/jobs", "jobs:read"),
        ("jobs:write", "GET", "/v1/fine_tuning/jobs/ftjob-x/events", "jobs:read"),
        ("jobs:*", "GET", "/v1/files", "files:read"),
        ("files:read", "DELETE", "/v1/files/file-x", "files:write"),
        ("files:*", "GET", "/v1/models", "models:read"),
        ("models:read", "DELETE", "/v1/models/ft:x", "models:write"),
        ("jobs:read", "POST", "/v1/secrets", "jobs:write"),
        ("jobs:*", "GET", "/v1/projects", "admin"),
        ("jobs:*", "POST", "/v1/nodes/a/drain", "admin"),
        ("admin", "GET", "/v1/fine_tuning/jobs", "jobs:read"),
    ],
)
def test_a_missing_scope_is_refused_by_name(live: Live, scope: str, method: str, path: str, needed: str) -> None:
    with db.write() as session:
        key = service.create_key(session, live.project_id, "a", scopes=[scope]).plaintext
    answer = httpx2.request(method, live.url + path, headers={"Authorization": f"Bearer {key}"})
    error = assert_envelope(answer, 403)
    assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
    assert f"`{needed}`" in error["message"]


def test_the_sdk_shows_the_missing_scope(live: Live) -> None:
    with db.write() as session:
        key = service.create_key(session, live.project_id, "a", scopes=["files:*"]).plaintext
    with OpenAI(base_url=f"{live.url}/v1", api_key=key) as sdk, pytest.raises(openai.PermissionDeniedError) as caught:
        sdk.fine_tuning.jobs.list()
    assert "`jobs:read`" in caught.value.message


def test_a_key_in_a_url_is_refused_and_not_repeated(live: Live) -> None:
    answer = httpx2.get(f"{live.url}/v1/models?api_key={live.api_key}", headers=live.headers)
    assert assert_envelope(answer, 401)["code"] == "api_key_in_url"
    assert live.api_key not in answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\x00"}, "name"),
        ({"name": "a", "scopes": []}, "scopes"),
        ({"name": "a", "scopes": ["jobs:delete"]}, "scopes"),
        ({"name": "a", "expires_in_s": 0}, "expires_in_s"),
    ],
)
def test_what_makes_no_key_is_named(admin: httpx2.Client, live: Live, body: dict[str, object], param: str) -> None:
    assert assert_envelope(admin.post(keys_of(live), json=body), 422)["param"] == param


def test_what_is_not_there_is_not_found(admin: httpx2.Client, live: Live) -> None:
    assert_envelope(admin.post("/v1/projects/proj_x/api_keys", json={"name": "a"}), 404)
    assert_envelope(admin.delete(f"{keys_of(live)}/key_x"), 404)
    assert_envelope(admin.post(f"{keys_of(live)}/key_x/rotate"), 404)


def test_two_projects_of_one_name_are_refused(admin: httpx2.Client, live: Live) -> None:
    body = {"name": f"twice {live.project_id}"}
    assert admin.post("/v1/projects", json=body).status_code == 200
    assert assert_envelope(admin.post("/v1/projects", json=body), 409)["param"] == "name"
