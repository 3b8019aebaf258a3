"""What reaches the trainer of a job's rows, and what the job says of the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from app import db
from app.files import service as files
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Event, Job
from app.keys import service as keys
from tests import factories
from tests.conftest import CASES, configured
from worker.failures import JobFailed
from worker.heartbeat import Heartbeat
from worker.prepare import prepare_workspace
from worker.workspace import Run, Workspace, lines_of

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture
def workspace(database: str, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def prepare(workspace: Workspace, project_id: str, source: str | Path, on_bad_rows: str = "refuse", **spec: Any) -> Job:
    """The job of an uploaded file or another source, as it stands when its workspace is ready."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            source = files.create_file(project_id, stream, source.name, "fine-tune").id
    resolved = TrainingSpec.model_validate({"data": {"on_bad_rows": on_bad_rows}, **spec})
    values = {"status": "running", "attempt": 1, "training_file": source, "spec": resolved.model_dump(mode="json")}
    run = Run(factories.create_job(project_id, **values), 1)
    with db.write() as session:
        job = session.get_one(Job, run.job_id)
        session.expunge(job)
    prepare_workspace(workspace, run, job, resolved, Heartbeat(run, workspace))
    with db.write() as session:
        job = session.get_one(Job, run.job_id)
        session.expunge(job)
    return job


def told(job: Job) -> list[tuple[str, str]]:
    with db.write() as session:
        rows = session.query(Event).where(Event.job_id == job.id).order_by(Event.seq)
        return [(event.level, event.message) for event in rows]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_skipped_rows_are_counted_on_the_job_and_told_with_their_lines(workspace: Workspace, project_id: str) -> None:
    job = prepare(workspace, project_id, CASES / "A09a_no_answer.jsonl", "skip")
    assert job.data_rows == {
        "training": {
            "rows_read": 5,
            "rows_used": 3,
            "rows_skipped": 2,
            "skipped_by_reason": {"last_turn_not_assistant": 1, "no_assistant_turn": 1},
        }
    }
    (_, (level, message)) = told(job)
    assert level == "warn"
    assert "line 2" in message
    assert "line 3" in message
    assert len(workspace.train_data.read_text().splitlines()) == 3


def test_the_first_bad_row_refuses_the_data_unless_the_job_skips(workspace: Workspace, project_id: str) -> None:
    with pytest.raises(JobFailed, match=r"line 2.*last_turn_not_assistant") as caught:
        prepare(workspace, project_id, CASES / "A09a_no_answer.jsonl")
    assert (caught.value.code, caught.value.param) == ("invalid_training_file", "training_file")


@pytest.mark.parametrize("bad", ['{"text": ""}', "{", '{"text": 5}'])
def test_data_of_which_nothing_is_left_is_refused_though_the_job_skips(
    workspace: Workspace, project_id: str, tmp_path: Path, bad: str
) -> None:
    with pytest.raises(JobFailed, match="line 1") as caught:
        prepare(workspace, project_id, write(tmp_path / "a.jsonl", bad, bad), "skip")
    assert caught.value.code == "dataset_no_trainable_rows"


def test_a_file_that_is_bad_as_a_whole_is_never_skipped(workspace: Workspace, project_id: str, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(JobFailed, match="archive_broken"):
        prepare(workspace, project_id, tmp_path / "a.zip", "skip")


def test_a_row_of_another_methods_kind_is_a_bad_row(workspace: Workspace, project_id: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(JobFailed, match=r"line 1.*wrong_row_format"):
        prepare(workspace, project_id, path, method="cpt")


def test_the_trainer_knows_on_which_line_of_the_users_file_each_row_stood(
    workspace: Workspace, project_id: str, tmp_path: Path
) -> None:
    prepare(workspace, project_id, write(tmp_path / "a.jsonl", "", GOOD, "{", "", GOOD), "skip")
    assert lines_of(workspace.train_data).read_text().split() == ["2", "5"]


class TestSubsets:
    @pytest.fixture
    def folder(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Any:
        for _ in configured(monkeypatch, {"TUNEYARD_DATA_ROOTS": json.dumps([str(CASES)])}, None):
            yield f"file://{CASES / 'A13b_two_subsets'}"

    def test_a_folder_of_several_names_them(self, workspace: Workspace, project_id: str, folder: str) -> None:
        with pytest.raises(JobFailed, match="main, extra") as caught:
            prepare(workspace, project_id, folder)
        assert (caught.value.code, caught.value.param) == ("dataset_subset_required", "training_file")

    def test_the_one_that_is_named_is_read(self, workspace: Workspace, project_id: str, folder: str) -> None:
        job = prepare(workspace, project_id, f"{folder}?subset=main")
        assert (job.data_rows or {})["training"]["rows_used"] == 3

    @pytest.mark.parametrize("subset", ["none", "../A01a_bom_crlf.jsonl"])
    def test_one_that_is_not_there_is_refused(self, workspace: Workspace, project_id: str, folder: str, subset: str) -> None:
        with pytest.raises(JobFailed, match="There is no subset") as caught:
            prepare(workspace, project_id, f"{folder}?subset={subset}")
        assert caught.value.code == "dataset_subset_required"
