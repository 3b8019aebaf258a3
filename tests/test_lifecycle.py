"""A job from upload to model, as its users see it: the whole service, the official SDK, real trainers."""

import asyncio
import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from openai import AsyncOpenAI, ConflictError
from openai.types.fine_tuning import FineTuningJob

from tests import servers, tiny
from tests.service import Service, processes_of, running, trainer_processes_of, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [[{"role": "user", "content": "What is the capital of Australia?"}]]
# 16 rows in batches of 4: 4 steps an epoch, nothing left over.
ROWS = 16
SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4, "alpha": 8},
    "data": {"max_length": 256, "packing": "off"},
    "training": {"learning_rate": 0.02, "per_device_train_batch_size": 4, "num_train_epochs": 2},
}
# Long enough to be disturbed in the middle, short enough to end.
LONG = SPEC | {"training": SPEC["training"] | {"num_train_epochs": 50}, "checkpoints": {"save_steps": 25}}
ENDLESS = SPEC | {"training": {"per_device_train_batch_size": 4, "max_steps": 100_000}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny base models."""
    folder = tmp_path_factory.mktemp("models")
    tiny.build_llama(folder / "tiny-llama")
    tiny.build_gpt_oss(folder / "tiny-gpt-oss", mxfp4=True)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in Multilingual-Thinking's shape."""
    return tiny.write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", tiny.chat_rows(ROWS))


DATABASES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("sqlite", "postgresql")]


@pytest.fixture(scope="module", params=DATABASES)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    """The embedded service, and the same code on PostgreSQL and a Valkey of its own."""
    environment = {"TUNEYARD_MODEL_ROOTS": json.dumps([str(models)]), "TUNEYARD_NODE_CPU_SLOTS": "2"}
    folder = tmp_path_factory.mktemp("service")
    if request.param == "sqlite":
        with running(folder / "data", **environment) as service:
            yield service
        return
    server: servers.Postgres = request.getfixturevalue("postgres_server")
    urls = {"TUNEYARD_DATABASE_URL": server.create_database()}
    with servers.valkey() as broker, running(folder / "data", **environment, **urls, TUNEYARD_BROKER_URL=broker) as service:
        yield service


@pytest.fixture(scope="module")
def training_file(service: Service, rows: Path) -> str:
    file = service.client.files.create(file=rows, purpose="fine-tune")
    return service.client.files.wait_for_processing(file.id, poll_interval=0.1).id


@pytest.fixture(scope="module")
def finished(service: Service, models: Path, training_file: str) -> FineTuningJob:
    """A job that used everything of the slice on one rank."""
    spec = SPEC | {"evaluation": {"prompts": PROMPTS, "max_new_tokens": 8}}
    more = {"suffix": "first", "metadata": {"team": "blue"}, "validation_file": training_file}
    job = service.create_job(models / "tiny-llama", training_file, spec, **more)
    assert job.status == "queued"  # its file has been read
    job = service.wait_for_end(job.id)
    assert job.status == "succeeded", job.error
    return job


def test_the_sdk_sees_a_job_from_upload_to_model(service: Service, finished: FineTuningJob) -> None:
    client, job = service.client, finished
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model.startswith("ft:tiny-llama:tuneyard:first:")
    assert job.finished_at is not None
    assert job.finished_at >= job.created_at

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
    messages = [event.message for event in reversed(events)]
    assert messages[0] == f"Created fine-tuning job: {job.id}"
    assert f"New fine-tuned model created: {job.fine_tuned_model}" in messages
    figures = [event.data for event in events if event.type == "metrics" and isinstance(event.data, dict)]
    assert len([data for data in figures if "train_loss" in data]) == 8
    assert len([data for data in figures if "valid_loss" in data]) == 2

    table = list(csv.DictReader(io.StringIO(client.files.content(job.result_files[0]).text)))
    assert [int(row["step"]) for row in table] == list(range(1, 9))
    assert all(float(row["train_loss"]) > 0 for row in table)

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [8, 4]
    assert checkpoints[0].fine_tuned_model_checkpoint == f"{job.fine_tuned_model}:ckpt-step-8"
    assert job.fine_tuned_model in [model.id for model in client.models.list()]
    assert client.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model


