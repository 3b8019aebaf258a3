"""Previews over HTTP, and what becomes of a question whose node is lost."""

import json
from threading import Thread
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from sqlalchemy import update

from app import db
from app.previews import service as previews
from app.previews.tables import Preview

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
QUESTION: dict[str, Any] = {"model": "openai/gpt-oss-20b", "spec": {"data": {"max_length": 64}}}


@pytest.fixture
def file_id(client: OpenAI) -> str:
    return client.files.create(file=("train.jsonl", json.dumps(ROW).encode()), purpose="fine-tune").id


def answering(refusal: str) -> Thread:
    """A node that takes the next question and says why it has no answer."""

    def work() -> None:
        while (question := previews.claim_next()) is None:
            pass
        previews.fail(question.id, "model_not_found", refusal, "model")

    node = Thread(target=work)
    node.start()
    return node


def test_the_answer_comes_with_the_question_and_can_be_asked_for_again(http: httpx2.Client, file_id: str) -> None:
    node = answering("No such model.")
    answer = http.post(f"/v1/files/{file_id}/preview", json=QUESTION).raise_for_status().json()
    node.join()
    assert (answer["object"], answer["file_id"], answer["status"]) == ("file.preview", file_id, "failed")
    assert answer["error"] == {"code": "model_not_found", "message": "No such model.", "param": "model"}
    assert http.get(f"/v1/files/{file_id}/preview/{answer['id']}").json() == answer


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "no/such/model"}, 400, "model"),
        ({"spec": {"data": {"max_length": 1}}}, 422, "spec.data.max_length"),
        ({"lines": [0]}, 422, "lines[0]"),
        ({"lines": list(range(1, 30))}, 422, "lines"),
        ({"validation_file": "file-unknown"}, 400, "validation_file"),
        ({"validation_file": "hf://datasets/a/b"}, 422, "validation_file"),
        ({"rows": 5}, 422, "rows"),
    ],
)
def test_a_question_is_checked_as_a_job_is(
    http: httpx2.Client, file_id: str, change: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post(f"/v1/files/{file_id}/preview", json=QUESTION | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_other_projects_files_and_previews_are_not_there(other: OpenAI, http: httpx2.Client, file_id: str) -> None:
    theirs = other.files.create(file=("a.jsonl", json.dumps(ROW).encode()), purpose="fine-tune")
    assert http.post(f"/v1/files/{theirs.id}/preview", json=QUESTION).status_code == 404
    assert http.get(f"/v1/files/{file_id}/preview/preview-unknown").status_code == 404


def test_a_question_whose_node_was_lost_goes_to_another_one_and_has_an_answer_in_the_end(
    http: httpx2.Client, file_id: str
) -> None:
    node = answering("first")
    question = http.post(f"/v1/files/{file_id}/preview", json=QUESTION).json()["id"]
    node.join()
    with db.write() as session:
        session.execute(update(Preview).where(Preview.id == question).values(error=None, leased_until=1.0, tries=1))
    claimed = previews.claim_next()
    assert claimed is not None
    assert (claimed.id, claimed.tries) == (question, 2)
    assert previews.claim_next() is None  # the lease lasts
    with db.write() as session:
        session.execute(update(Preview).where(Preview.id == question).values(leased_until=1.0))
    assert previews.claim_next() is None
    assert http.get(f"/v1/files/{file_id}/preview/{question}").json()["error"]["code"] == "worker_lost"


def test_a_preview_goes_with_its_file(http: httpx2.Client, client: OpenAI, file_id: str) -> None:
    node = answering("gone")
    question = http.post(f"/v1/files/{file_id}/preview", json=QUESTION).json()["id"]
    node.join()
    client.files.delete(file_id)
    assert http.get(f"/v1/files/{file_id}/preview/{question}").status_code == 404
