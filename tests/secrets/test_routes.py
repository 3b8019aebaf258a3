"""Secrets: they go in, and only a job's own processes ever see them again."""

import httpx2
import pytest
from openai import OpenAI
from sqlalchemy import select, update

from app import db
from app.errors import NotFound
from app.secrets import service
from app.secrets.tables import Secret
from tests.conftest import Live, configured

VALUE = "hf_TESTTOKEN123"


@pytest.fixture
def stored(http: httpx2.Client) -> str:
    http.post("/v1/secrets", json={"name": "hub", "value": VALUE}).raise_for_status()
    return "hub"


def test_no_answer_holds_the_value(http: httpx2.Client, stored: str) -> None:
    answers = [
        http.post("/v1/secrets", json={"name": stored, "value": VALUE}),
        http.get("/v1/secrets"),
        http.delete(f"/v1/secrets/{stored}"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [VALUE in answer.text for answer in answers] == [False, False, False]
    assert [secret["name"] for secret in answers[1].json()["data"]] == ["hub"]


@pytest.mark.parametrize("value", ["short", "with space inside", "line\nbreak_inside", "schlüssel-mit-ü", "x" * 5000])
def test_a_value_that_could_not_be_redacted_is_refused_without_an_echo(http: httpx2.Client, value: str) -> None:
    answer = http.post("/v1/secrets", json={"name": "hub", "value": value})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "value"
    assert value not in answer.text


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "x" * 65])
def test_a_name_that_no_spec_could_use_is_refused(http: httpx2.Client, name: str) -> None:
    assert http.post("/v1/secrets", json={"name": name, "value": VALUE}).status_code == 422


def test_the_database_does_not_hold_the_value(live: Live, stored: str) -> None:
    with db.read() as connection:
        (ciphertext,) = connection.execute(select(Secret.ciphertext).where(Secret.project_id == live.project_id)).scalars()
        assert VALUE.encode() not in ciphertext
        assert service.reveal(connection, live.project_id, {"HF_TOKEN": stored}) == {"HF_TOKEN": VALUE}


def test_a_replaced_value_is_the_new_one(http: httpx2.Client, live: Live, stored: str) -> None:
    http.post("/v1/secrets", json={"name": stored, "value": VALUE + "456"}).raise_for_status()
    with db.read() as connection:
        assert service.reveal(connection, live.project_id, {"HF_TOKEN": stored}) == {"HF_TOKEN": VALUE + "456"}


def test_a_value_moved_to_another_name_cannot_be_read(live: Live, stored: str) -> None:
    with db.write() as session:
        session.execute(update(Secret).where(Secret.project_id == live.project_id).values(name="other"))
    with db.read() as connection, pytest.raises(NotFound, match="create it again"):
        service.reveal(connection, live.project_id, {"HF_TOKEN": "other"})


def test_another_key_cannot_read_it(live: Live, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in configured(monkeypatch, {"TUNEYARD_SECRETS_KEY": "A" * 43 + "="}, None):
        with db.read() as connection, pytest.raises(NotFound, match="another TUNEYARD_SECRETS_KEY"):
            service.reveal(connection, live.project_id, {"HF_TOKEN": stored})


def test_another_projects_secret_is_not_there(live: Live, other: OpenAI, stored: str) -> None:
    headers = dict(other.auth_headers)
    assert httpx2.get(f"{live.url}/v1/secrets", headers=headers).json()["data"] == []
    assert httpx2.delete(f"{live.url}/v1/secrets/{stored}", headers=headers).status_code == 404


class TestSecretsOfAJob:
    def create(self, http: httpx2.Client, secrets: dict[str, str]) -> httpx2.Response:
        spec = {"secrets": secrets}
        body = {"model": "openai/gpt-oss-20b", "training_file": "hf://datasets/a/b", "spec": spec}
        return http.post("/v1/fine_tuning/jobs", json=body)

    def test_a_job_names_a_secret_and_shows_no_more_than_the_name(self, http: httpx2.Client, stored: str) -> None:
        answer = self.create(http, {"HF_TOKEN": stored})
        assert answer.json()["spec"]["secrets"] == {"HF_TOKEN": "hub"}
        assert VALUE not in answer.text

    def test_a_name_without_a_secret_is_refused(self, http: httpx2.Client) -> None:
        error = self.create(http, {"HF_TOKEN": "nothing"}).json()["error"]
        assert (error["code"], error["param"]) == ("secret_not_found", "spec.secrets")

    @pytest.mark.parametrize("variable", ["LD_PRELOAD", "PYTHONPATH", "TUNEYARD_SECRETS_KEY", "hf_token", "PATH"])
    def test_a_variable_that_is_no_credential_is_refused(self, http: httpx2.Client, stored: str, variable: str) -> None:
        assert self.create(http, {variable: stored}).status_code == 422