def test_a_preview_shows_what_the_job_trains_on(service: Service, models: Path, training_file: str) -> None:
    question = {"model": str(models / "tiny-llama"), "validation_file": training_file}
    shown: Any = service.client.post(f"/files/{training_file}/preview", body=question, cast_to=object)
    while shown["status"] == "waiting":
        shown = service.client.get(f"/files/{training_file}/preview/{shown['id']}", cast_to=object)
    assert shown["error"] is None
    assert shown["result"]["trained_tokens_per_row"]["total"] == _assistant_tokens(models / "tiny-llama")
    assert shown["result"]["overlap"]["rows_in_both"] == shown["result"]["rows_read"]


def test_the_async_sdk_sees_the_same(service: Service, finished: FineTuningJob) -> None:
    async def look() -> tuple[FineTuningJob, int]:
        async with AsyncOpenAI(base_url=service.url, api_key=service.key) as client:
            events = [event async for event in client.fine_tuning.jobs.list_events(finished.id, limit=5)]
            return await client.fine_tuning.jobs.retrieve(finished.id), len(events)

    job, num_events = asyncio.run(look())
    assert job == finished
    assert num_events == len(list(service.client.fine_tuning.jobs.list_events(finished.id)))


def test_the_loss_falls_and_every_trained_token_is_counted(service: Service, models: Path, finished: FineTuningJob) -> None:
    losses = _losses(service, finished.id)
    assert losses[-1] < losses[0]
    assert finished.trained_tokens == 2 * _assistant_tokens(models / "tiny-llama")


def test_prompts_are_answered_by_base_and_tuned_model(finished: FineTuningJob) -> None:
    answers = (finished.model_extra or {})["answers"]
    assert [answer["messages"] for answer in answers] == PROMPTS
    assert answers[0]["base"] != answers[0]["tuned"]


def test_cancelling_a_job_that_ended_is_a_conflict_said_once(service: Service, finished: FineTuningJob) -> None:
    with pytest.raises(ConflictError) as caught:
        service.client.fine_tuning.jobs.cancel(finished.id)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_downloaded_adapter_works_in_plain_peft(
    service: Service, models: Path, finished: FineTuningJob, tmp_path: Path
) -> None:
    _download(service, finished.id, "adapter/", tmp_path)
    script = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained({str(models / "tiny-llama")!r}, dtype=torch.float32)
