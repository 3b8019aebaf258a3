"""Files, as the official SDK uses them."""

import json
import socket

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from app import storage
from tests import factories
from tests.conftest import CASES, Live

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
DATA = (json.dumps(ROW) + "\n").encode()
HOSTILE_NAMES = json.loads((CASES / "C13a_hostile_names.json").read_text())["upload_file_names"]
EXPECTED = {case["file"]: case for case in json.loads((CASES / "expected.json").read_text())["cases"]}


class TestCreateFile:
    def test_training_data_is_stored_and_waits_to_be_read(self, client: OpenAI) -> None:
        file = client.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
        assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "train.jsonl", len(DATA), "fine-tune")
        assert (file.status, file.status_details, file.expires_at) == ("uploaded", None, None)
        assert isinstance(file.created_at, int)
        factories.read_uploads()
        assert client.files.wait_for_processing(file.id).status == "processed"

    def test_bare_bytes_are_accepted(self, client: OpenAI) -> None:
        assert client.files.create(file=DATA, purpose="fine-tune").filename == "upload"

    @pytest.mark.anyio
    async def test_the_asynchronous_client_uploads_and_downloads(self, async_client: AsyncOpenAI) -> None:
        file = await async_client.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
        assert (await async_client.files.content(file.id)).content == DATA

    @pytest.mark.parametrize(
        "name", [name for name, case in EXPECTED.items() if "options" not in case and "choices" not in case]
    )
    def test_the_status_says_whether_data_can_be_trained_on(self, client: OpenAI, name: str) -> None:
        file = client.files.create(file=CASES / name, purpose="fine-tune")
        factories.read_uploads()
        file = client.files.retrieve(file.id)
        refused = EXPECTED[name]["outcome"] == "refuse"
        assert file.status == ("error" if refused else "processed")
        for line in EXPECTED[name].get("lines", []):
            assert f"line {line}" in (file.status_details or "")

    def test_the_report_names_every_error_and_what_surprises(self, client: OpenAI, http: httpx2.Client) -> None:
        bad = client.files.create(file=("a.jsonl", DATA + b'{"text": 5}\n' + b"{\n"), purpose="fine-tune")
        answer = http.get(f"/v1/files/{bad.id}/validation")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "validation_not_finished")
        factories.read_uploads()
        report = http.get(f"/v1/files/{bad.id}/validation").raise_for_status().json()
        assert (report["rows_read"], report["rows_used"], report["num_errors"]) == (3, 1, 2)
        assert [(error["line"], error["byte_offset"]) for error in report["errors"]] == [(2, len(DATA)), (3, len(DATA) + 12)]
        assert all(error["fix"] for error in report["errors"])
        flip = client.files.create(file=CASES / "A05a_metadata_type_flip.jsonl", purpose="fine-tune")
        factories.read_uploads()
        report = http.get(f"/v1/files/{flip.id}/validation").raise_for_status().json()
        warned = [(warning["code"], warning["path"]) for warning in report["warnings"]]
        assert ("mixed_type_column", "metadata.title") in warned

    def test_only_training_data_has_a_report(self, client: OpenAI, other: OpenAI, http: httpx2.Client) -> None:
        file = client.files.create(file=("notes.bin", b"\x00"), purpose="user_data")
        answer = http.get(f"/v1/files/{file.id}/validation")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_training_data")
        theirs = other.files.create(file=("a.jsonl", DATA), purpose="fine-tune")
        assert http.get(f"/v1/files/{theirs.id}/validation").status_code == 404

    def test_data_for_other_purposes_is_not_read(self, client: OpenAI) -> None:
        assert client.files.create(file=("notes.bin", b"\x00\xff"), purpose="user_data").status == "processed"

    def test_an_expiry_is_kept(self, client: OpenAI) -> None:
        expiry = openai.types.file_create_params.ExpiresAfter(anchor="created_at", seconds=3600)
        file = client.files.create(file=("a.jsonl", DATA), purpose="fine-tune", expires_after=expiry)
        assert file.expires_at is not None
        assert file.expires_at - file.created_at in (3599, 3600, 3601)

    def test_an_expiry_out_of_bounds_names_its_field(self, http: httpx2.Client) -> None:
        form = {"purpose": "fine-tune", "expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}
        answer = http.post("/v1/files", data=form, files={"file": ("a.jsonl", DATA)})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "expires_after[seconds]"

    def test_any_unicode_name_survives(self, client: OpenAI) -> None:
        name = 'données-訓練 🚀 "v1".jsonl'
        file = client.files.create(file=(name, DATA), purpose="fine-tune")
        assert file.filename == name
        assert client.files.retrieve(file.id).filename == name
        disposition = client.files.content(file.id).response.headers["content-disposition"]
        assert "filename*=UTF-8''donn%C3%A9es-%E8%A8%93%E7%B7%B4%20%F0%9F%9A%80%20%22v1%22.jsonl" in disposition
        assert 'filename="donnees-' in disposition

    @pytest.mark.parametrize("name", [*HOSTILE_NAMES, "a\r\nb.jsonl", "..", "x/y"])
    def test_names_that_could_lead_astray_are_refused_and_nothing_is_stored(
        self, client: OpenAI, live: Live, name: str
    ) -> None:
        before = storage.keys("")
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)) as caught:
            client.files.create(file=(name, DATA), purpose="fine-tune")
        assert caught.value.param == "file"
        assert storage.keys("") == before
        assert list(client.files.list()) == []

    def test_an_unknown_purpose_is_refused(self, client: OpenAI) -> None:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.files.create(file=("a.jsonl", DATA), purpose="assistants")
        assert caught.value.param == "purpose"

    def test_a_request_without_a_file_is_refused(self, http: httpx2.Client) -> None:
        answer = http.post("/v1/files", data={"purpose": "fine-tune"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "file")

    @pytest.mark.parametrize("surplus", [1, 1024**2])
    def test_a_file_over_the_limit_is_refused(self, http: httpx2.Client, surplus: int) -> None:
        before = storage.keys("")
        content = bytes(16 * 1024**2 + surplus)
        answer = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("big.bin", content)})
        assert answer.status_code == 413
        assert answer.json()["error"]["message"]
        assert storage.keys("") == before

    def test_an_upload_that_breaks_off_leaves_nothing_and_works_the_second_time(self, client: OpenAI, live: Live) -> None:
        before = storage.keys("")
        head = "--b\r\nContent-Disposition: form-data; name=file; filename=a.bin\r\n\r\n"
        with socket.create_connection((httpx2.URL(live.url).host, httpx2.URL(live.url).port or 80)) as connection:
            request = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {live.api_key}\r\n"
            request += "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 8000000\r\n\r\n"
            connection.sendall((request + head).encode() + bytes(4_000_000))
        assert list(client.files.list()) == []
        assert storage.keys("") == before
        file = client.files.create(file=("a.bin", bytes(8_000_000)), purpose="user_data")
        assert [listed.id for listed in client.files.list()] == [file.id]


