"""A job that goes on from another one's weights: what it takes over, and what is refused. No worker is up."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import delete

from app import db
from app.errors import Conflict, InvalidRequest
from app.jobs import service
from app.jobs.schemas import JobCreate
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Checkpoint, Job
from app.keys import service as keys
from app.models import service as models
from tests import factories

pytestmark = pytest.mark.usefixtures("database")
BASE = "openai/gpt-oss-20b"
FILE = "hf://datasets/HuggingFaceH4/Multilingual-Thinking?split=train"
ADAPTER = {"r": 4, "alpha": 9, "target_modules": ["q_proj"]}


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


@pytest.fixture
def source(project_id: str) -> Callable[..., str]:
    """A job that has succeeded with a result; its id."""

    def make(*, result: bool = True, **sections: Any) -> str:
        spec = TrainingSpec.model_validate({"model": {"name_or_path": BASE}, "adapter": ADAPTER} | sections)
        job_id = factories.create_job(project_id, status="succeeded", spec=spec.model_dump(mode="json"))
        if result:
            factories.update_job(job_id, fine_tuned_model=factories.create_model(project_id, job_id, BASE))
            factories.add_artifact(job_id, "adapter/adapter_model.safetensors", b"weights")
        return job_id

    return make


def result_of(job_id: str) -> str:
    return f"ft:base:tuneyard::{job_id}"


def create(project_id: str, *, model: str = BASE, spec: dict[str, Any] | None = None) -> Job:
    with db.write() as session:
        body = JobCreate.model_validate({"model": model, "training_file": FILE, "spec": spec or {}})
        return service.create_job(session, project_id, body)


def refusal(project_id: str, **fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(InvalidRequest) as refused:
        create(project_id, **fields)
    return refused.value.code, refused.value.param


def going_on(name: str, **sections: Any) -> dict[str, Any]:
    return {"training": {"from": name}} | sections


def test_a_tuned_model_as_model_means_its_base_and_its_weights(project_id: str, source: Callable[..., str]) -> None:
    name = result_of(source())
    job = create(project_id, model=name)
    assert job.model == job.spec["model"]["name_or_path"] == BASE
    assert job.spec["training"]["from"] == name


def test_the_shape_of_the_adapter_is_taken_over(project_id: str, source: Callable[..., str]) -> None:
    adapter = create(project_id, spec=going_on(result_of(source()), adapter={"dropout": 0.1})).spec["adapter"]
    assert {name: adapter[name] for name in ADAPTER} == ADAPTER
    assert adapter["dropout"] == 0.1


def test_full_weights_go_on_at_the_rate_of_full_weights(project_id: str, source: Callable[..., str]) -> None:
    job = create(project_id, spec=going_on(result_of(source(adapter={"type": "full"}))))
    assert job.spec["adapter"]["type"] == "full"
    assert job.spec["training"]["learning_rate"] == 2e-5


def test_a_template_of_its_own_is_taken_over(project_id: str, source: Callable[..., str]) -> None:
    name = result_of(source(data={"chat_template": "{{ messages }}"}))
    assert create(project_id, spec=going_on(name)).spec["data"]["chat_template"] == "{{ messages }}"


def test_a_job_a_checkpoint_and_a_checkpoints_model_are_names_too(project_id: str, source: Callable[..., str]) -> None:
    finished, unfinished = source(), source(result=False)
    factories.add_checkpoint(unfinished, 5)
    newest = factories.add_checkpoint(unfinished, 10)
    model = f"ft:base:tuneyard::{unfinished.removeprefix('ftjob-')}:ckpt-step"
    for name, meant in [(finished, result_of(finished)), (unfinished, f"{model}-10"), (newest, f"{model}-10")]:
        assert create(project_id, spec=going_on(name)).spec["training"]["from"] == meant
    assert create(project_id, model=f"{model}-5").spec["training"]["from"] == f"{model}-5"


def test_weights_that_are_not_there_are_refused_by_name(project_id: str, source: Callable[..., str]) -> None:
    deleted, empty = source(), source(result=False)
    with db.write() as session:
        models.delete_model(session, project_id, result_of(deleted))
        stranger = keys.create_project(session, "other").id
    for name in ("ft:none", result_of(deleted), deleted, empty, "ftjob-none", "ftckpt_none", "openai/gpt-oss-20b"):
        assert refusal(project_id, spec=going_on(name)) == ("model_not_found", "spec.training.from")
    assert refusal(project_id, model=result_of(deleted)) == ("model_not_found", "model")
    assert refusal(stranger, spec=going_on(source())) == ("model_not_found", "spec.training.from")


@pytest.mark.parametrize(
    "adapter", [{"r": 8}, {"type": "full"}, {"target_modules": "all-linear"}, {"rank_pattern": {"q_proj": 2}}]
)
def test_an_adapter_of_another_shape_is_refused_by_name(
    project_id: str, source: Callable[..., str], adapter: dict[str, Any]
) -> None:
    (name,) = adapter
    code = ("adapter_mismatch", f"spec.adapter.{name}")
    assert refusal(project_id, spec=going_on(result_of(source()), adapter=adapter)) == code


def test_another_base_is_refused(project_id: str, source: Callable[..., str]) -> None:
    name = result_of(source())
    assert refusal(project_id, model="openai/gpt-oss-120b", spec=going_on(name)) == ("base_model_mismatch", "model")
    revised = going_on(name, model={"revision": "v2"})
    assert refusal(project_id, spec=revised) == ("base_model_mismatch", "spec.model.revision")
    assert refusal(project_id, model=name, spec=going_on(name))[1] == "spec.training.from"


def test_what_goes_on_from_swept_weights_cannot_be_resumed(project_id: str, source: Callable[..., str]) -> None:
    origin = source(result=False)
    factories.add_checkpoint(origin, 5)
    job = create(project_id, spec=going_on(origin))
    factories.update_job(job.id, status="failed", error={"code": "worker_lost", "message": "", "param": None})
    with db.write() as session:
        session.execute(delete(Checkpoint))
    with pytest.raises(Conflict) as refused:
        service.resume_job(project_id, job.id)
    assert (refused.value.code, refused.value.param) == ("initial_weights_gone", "spec.training.from")
