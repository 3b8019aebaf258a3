"""Jobs by their owner's hand: the numbers they get, and the states they may be sent to. No worker is up."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app import db
from app.config import get_settings
from app.errors import Conflict, InvalidRequest
from app.jobs import service
from app.jobs.schemas import JobCreate
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.secrets import service as secrets
from tests import factories

pytestmark = pytest.mark.usefixtures("database")
BASE = {"model": "openai/gpt-oss-20b", "training_file": "hf://datasets/HuggingFaceH4/Multilingual-Thinking?split=train"}


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def create(project_id: str, **fields: Any) -> Job:
    with db.write() as session:
        return service.create_job(session, project_id, JobCreate.model_validate(BASE | fields))


def status(job_id: str) -> str:
    with db.write() as session:
        return session.get_one(Job, job_id).status


def add_cpu_node(slots: int = 1) -> None:
    with db.write() as session:
        nodes.register(session, NodeReport("a", "127.0.0.1", "cpu", slots, [], {}))


class TestNumbers:
    def test_the_defaults_are_shown_resolved(self, project_id: str) -> None:
        job = create(project_id)
        assert job.method["supervised"]["hyperparameters"] == {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 1.0}
        assert job.spec["model"]["name_or_path"] == "openai/gpt-oss-20b"
        assert job.spec["training"]["learning_rate"] == 2e-4

    def test_full_weights_start_from_a_lower_learning_rate(self, project_id: str) -> None:
        job = create(project_id, spec={"adapter": {"type": "full"}})
        assert job.spec["training"]["learning_rate"] == 2e-5

    def test_openais_numbers_reach_the_spec(self, project_id: str) -> None:
        given = {"n_epochs": 2, "batch_size": 24, "learning_rate_multiplier": 0.5}
        job = create(project_id, hyperparameters=given, spec={"parallelism": {"nproc_per_node": 2}})
        training = job.spec["training"]
        assert training["num_train_epochs"] == 2.0
        assert training["learning_rate"] == 1e-4
        assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (6, 2)
        assert job.method["supervised"]["hyperparameters"] == given

    def test_a_batch_that_does_not_divide_says_what_would(self, project_id: str) -> None:
        with pytest.raises(InvalidRequest, match="multiple of 2") as caught:
            create(project_id, hyperparameters={"batch_size": 7}, spec={"parallelism": {"nproc_per_node": 2}})
        assert caught.value.param == "method.supervised.hyperparameters.batch_size"

    @pytest.mark.parametrize(
        ("ours", "openais"),
        [
            ({"num_train_epochs": 1}, {"n_epochs": 2}),
            ({"max_steps": 5}, {"n_epochs": 2}),
            ({"learning_rate": 1e-3}, {"learning_rate_multiplier": 2}),
            ({"gradient_accumulation_steps": 2}, {"batch_size": 8}),
        ],
    )
    def test_a_number_said_twice_is_refused(self, project_id: str, ours: dict[str, Any], openais: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match="set one of them"):
            create(project_id, spec={"training": ours}, hyperparameters=openais)

    def test_a_seed_is_drawn_and_shown(self, project_id: str) -> None:
        assert create(project_id).seed != create(project_id).seed
        assert create(project_id, seed=7).spec["seed"] == 7


class TestContradictions:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A base model's folder below an allowed root, with a context of 512 tokens."""
        monkeypatch.setenv("TUNEYARD_MODEL_ROOTS", json.dumps([str(tmp_path)]))
        get_settings.cache_clear()
        (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
        return tmp_path

    def refusal(self, project_id: str, **fields: Any) -> str | None:
        with pytest.raises(InvalidRequest) as caught:
            create(project_id, **fields)
        return caught.value.param

    def test_a_second_base_model_is_refused_and_the_same_one_is_not(self, project_id: str) -> None:
        other, same = {"model": {"name_or_path": "openai/gpt-oss-120b"}}, {"model": {"name_or_path": BASE["model"]}}
        assert self.refusal(project_id, spec=other) == "spec.model.name_or_path"
        assert create(project_id, spec=same).model == BASE["model"]

    def test_a_second_seed_is_refused_and_the_same_one_is_not(self, project_id: str) -> None:
        assert self.refusal(project_id, seed=1, spec={"seed": 2}) == "spec.seed"
        assert create(project_id, seed=1, spec={"seed": 1}).seed == 1

    def test_a_folder_has_no_revision_and_a_hub_model_has(self, project_id: str, folder: Path) -> None:
        spec = {"model": {"revision": "main"}}
        assert self.refusal(project_id, model=str(folder), spec=spec) == "spec.model.revision"
        assert create(project_id, spec=spec).spec["model"]["revision"] == "main"

    def test_rows_longer_than_the_context_are_refused_up_to_it_they_are_not(self, project_id: str, folder: Path) -> None:
        assert self.refusal(project_id, model=str(folder), spec={"data": {"max_length": 513}}) == "spec.data.max_length"
        assert create(project_id, model=str(folder), spec={"data": {"max_length": 512}}).spec["data"]["max_length"] == 512

    def test_a_context_that_is_stretched_counts_as_stretched(self, project_id: str, folder: Path) -> None:
        config = {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
        (folder / "config.json").write_text(json.dumps(config))
        assert create(project_id, model=str(folder), spec={"data": {"max_length": 2048}})
        assert self.refusal(project_id, model=str(folder), spec={"data": {"max_length": 2049}}) == "spec.data.max_length"

    def test_a_config_that_does_not_say_refuses_nothing(self, project_id: str, folder: Path) -> None:
        (folder / "config.json").write_text('{"max_position_embeddings": null, "rope_scaling": []}')
        assert create(project_id, model=str(folder), spec={"data": {"max_length": 4096}})


class TestResources:
    def test_without_a_word_the_job_takes_what_the_nodes_have(self, project_id: str) -> None:
        add_cpu_node()
        assert create(project_id).accelerator == "cpu"

    def test_gpus_that_no_node_has_are_refused(self, project_id: str) -> None:
        add_cpu_node()
        with pytest.raises(InvalidRequest, match=r"set spec\.resources\.accelerator to 'cpu'"):
            create(project_id, spec={"resources": {"accelerator": "gpu"}})

    def test_more_gpus_than_any_node_has_are_refused_with_the_most_there_is(self, project_id: str) -> None:
        with db.write() as session:
            gpus = [{"uuid": str(i), "name": "H200", "memory_bytes": 1} for i in range(8)]
            nodes.register(session, NodeReport("g", "127.0.0.1", "gpu", 8, gpus, {}))
        with pytest.raises(InvalidRequest, match=r"largest node has 8 GPU"):
            create(project_id, spec={"parallelism": {"nproc_per_node": 64}})

    @pytest.mark.parametrize(
        ("resources", "there_is"),
        [
            ({"gpu_model": "B200"}, "only NVIDIA H200"),
            ({"gpu_memory_gb": 200}, r"largest GPU has 141\.0 GB"),
            ({"labels": {"zone": "c"}}, "only zone=b"),
        ],
    )
    def test_what_no_node_is_like_is_refused_with_what_there_is(
        self, project_id: str, resources: dict[str, Any], there_is: str
    ) -> None:
        with db.write() as session:
            gpus = [{"uuid": "0", "name": "NVIDIA H200", "memory_bytes": 141 * 10**9}]
            nodes.register(session, NodeReport("g", "127.0.0.1", "gpu", 1, gpus, {}, {"zone": "b"}))
        with pytest.raises(InvalidRequest, match=there_is) as caught:
            create(project_id, spec={"resources": resources})
        assert caught.value.param == f"spec.resources.{next(iter(resources))}"
        assert create(project_id, spec={"resources": resources | {"wait_for_nodes": True}}).status == "validating_files"


class TestWhatGoesOutside:
    def test_wandb_as_openai_has_it_uses_the_projects_secret_of_that_name(self, project_id: str) -> None:
        wandb: dict[str, Any] = {"integrations": [{"type": "wandb", "wandb": {"project": "support"}}]}
        with pytest.raises(InvalidRequest, match="no secret `WANDB_API_KEY`") as caught:
            create(project_id, **wandb)
        assert (caught.value.code, caught.value.param) == ("secret_not_found", "spec.secrets")
        with db.write() as session:
            for name in ("WANDB_API_KEY", "another"):
                secrets.put_secret(session, project_id, name, "0123456789")
        assert create(project_id, **wandb).spec["secrets"] == {"WANDB_API_KEY": "WANDB_API_KEY"}
        named = create(project_id, **wandb, spec={"secrets": {"WANDB_API_KEY": "another"}})
        assert named.spec["secrets"] == {"WANDB_API_KEY": "another"}

    def test_tensorboard_needs_nothing_and_comes_once(self, project_id: str) -> None:
        tensorboard = {"type": "tensorboard"}
        assert create(project_id, integrations=[tensorboard]).integrations == [tensorboard]
        with pytest.raises(InvalidRequest) as caught:
            create(project_id, integrations=[tensorboard, tensorboard])
        assert (caught.value.code, caught.value.param) == ("duplicate_integration", "integrations[1]")

    def test_a_push_to_the_hub_needs_a_token(self, project_id: str) -> None:
        with pytest.raises(InvalidRequest, match="POST /v1/secrets") as caught:
            create(project_id, spec={"export": {"hub": {"repo_id": "acme/support"}}})
        assert (caught.value.code, caught.value.param) == ("secret_required", "spec.secrets.HF_TOKEN")

    @pytest.mark.parametrize(
        ("spec", "advice"),
        [
            ({"export": {"hub": {"repo_id": "a/b", "what": "merged"}}}, "set export.merged to true"),
            ({"export": {"hub": {"repo_id": "a/b", "what": "adapter"}}, "adapter": {"type": "full"}}, "leave export.hub.what"),
        ],
    )
    def test_a_push_of_what_is_not_made_is_refused(self, spec: dict[str, Any], advice: str) -> None:
        with pytest.raises(ValidationError, match=advice):
            TrainingSpec.model_validate(spec)


class TestCancel:
    def test_a_queued_job_is_cancelled_at_once_and_never_placed(self, project_id: str) -> None:
        job_id = create(project_id).id
        service.cancel_job(project_id, job_id)
        service.cancel_job(project_id, job_id)
        assert status(job_id) == "cancelled"
        add_cpu_node()
        assert placement.place_all() == 0

    def test_a_placed_job_gives_its_slot_back_and_its_message_finds_nothing(self, project_id: str) -> None:
        add_cpu_node()
        job_id = create(project_id).id
        placement.place_all()
        service.cancel_job(project_id, job_id)
        assert status(job_id) == "cancelled"
        assert placement.claim(job_id, 1, 0, pid=1) is None
        create(project_id)
        assert placement.place_all() == 1

    @pytest.mark.parametrize("ended", ["succeeded", "failed"])
    def test_a_job_that_ended_otherwise_is_a_conflict(self, project_id: str, ended: str) -> None:
        job_id = factories.create_job(project_id, status=ended)
        with pytest.raises(Conflict, match=f"already {ended}"):
            service.cancel_job(project_id, job_id)


class TestPause:
    def test_a_queued_job_is_held_back_until_it_is_resumed(self, project_id: str) -> None:
        add_cpu_node()
        job_id = create(project_id).id
        service.pause_job(project_id, job_id)
        service.pause_job(project_id, job_id)
        assert status(job_id) == "paused"
        assert placement.place_all() == 0
        service.resume_job(project_id, job_id)
        assert status(job_id) == "queued"
        assert placement.place_all() == 1

    def test_a_paused_job_can_be_cancelled(self, project_id: str) -> None:
        job_id = factories.create_job(project_id, status="paused")
        service.cancel_job(project_id, job_id)
        assert status(job_id) == "cancelled"

    def test_a_job_that_is_pausing_cannot_be_resumed_yet(self, project_id: str) -> None:
        job_id = factories.create_job(project_id, status="running", pause_requested_at=1.0)
        with pytest.raises(Conflict, match="still pausing"):
            service.resume_job(project_id, job_id)

    @pytest.mark.parametrize("ended", ["succeeded", "failed", "cancelled"])
    def test_a_job_that_ended_is_not_paused(self, project_id: str, ended: str) -> None:
        job_id = factories.create_job(project_id, status=ended)
        with pytest.raises(Conflict, match=f"already {ended}"):
            service.pause_job(project_id, job_id)


class TestResumeAfterAFailure:
    def test_its_tries_and_its_time_count_anew(self, project_id: str) -> None:
        add_cpu_node()
        job_id = create(project_id).id
        error = {"code": "time_limit_exceeded", "message": "too long", "param": None}
        used_up = {"num_starts": 3, "run_seconds": 9e5, "finished_at": 2.0, "error": error}
        factories.update_job(job_id, status="failed", **used_up)
        service.resume_job(project_id, job_id)
        with db.write() as session:
            job = session.get_one(Job, job_id)
            assert (job.status, job.num_starts, job.run_seconds, job.finished_at, job.error) == ("queued", 0, 0.0, None, None)
        assert placement.place_all() == 1

    @pytest.mark.parametrize("ended", ["succeeded", "cancelled"])
    def test_any_other_end_is_final(self, project_id: str, ended: str) -> None:
        job_id = factories.create_job(project_id, status=ended)
        with pytest.raises(Conflict, match=f"already {ended}"):
            service.resume_job(project_id, job_id)

    def test_a_job_whose_rows_are_gone_stays_failed(self, project_id: str) -> None:
        job_id = factories.create_job(project_id, status="failed", training_file="file-that-was-deleted")
        with pytest.raises(Conflict) as caught:
            service.resume_job(project_id, job_id)
        assert (caught.value.code, caught.value.param) == ("training_data_gone", "training_file")
        assert status(job_id) == "failed"