class TestListFiles:
    def test_pages_follow_each_other_without_gap_or_repetition(self, client: OpenAI) -> None:
        made = [client.files.create(file=(f"{number}.jsonl", DATA), purpose="fine-tune").id for number in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made

    def test_a_page_says_whether_more_follows(self, client: OpenAI) -> None:
        made = [client.files.create(file=(f"{number}.jsonl", DATA), purpose="fine-tune").id for number in range(2)]
        page = client.files.list(limit=1)
        assert page.has_more is True
        assert (page.model_extra or {})["last_id"] == made[1]
        assert client.files.list(limit=2).has_more is False

    def test_only_the_purpose_asked_for(self, client: OpenAI) -> None:
        client.files.create(file=("a.jsonl", DATA), purpose="fine-tune")
        wanted = client.files.create(file=("b.txt", b"x"), purpose="user_data")
        assert [file.id for file in client.files.list(purpose="user_data")] == [wanted.id]

    def test_an_unknown_cursor_is_refused(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.list(after="file-unknown")
        assert caught.value.param == "after"

    @pytest.mark.parametrize("limit", [0, 10_001])
    def test_limits_out_of_bounds_are_refused(self, client: OpenAI, limit: int) -> None:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.files.list(limit=limit)
        assert caught.value.param == "limit"

    def test_an_empty_list_has_no_ids(self, http: httpx2.Client) -> None:
        assert http.get("/v1/files").json() == {
            "object": "list",
            "data": [],
            "has_more": False,
            "first_id": None,
            "last_id": None,
        }


class TestReadFile:
    def test_content_comes_back_byte_for_byte(self, client: OpenAI) -> None:
        content = bytes(range(256)) * 9000  # more than two blocks
        file = client.files.create(file=("all.bin", content), purpose="user_data")
        assert client.files.content(file.id).content == content

    def test_a_part_can_be_asked_for(self, client: OpenAI, http: httpx2.Client) -> None:
        file = client.files.create(file=("a.txt", b"0123456789"), purpose="user_data")
        answer = http.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=2-4"})
        assert (answer.status_code, answer.content, answer.headers["content-range"]) == (206, b"234", "bytes 2-4/10")

    def test_unknown_and_foreign_files_look_the_same(self, client: OpenAI, live: Live, other: OpenAI) -> None:
        foreign = other.files.create(file=("a.jsonl", DATA), purpose="fine-tune")
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            texts = set()
            for file_id in (foreign.id, "file-unknown"):
                with pytest.raises(openai.NotFoundError) as caught:
                    call(file_id)
                texts.add(caught.value.message.replace(file_id, "ID"))
            assert len(texts) == 1


class TestDeleteFile:
    def test_row_and_bytes_are_gone(self, client: OpenAI, live: Live) -> None:
        file = client.files.create(file=("a.jsonl", DATA), purpose="fine-tune")
        deleted = client.files.delete(file.id)
        assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
        assert f"files/{file.id}" not in storage.keys("")
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)

    def test_a_file_that_a_live_job_needs_is_kept_and_the_call_is_not_repeated(self, client: OpenAI, live: Live) -> None:
        file = client.files.create(file=("a.jsonl", DATA), purpose="fine-tune")
        job_id = factories.create_job(live.project_id, training_file=file.id)
        with pytest.raises(openai.ConflictError) as caught:
            client.files.delete(file.id)
        assert job_id in caught.value.message
        assert caught.value.response.headers["x-should-retry"] == "false"
        factories.update_job(job_id, status="failed")
        assert client.files.delete(file.id).deleted
