"""What holds for every route: the error envelope, the request id, keys, health."""

import errno
from collections.abc import Iterator
from typing import Any

import anyio
import httpx2
import openai
import pytest
from openai import OpenAI
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from app import auth
from app.main import create_app
from tests import factories
from tests.conftest import Live, configured

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def in_process(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """The application in this process, with nothing behind it that answers."""
    environment = {
        "TUNEYARD_DATABASE_URL": f"postgresql://postgres@/nowhere?host={tmp_path}",
        "TUNEYARD_BROKER_URL": f"redis+socket://{tmp_path}/nowhere.sock",
    }
    for _ in configured(monkeypatch, environment, None):
        app = create_app()

        @app.get("/broken")
        def broken() -> None:
            raise RuntimeError("a secret of the service")

        @app.get("/full")
        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        @app.get("/database-full")
        def database_full() -> None:
            raise OperationalError("INSERT", {}, Exception("database or disk is full"))

        @app.get("/unreadable")
        def unreadable() -> None:
            raise PermissionError("a secret of the service")

        yield TestClient(app, raise_server_exceptions=False)


def assert_envelope(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """Every refusal has the four keys, a message that says something, and a request id."""
    assert answer.status_code == status
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    assert error["type"]
    assert answer.headers["x-request-id"].startswith("req_")
    return error


class TestErrors:
    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "param"),
        [
            ("GET", "/v1/nothing", None, 404, None),
            ("GET", "/", None, 404, None),
            ("PUT", JOBS, None, 405, None),
            ("DELETE", f"{JOBS}/ftjob-x", None, 405, None),
            ("GET", f"{JOBS}/ftjob-x", None, 404, "fine_tuning_job_id"),
            ("GET", f"{JOBS}/ftjob-x/events", None, 404, "fine_tuning_job_id"),
            ("POST", f"{JOBS}/ftjob-x/cancel", None, 404, "fine_tuning_job_id"),
            ("GET", f"{JOBS}?limit=many", None, 422, "limit"),
            ("GET", f"{JOBS}?limit=0", None, 422, "limit"),
            ("GET", f"{JOBS}?after=ftjob-x", None, 400, "after"),
            ("POST", JOBS, "{", 400, None),
            ("POST", JOBS, b"\xff\xfe", 400, None),
            ("POST", JOBS, "[]", 422, None),
            ("POST", JOBS, "", 422, None),
            ("POST", JOBS, "{}", 422, "model"),
            ("POST", JOBS, '{"model": 5, "training_file": "x"}', 422, "model"),
            ("GET", f"{JOBS}/a%00b", None, (400, 404), None),
            ("GET", "/v1/files/a%00b", None, (400, 404), None),
            ("GET", "/v1/models/a%00b", None, (400, 404), None),
        ],
    )
    def test_every_refusal_has_the_envelope(
        self, http: httpx2.Client, method: str, path: str, body: Any, status: Any, param: str | None
    ) -> None:
        answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
        if isinstance(status, tuple):
            assert answer.status_code in status
            assert_envelope(answer, answer.status_code)
        else:
            assert assert_envelope(answer, status)["param"] == param

    def test_a_wrong_method_says_which_are_right(self, http: httpx2.Client) -> None:
        assert http.put(f"{JOBS}/ftjob-x").headers["allow"] == "GET"

    def test_a_body_over_the_limit_is_refused(self, http: httpx2.Client) -> None:
        body = b" " * (auth.MAX_BODY_BYTES + 1)
        assert_envelope(http.post(JOBS, content=body, headers={"Content-Type": "application/json"}), 413)

    def test_a_body_over_the_limit_is_refused_without_a_declared_length(self, http: httpx2.Client) -> None:
        blocks = (bytes(1 << 20) for _ in range(9))
        assert_envelope(http.post(JOBS, content=blocks, headers={"Content-Type": "application/json"}), 413)

    def test_a_body_that_is_not_declared_json_is_refused(self, http: httpx2.Client) -> None:
        answer = http.post(JOBS, content='{"model": "a/b", "training_file": "x"}', headers={"Content-Type": "text/plain"})
        assert "application/json" in assert_envelope(answer, 422)["message"]

    def test_a_failure_nobody_foresaw_shows_no_trace(self, in_process: TestClient) -> None:
        answer = in_process.get("/broken")
        error = assert_envelope(answer, 500)
        assert error["code"] == "internal_error"
        assert answer.headers["x-request-id"] in error["message"]
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text

    def test_a_full_disk_is_said_in_words_and_not_tried_again(self, in_process: TestClient) -> None:
        for path in ("/full", "/database-full"):
            answer = in_process.get(path)
            assert assert_envelope(answer, 507)["code"] == "disk_full"
            assert answer.headers["x-should-retry"] == "false"
        assert assert_envelope(in_process.get("/unreadable"), 500)["code"] == "internal_error"

    def test_a_database_out_of_reach_is_503_and_worth_another_try(self, in_process: TestClient) -> None:
        answer = in_process.get(JOBS, headers={"Authorization": "Bearer sk-any"})
        assert_envelope(answer, 503)
        assert answer.headers["retry-after"]

    def test_the_sdk_shows_message_code_and_request_id(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.fine_tuning.jobs.retrieve("ftjob-unknown")
        assert "ftjob-unknown" in caught.value.message
        assert caught.value.code == "job_not_found"
        assert caught.value.request_id is not None
        assert caught.value.request_id.startswith("req_")


class TestRequestIds:
    def test_every_answer_has_one_of_its_own(self, client: OpenAI, http: httpx2.Client) -> None:
        ids = {http.get("/healthz", headers={"x-request-id": "mine"}).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        assert "mine" not in ids
        page = client.models.list()
        assert ((page.to_dict() and page._request_id) or "").startswith("req_")


class TestKeys:
    @pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer"}, {"Authorization": "Basic YTpi"}])
    def test_a_call_without_a_key_is_refused(self, live: Live, header: dict[str, str]) -> None:
        answer = httpx2.get(live.url + JOBS, headers=header)
        assert assert_envelope(answer, 401)["code"] == "missing_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"

    def test_an_unknown_key_is_refused(self, live: Live) -> None:
        with OpenAI(base_url=f"{live.url}/v1", api_key="sk-ty-unknown") as sdk, pytest.raises(openai.AuthenticationError):
            sdk.models.list()

    def test_a_key_comes_before_the_body(self, live: Live) -> None:
        assert_envelope(httpx2.post(live.url + JOBS, content="{"), 401)
        assert_envelope(httpx2.post(f"{live.url}/v1/files", files={"file": ("a", b"x")}), 401)

    def test_headers_that_name_the_keys_own_project_are_accepted(self, live: Live) -> None:
        names = {"organization": "org-tuneyard", "project": live.project_id}
        with OpenAI(base_url=f"{live.url}/v1", api_key=live.api_key, **names) as sdk:  # type: ignore[arg-type]
            assert sdk.models.list().data

    @pytest.mark.parametrize("names", [{"organization": "org-other"}, {"project": "proj_other"}])
    def test_headers_that_name_another_are_refused(self, live: Live, names: dict[str, Any]) -> None:
        sdk = OpenAI(base_url=f"{live.url}/v1", api_key=live.api_key, **names)
        with sdk, pytest.raises(openai.AuthenticationError) as caught:
            sdk.models.list()
        assert next(iter(names)) in (caught.value.code or "")


class TestCrowds:
    @pytest.mark.anyio
    async def test_many_more_calls_at_once_than_connections_are_all_answered(self, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        limits = httpx2.Limits(max_connections=150)
        async with httpx2.AsyncClient(base_url=live.url, headers=live.headers, limits=limits, timeout=60) as http:
            paths = [f"{JOBS}/{job_id}/events", JOBS, "/v1/files"] * 50
            answers: list[int] = []

            async def ask(path: str) -> None:
                answers.append((await http.get(path)).status_code)

            async with anyio.create_task_group() as tasks:
                for path in paths:
                    tasks.start_soon(ask, path)
        assert answers == [200] * len(paths)


class TestHealth:
    def test_a_running_service_is_healthy_and_ready(self, live: Live) -> None:
        for path in ("/healthz", "/readyz"):
            assert httpx2.get(live.url + path).json() == {"status": "ok"}

    def test_without_database_and_broker_it_is_healthy_but_not_ready(self, in_process: TestClient) -> None:
        assert in_process.get("/healthz").status_code == 200
        answer = in_process.get("/readyz")
        message = assert_envelope(answer, 503)["message"]
        assert "database" in message
        assert "broker" in message


class TestOpenApi:
    def test_the_page_names_every_operation_once(self, http: httpx2.Client) -> None:
        document = http.get("/openapi.json").json()
        operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
        assert len(operations) == len(set(operations))
        assert document["info"]["title"] == "Tuneyard"

    def test_errors_are_described_as_they_are(self, http: httpx2.Client) -> None:
        document = http.get("/openapi.json").json()
        assert "HTTPValidationError" not in document["components"]["schemas"]
        assert "4XX" in document["paths"]["/v1/files"]["post"]["responses"]

    def test_every_field_of_a_spec_is_described(self, http: httpx2.Client) -> None:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        sections = [schema for name, schema in schemas.items() if name.endswith("Section")]
        assert sections
        assert all(field.get("description") for section in sections for field in section["properties"].values())