ids = torch.arange(16).unsqueeze(0)
before = base(ids).logits
after = PeftModel.from_pretrained(base, {str(tmp_path / "adapter")!r})(ids).logits
print((before - after).abs().max().item())
"""
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert float(shown.stdout.strip().splitlines()[-1]) > 0.1


@pytest.fixture(scope="module")
def finished_on_two_ranks(service: Service, models: Path, training_file: str) -> FineTuningJob:
    """A gpt-oss in true MXFP4, attention and experts adapted, on two ranks."""
    spec = SPEC | {
        "adapter": {"r": 4, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        "training": SPEC["training"] | {"per_device_train_batch_size": 2},
        "parallelism": {"nproc_per_node": 2},
    }
    job = service.wait_for_end(service.create_job(models / "tiny-gpt-oss", training_file, spec).id)
    assert job.status == "succeeded", job.error
    return job


def test_a_true_mxfp4_gpt_oss_trains_on_two_ranks(service: Service, finished_on_two_ranks: FineTuningJob) -> None:
    losses = _losses(service, finished_on_two_ranks.id)
    assert losses[-1] < losses[0]


def test_the_same_workspace_by_hand_gives_the_same_losses(service: Service, finished_on_two_ranks: FineTuningJob) -> None:
    workspace = service.data_dir / "workspace" / finished_on_two_ranks.id / "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "worker.trainer.train"]
    subprocess.run([*command, str(workspace)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    by_hand = [line["values"]["loss"] for line in lines if "loss" in line["values"]]
    assert by_hand == _losses(service, finished_on_two_ranks.id)


def test_all_weights_train_too(service: Service, models: Path, training_file: str) -> None:
    spec = SPEC | {"adapter": {"type": "full"}, "training": SPEC["training"] | {"learning_rate": 0.001}}
    job = service.wait_for_end(service.create_job(models / "tiny-llama", training_file, spec).id)
    assert job.status == "succeeded", job.error


def test_cancelling_a_running_job_leaves_no_process(service: Service, models: Path, training_file: str) -> None:
    job = service.create_job(models / "tiny-llama", training_file, ENDLESS | {"parallelism": {"nproc_per_node": 2}})
    service.wait_for_step(job.id, 3)
    service.client.fine_tuning.jobs.cancel(job.id)
    job = service.wait_for_end(job.id)
    assert job.status == "cancelled"
    assert not trainer_processes_of(job.id)
    wait_until(lambda: not processes_of(job.id), "the job's processes are gone", 10)
    assert service.client.fine_tuning.jobs.cancel(job.id).status == "cancelled"


def test_a_job_over_its_time_limit_fails_with_that_cause(service: Service, models: Path, training_file: str) -> None:
    created = service.create_job(models / "tiny-llama", training_file, ENDLESS | {"resources": {"time_limit_s": 1}})
    job = service.wait_for_end(created.id)
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "time_limit_exceeded"
    assert not trainer_processes_of(job.id)


def test_a_target_that_matches_nothing_fails_the_job_by_name(service: Service, models: Path, training_file: str) -> None:
    spec = SPEC | {"adapter": {"target_modules": ["q_proj", "no_such_proj"]}}
    job = service.wait_for_end(service.create_job(models / "tiny-llama", training_file, spec).id)
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "adapter_target_unmatched"
    assert "no_such_proj" in job.error.message


@pytest.fixture(scope="module")
def survivor(service: Service, models: Path, training_file: str) -> FineTuningJob:
    """A job during which API, control worker and node worker were killed."""
    job = service.create_job(models / "tiny-llama", training_file, LONG, seed=7)
    service.wait_for_step(job.id, 3)
    for words in (("uvicorn",), ("celery", "node@"), ("celery", "control@")):
        service.child(*words).kill()
    wait_until(lambda: _answers(service), "the API is back", 30)
    return service.wait_for_end(job.id)


def test_killing_api_and_workers_changes_nothing_for_a_running_job(service: Service, survivor: FineTuningJob) -> None:
    assert survivor.status == "succeeded", survivor.error
    assert (survivor.model_extra or {})["attempt"] == 1
    assert len(_losses(service, survivor.id)) == 200


def test_a_killed_supervisor_is_noticed_and_the_job_goes_on_from_its_checkpoint(
    service: Service, models: Path, training_file: str, survivor: FineTuningJob
) -> None:
    job = service.create_job(models / "tiny-llama", training_file, LONG, seed=7)
    wait_until(lambda: bool(service.client.fine_tuning.jobs.checkpoints.list(job.id).data), "a checkpoint is stored")
    next(process for process in processes_of(job.id) if "worker.supervisor" in process.cmdline()).kill()
    job = service.wait_for_end(job.id)
    assert job.status == "succeeded", job.error
    assert (job.model_extra or {})["attempt"] == 2
    assert _losses(service, job.id) == _losses(service, survivor.id)
    messages = [event.message for event in service.client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert any(message.startswith("resumed from the checkpoint at step") for message in messages)
    assert messages.count("The job has successfully completed") == 1


def test_a_killed_rank_starts_another_attempt(
    service: Service, models: Path, training_file: str, survivor: FineTuningJob
) -> None:
    job = service.create_job(models / "tiny-llama", training_file, LONG, seed=7)
    service.wait_for_step(job.id, 5)
    next(process for process in trainer_processes_of(job.id) if "RANK" in process.environ()).kill()
    job = service.wait_for_end(job.id)
    assert job.status == "succeeded", job.error
    assert (job.model_extra or {})["attempt"] == 2
    assert _losses(service, job.id) == _losses(service, survivor.id)
    told = [event.message for event in service.client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert "The training process of local rank 0 was killed by SIGKILL: the job is queued again" in told


def test_a_paused_job_frees_its_slot_and_goes_on_exactly(
    service: Service, models: Path, training_file: str, survivor: FineTuningJob
) -> None:
    jobs = service.client.fine_tuning.jobs
    job = service.create_job(models / "tiny-llama", training_file, LONG, seed=7)
    service.wait_for_step(job.id, 5)
    jobs.pause(job.id)
    wait_until(lambda: str(jobs.retrieve(job.id).status) == "paused", "the job is paused")
    assert not trainer_processes_of(job.id)
    assert jobs.resume(job.id).status in ("queued", "running")
    job = service.wait_for_end(job.id)
    assert job.status == "succeeded", job.error
    assert _losses(service, job.id) == _losses(service, survivor.id)
    assert job.trained_tokens == survivor.trained_tokens


def test_a_stopped_service_finds_its_jobs_again(models: Path, rows: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", TUNEYARD_MODEL_ROOTS=json.dumps([str(models)])) as service:
        job = service.create_job(models / "tiny-llama", service.upload(rows), LONG)
        service.wait_for_step(job.id, 5)
        assert service.stop(signal.SIGINT) == 0
        assert not processes_of(job.id)
        service.start()
        job = service.wait_for_end(job.id)
        assert job.status == "succeeded", job.error
        assert len(_losses(service, job.id)) == 200


def test_a_killed_service_leaves_only_its_jobs_and_the_next_one_ends_them(models: Path, rows: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", TUNEYARD_MODEL_ROOTS=json.dumps([str(models)])) as service:
        job = service.create_job(models / "tiny-llama", service.upload(rows), ENDLESS)
        service.wait_for_step(job.id, 3)
        assert service.process is not None
        everything = psutil.Process(service.process.pid).children(recursive=True)
        its_own = [process for process in everything if process not in processes_of(job.id)]
        service.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs(its_own, timeout=10)
        assert not alive
        service.start()
        found = service.client.fine_tuning.jobs.retrieve(job.id)
        assert (found.status, (found.model_extra or {})["attempt"]) == ("running", 1)
        assert service.stop(signal.SIGHUP) == 0
        assert not processes_of(job.id)


def _losses(service: Service, job_id: str) -> list[float]:
    """The training loss of every step, from the metrics route."""
    response = service.client.get(f"/fine_tuning/jobs/{job_id}/metrics?max_points=1000", cast_to=object)
    assert isinstance(response, dict)
    losses: list[float] = response["columns"]["loss"]
    assert all(loss is not None for loss in losses)
    return losses


def _assistant_tokens(model: Path) -> int:
    """What the tokenizer counts: every assistant turn's thinking, answer and end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = (row["messages"][-1] for row in tiny.chat_rows(ROWS))
    texts = (f"<think>\n{turn['thinking']}\n</think>\n\n{turn['content']}<|im_end|>" for turn in turns)
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def _download(service: Service, job_id: str, prefix: str, folder: Path) -> None:
    listed = service.client.get(f"/fine_tuning/jobs/{job_id}/artifacts", cast_to=object)
    assert isinstance(listed, dict)
    for artifact in listed["data"]:
        if artifact["name"].startswith(prefix):
            path = folder / artifact["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"{service.url}/fine_tuning/jobs/{job_id}/artifacts/{artifact['name']}/content"
            path.write_bytes(httpx2.get(url, headers={"Authorization": f"Bearer {service.key}"}).raise_for_status().content)


def _answers(service: Service) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{service.port}/healthz").status_code == 200
    except httpx2.HTTPError:
        return False
