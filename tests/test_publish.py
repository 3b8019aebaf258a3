"""A result is offered only after what lies in storage was proven to be the model that was trained."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import select

from app import db, storage
from app.jobs.attempts import Outcome
from app.jobs.tables import Artifact, Job
from app.keys import service as keys
from tests import factories, tiny
from tests.trainer import conftest as trainer_tests
from tests.trainer.conftest import MakeWorkspace
from worker import publish
from worker.failures import JobFailed
from worker.trainer.trainers import Trainer
from worker.trainer.verify import verify
from worker.workspace import Result, Run, Workspace, read_json, write_json

pytestmark = pytest.mark.slow

make_workspace = trainer_tests.make_workspace
run_here = trainer_tests.run_here
PROJECT = "proj_of_a_test"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def trained(make_workspace: MakeWorkspace, llama: Path, run_here: Callable[[Workspace], Trainer]) -> Workspace:
    workspace = make_workspace("w", llama, training={"max_steps": 4})
    run_here(workspace)
    return workspace


@pytest.fixture
def job(database: str, trained: Workspace) -> Job:
    with db.write() as session:
        keys.create_project(session, "publish", PROJECT)
    job_id = factories.create_job(PROJECT, status="running", attempt=1, spec=read_json(trained.spec))
    with db.write() as session:
        return session.get_one(Job, job_id)


def _publish(workspace: Workspace, job: Job) -> Outcome:
    def prove(folder: Path) -> None:
        write_json(workspace.verification, verify(workspace, folder))

    return publish.publish(workspace, Run(job.id, 1), job, Result(**read_json(workspace.result)), prove)


def _lose_a_ranks_part(path: Path) -> None:
    """What a rank that saves only its own shard leaves behind: the rest as it was before training."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[len(tensor) // 2 :] = 0
    save_file(tensors, path, metadata={"format": "pt"})


def test_an_adapter_that_lacks_a_ranks_part_ends_the_job_and_is_not_offered(
    trained: Workspace, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_well = storage.put

    def put(path: Path, key: str) -> None:
        if path.name == "adapter_model.safetensors":
            _lose_a_ranks_part(path)
        stored_well(path, key)

    monkeypatch.setattr(storage, "put", put)
    with pytest.raises(JobFailed, match=r"differ from the live model by [0-9.e-]+, more than") as caught:
        _publish(trained, job)
    assert caught.value.code == "artifact_verification_failed"
    assert publish.finished_before(Run(job.id, 1)) is None
    assert storage.keys(f"jobs/{job.id}") == []
    with db.read() as connection:
        assert connection.execute(select(Artifact.name)).all() == []


def test_a_good_adapter_is_offered_with_its_manifest(trained: Workspace, job: Job) -> None:
    outcome = _publish(trained, job)
    assert {"manifest.json", "manifest.json.sig", "adapter/adapter_model.safetensors"} <= {
        artifact.name for artifact in outcome.artifacts
    }
    assert publish.finished_before(Run(job.id, 1)) == outcome
    manifest = read_json(trained.export / "manifest.json")
    named = {artifact.name: artifact.sha256 for artifact in outcome.artifacts if not artifact.name.startswith("manifest")}
    assert {name: facts["sha256"] for name, facts in manifest["files"].items()} == named
    assert manifest["verification"]["max_difference_from_live"] < manifest["verification"]["tolerance"]
    assert manifest["libraries"]["peft"] == importlib.metadata.version("peft")
