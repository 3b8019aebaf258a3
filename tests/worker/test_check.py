"""A job's rows are checked for its model and spec before it takes GPUs."""

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from app import db
from app.files import service as files
from app.jobs import service as jobs
from app.jobs import validating
from app.jobs.schemas import JobCreate
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Event, Job
from app.keys import service as keys
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from tests import factories, tiny
from tests.conftest import CASES
from worker import check as checker

GPU = {"uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 80 << 30}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        nodes.register(session, NodeReport("gpu-node", "10.0.0.1", "gpu", 1, [GPU], {}))
        return keys.create_project(session, "test").id


def upload(project_id: str, name: str) -> str:
    with (CASES / name).open("rb") as stream:
        return files.create_file(project_id, stream, name, "fine-tune").id


def create(project_id: str, **resources: Any) -> str:
    """A job on a good file that has been read."""
    file_id = upload(project_id, "A01a_bom_crlf.jsonl")
    factories.read_uploads()
    body = {"model": "openai/gpt-oss-20b", "training_file": file_id, "spec": {"resources": resources}}
    with db.write() as session:
        return jobs.create_job(session, project_id, JobCreate.model_validate(body)).id


def job(job_id: str) -> Job:
    with db.write() as session:
        return session.get_one(Job, job_id)


def lose_node() -> None:
    with db.write() as session:
        session.execute(update(Job).values(check_until=1.0))


class TestWaiting:
    def test_a_job_that_would_take_gpus_waits_for_its_check(self, project_id: str) -> None:
        job_id = create(project_id)
        assert job(job_id).status == "validating_files"
        validating.settle_all()
        claimed = validating.claim_check()
        assert claimed is not None
        assert claimed.id == job_id
        validating.settle_all()
        assert validating.claim_check() is None  # a node is at it
        validating.pass_check(job_id)
        assert job(job_id).status == "queued"

    def test_a_job_that_cannot_learn_fails_with_the_report(self, project_id: str) -> None:
        job_id = create(project_id)
        error = {"code": "invalid_training_file", "message": "line 3: \0", "param": "training_file"}
        validating.fail_check(job_id, error, {"rows_read": 4})
        failed = job(job_id)
        assert (failed.status, failed.error) == ("failed", error | {"message": "line 3: \ufffd"})
        with db.read() as connection:
            (data,) = connection.execute(select(Event.data).where(Event.job_id == job_id, Event.level == "error")).scalars()
        assert data["report"] == {"rows_read": 4}

    def test_a_check_that_no_node_finishes_does_not_hold_the_job_up(self, project_id: str) -> None:
        job_id = create(project_id)
        for _ in range(validating.MAX_TRIES):
            validating.settle_all()
            assert validating.claim_check() is not None
            lose_node()
        validating.settle_all()
        assert job(job_id).status == "queued"

    def test_a_node_that_stops_leaves_the_check_to_another(self, project_id: str) -> None:
        job_id = create(project_id)
        for _ in range(validating.MAX_TRIES + 1):
            validating.settle_all()
            assert validating.claim_check() is not None
            validating.give_back_check(job_id)
        assert job(job_id).status == "validating_files"

    def test_what_its_user_did_meanwhile_stands(self, project_id: str) -> None:
        job_id = create(project_id)
        jobs.cancel_job(project_id, job_id)
        validating.pass_check(job_id)
        validating.fail_check(job_id, {"code": "x", "message": "y", "param": None})
        assert job(job_id).status == "cancelled"

    def test_a_job_that_takes_no_gpus_is_queued_at_once(self, project_id: str) -> None:
        with db.write() as session:
            nodes.register(session, NodeReport("cpu-node", "10.0.0.2", "cpu", 1, [], {}))
        assert job(create(project_id, accelerator="cpu")).status == "queued"


@pytest.mark.slow
def test_the_process_that_checks_ends_a_job_that_cannot_learn(project_id: str, model: Path) -> None:
    spec = TrainingSpec.model_validate({"data": {"max_length": 512}, "model": {"name_or_path": str(model)}})
    waiting = {"status": "validating_files", "accelerator": "gpu", "check_until": 0.0, "spec": spec.model_dump(mode="json")}
    file_id = upload(project_id, "A09b_prompt_over_max_one.jsonl")
    job_id = factories.create_job(project_id, training_file=file_id, **waiting)
    claimed = validating.claim_check()
    assert claimed is not None
    checker.run(claimed, threading.Event())
    failed = job(job_id)
    assert failed.error is not None
    assert (failed.status, failed.error["code"]) == ("failed", "invalid_training_file")


class TestVerdict:
    def verdict(self, project_id: str, model: Path, name: str, on_bad_rows: str = "refuse", **spec: Any) -> Any:
        data = {"max_length": 2048, "on_bad_rows": on_bad_rows}  # the model reads 512
        resolved = TrainingSpec.model_validate({"model": {"name_or_path": str(model)}, "data": data, **spec})
        return checker.check(project_id, upload(project_id, name), "training_file", resolved)

    def test_good_rows_pass(self, project_id: str, model: Path) -> None:
        assert self.verdict(project_id, model, "A01a_bom_crlf.jsonl") is None

    def test_every_row_that_teaches_nothing_is_named(self, project_id: str, model: Path) -> None:
        error, report = self.verdict(project_id, model, "A09b_prompt_over_max_one.jsonl")
        assert (error["code"], error["param"]) == ("invalid_training_file", "training_file")
        assert "data.max_length 512" in error["message"]
        assert (report["rows_read"], report["rows_used"], [found["line"] for found in report["errors"]]) == (4, 3, [3])

    def test_unreadable_rows_are_in_the_same_report(self, project_id: str, model: Path) -> None:
        _, report = self.verdict(project_id, model, "A09a_no_answer.jsonl")
        assert [found["line"] for found in report["errors"]] == [2, 3]

    def test_a_job_that_skips_passes_while_a_row_is_left(self, project_id: str, model: Path) -> None:
        assert self.verdict(project_id, model, "A09b_prompt_over_max_one.jsonl", "skip") is None
        error, _ = self.verdict(project_id, model, "A09c_prompt_over_max_all.jsonl", "skip")
        assert error["code"] == "dataset_no_trainable_rows"

    def test_rows_of_another_method_are_refused(self, project_id: str, model: Path) -> None:
        error, _ = self.verdict(project_id, model, "A01a_bom_crlf.jsonl", method="cpt")
        assert "wrong_row_format" in error["message"]
