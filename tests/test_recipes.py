"""The two gpt-oss recipes through the HTTP API, with only sizes and the accelerator changed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.service import Service, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("recipes")]

# A tiny model on two CPU ranks; everything else is the recipe's. Short answers, as an untrained model never ends one.
SIZES: dict[str, Any] = {"resources": {"accelerator": "cpu"}, "parallelism": {"nproc_per_node": 2}}
SHORT_ANSWERS = {"evaluation": {"max_new_tokens": 8}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.build_gpt_oss(folder / "tiny-gpt-oss", mxfp4=True)
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {"TUNEYARD_MODEL_ROOTS": json.dumps([str(models)]), "TUNEYARD_NODE_CPU_SLOTS": "2"}
    with running(tmp_path_factory.mktemp("service") / "data", **environment) as service:
        yield service


@pytest.fixture(scope="module")
def training_file(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows in Multilingual-Thinking's shape, thinking in the analysis channel."""
    return service.upload(tiny.write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", tiny.chat_rows(32)))


def test_the_20b_recipe_trains_attention_under_ddp_and_answers_its_question(
    service: Service, models: Path, training_file: str
) -> None:
    spec = {"recipe": "gpt-oss-20b-ddp-lora", **SIZES, **SHORT_ANSWERS}
    job = service.wait_for_end(service.create_job(models / "tiny-gpt-oss", training_file, spec).id)
    assert job.status == "succeeded", job.error
    told = facts(service, job.id)
    assert told["strategy"] == "MULTI_CPU"
    assert told["adapted"] == {"attention": 8}
    assert told["attention"] == "by_row"  # eager attention, without the scores that a mask throws away
    columns = metrics(service, job.id)
    assert columns["step"] == list(range(1, 9))  # 32 rows, 1 a rank, 2 ranks, 2 accumulated: 8 steps in one epoch
    assert max(columns["learning_rate"]) == pytest.approx(2e-4)
    assert 2e-5 <= columns["learning_rate"][-1] < 4e-5  # cosine down to a tenth
    (answer,) = (job.model_extra or {})["answers"]
    assert answer["messages"][0]["content"] == "reasoning language: German"
    assert answer["base"] is not None


def test_the_120b_recipe_is_fsdp2_and_trains_every_expert(service: Service, models: Path, training_file: str) -> None:
    spec = {"recipe": "gpt-oss-120b-fsdp2-lora-experts", **SIZES}
    job = service.wait_for_end(service.create_job(models / "tiny-gpt-oss", training_file, spec).id)
    assert job.status == "succeeded", job.error
    told = facts(service, job.id)
    assert told["strategy"] == "FSDP"
    assert told["fsdp_version"] == 2
    assert "GptOssDecoderLayer" in told["wrapped"]
    assert told["sharded_parameters"] > 0
    assert told["adapted"] == {"attention": 8, "experts": 4}
    columns = metrics(service, job.id)
    assert columns["step"] == list(range(1, 5))
    assert max(columns["learning_rate"]) == pytest.approx(1.5e-4)


def facts(service: Service, job_id: str) -> dict[str, Any]:
    """What the job's events say about the run."""
    events = service.client.fine_tuning.jobs.list_events(job_id, limit=100)
    return {name: value for event in events if isinstance(event.data, dict) for name, value in event.data.items()}


def metrics(service: Service, job_id: str) -> dict[str, Any]:
    answer = service.client.get(f"/fine_tuning/jobs/{job_id}/metrics", cast_to=object)
    assert isinstance(answer, dict)
    columns: dict[str, Any] = answer["columns"]
    return columns
