"""POST /v1/fine_tuning/jobs/{id}/rerun: the same again, or a clear refusal."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from app.errors import Conflict
from app.files import dataset
from app.jobs import reruns
from tests import factories
from tests.conftest import Live, configured

JOBS = "/v1/fine_tuning/jobs"
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture
def ended(client: OpenAI) -> str:
    """A failed job on an uploaded file."""
    file = client.files.create(file=("train.jsonl", json.dumps(ROW).encode()), purpose="fine-tune")
    factories.read_uploads()
    fields: dict[str, Any] = {"suffix": "mine", "metadata": {"team": "x"}, "seed": 7}
    spec = {"training": {"learning_rate": 0.001}, "data": {"template_date": "2026-01-02"}}
    job = client.fine_tuning.jobs.create(model="openai/gpt-oss-20b", training_file=file.id, extra_body={"spec": spec}, **fields)
    factories.update_job(job.id, status="failed", attempt=3, step=5, data_sha256={"training": "abc"})
    return job.id


def test_the_new_job_asks_for_the_same_and_starts_afresh(http: httpx2.Client, ended: str) -> None:
    first = http.get(f"{JOBS}/{ended}").json()
    again = http.post(f"{JOBS}/{ended}/rerun").raise_for_status().json()
    same = ("model", "training_file", "validation_file", "seed", "spec", "method", "suffix", "metadata", "integrations")
    assert {name: again[name] for name in same} == {name: first[name] for name in same}
    assert again["id"] != ended
    assert again["rerun_of"] == ended
    assert (again["status"], again["attempt"], again["progress"]["step"]) == ("queued", 0, None)
    events = http.get(f"{JOBS}/{again['id']}/events").json()["data"]
    assert [event["message"] for event in events] == [f"Created fine-tuning job: {again['id']}, which repeats {ended}"]


def test_the_commit_of_the_first_run_is_pinned(http: httpx2.Client, ended: str) -> None:
    factories.add_artifact(ended, "manifest.json", json.dumps({"base": {"revision": "c0ffee"}}).encode())
    again = http.post(f"{JOBS}/{ended}/rerun").raise_for_status().json()
    assert again["spec"]["model"]["revision"] == "c0ffee"


def test_a_job_that_has_not_ended_is_refused(http: httpx2.Client, ended: str) -> None:
    factories.update_job(ended, status="running")
    _assert_conflict(http.post(f"{JOBS}/{ended}/rerun"), "job_not_ended", "running")


def test_a_file_that_is_gone_is_refused(http: httpx2.Client, client: OpenAI, ended: str) -> None:
    client.files.delete(http.get(f"{JOBS}/{ended}").json()["training_file"])
    _assert_conflict(http.post(f"{JOBS}/{ended}/rerun"), "training_data_gone", "training_file is gone")


def test_another_projects_job_is_not_there(other: OpenAI, ended: str) -> None:
    answer = other.with_options(max_retries=0)._client.post(
        f"{str(other.base_url).rstrip('/')}/fine_tuning/jobs/{ended}/rerun", headers=other.auth_headers
    )
    assert answer.status_code == 404


class TestRowsOnDisk:
    @pytest.fixture
    def rows(self, tmp_path: Path, live: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROW) + "\n")
        for _ in configured(monkeypatch, {"TUNEYARD_DATA_ROOTS": json.dumps([str(tmp_path)])}, None):
            yield path

    def job(self, live: Live, rows: Path) -> str:
        sha256 = dataset.canonical_hash(rows, rows.name)
        return factories.create_job(
            live.project_id, status="failed", training_file=f"file://{rows}", data_sha256={"training": sha256}
        )

    def test_rows_that_changed_are_refused(self, live: Live, rows: Path) -> None:
        job_id = self.job(live, rows)
        rows.write_text(json.dumps(ROW).replace("Hello", "Hullo") + "\n")
        with pytest.raises(Conflict, match="rows of its training_file have changed"):
            reruns.rerun_job(live.project_id, job_id)

    def test_another_spelling_of_the_same_rows_is_not_a_change(self, live: Live, rows: Path) -> None:
        job_id = self.job(live, rows)
        rows.write_text("\ufeff" + json.dumps(ROW, indent=None, separators=(",", ":")) + "\r\n\r\n")
        assert reruns.rerun_job(live.project_id, job_id) != job_id


def _assert_conflict(answer: httpx2.Response, code: str, said: str) -> None:
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == code
    assert said in answer.json()["error"]["message"]
