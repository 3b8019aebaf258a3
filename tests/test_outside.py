"""What a job hands over outside the service: the Hub, Weights & Biases and TensorBoard, through the whole service."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tensorboardX.proto import event_pb2

from tests import tiny
from tests.hub import Hub, running_hub
from tests.service import Service, running, trainer_processes_of, wait_until
from tests.wandb_server import TEAM, WandbServer, running_wandb

pytestmark = pytest.mark.slow

REPO = "acme/support"
WANDB_KEY = "wandb_v1_" + "0123456789" * 4
NUM_STEPS = 60
SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4},
    "data": {"max_length": 256},
    "training": {"per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 0.02},
}
FIGURES = {
    f"train/{name}"
    for name in ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "tokens_per_second", "trained_tokens", "epoch")
} | {"train/peak_memory_host_gb"}
PUSHED = SPEC | {"secrets": {"HF_TOKEN": "hub"}, "export": {"hub": {"repo_id": REPO}}}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def wandb() -> Iterator[WandbServer]:
    with running_wandb() as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path, hub: Hub, wandb: WandbServer) -> Iterator[Service]:
    environment = {
        "TUNEYARD_MODEL_ROOTS": json.dumps([str(model.parent)]),
        "WANDB_BASE_URL": wandb.url,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # the stand-in speaks LFS
    }
    with running(tmp_path_factory.mktemp("service") / "data", **environment) as service:
        _keep(service, "hub", hub.token)
        _keep(service, "WANDB_API_KEY", WANDB_KEY)
        yield service


@pytest.fixture(scope="module")
def training_file(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    return service.upload(tiny.write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", tiny.chat_rows(16)))


def test_wandb_and_tensorboard_have_every_figure_of_every_step_once_across_a_kill(
    service: Service, model: Path, training_file: str, wandb: WandbServer, tmp_path: Path
) -> None:
    training = {"max_steps": NUM_STEPS, "per_device_train_batch_size": 4}
    spec = SPEC | {"training": training, "checkpoints": {"save_steps": 7}, "evaluation": {"eval_steps": 5}}
    asked: list[Any] = [
        {"type": "wandb", "wandb": {"project": "support", "tags": ["blue"]}},
        {"type": "tensorboard"},
    ]
    job_id = service.create_job(model, training_file, spec, integrations=asked, validation_file=training_file).id
    service.wait_for_step(job_id, 10)
    for process in trainer_processes_of(job_id):
        process.kill()
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    assert (job.model_extra or {})["attempt"] == 2

    facts = {"type": "wandb", "run_id": job_id, "project": "support", "entity": None}
    assert (job.model_extra or {})["tracking"] == [facts, {"type": "tensorboard"}]
    assert f"Weights & Biases run: {wandb.url}/{TEAM}/support/runs/{job_id}" in _told(service, job_id)
    assert wandb.runs[job_id]["tags"] == ["blue"]
    rows = [row for row in wandb.history[job_id] if "train/loss" in row]
    assert [row["train/global_step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["train/loss"] for row in rows] == service.losses(job_id)
    assert all(row.keys() >= FIGURES for row in rows)
    evaluated = [row["train/global_step"] for row in wandb.history[job_id] if "eval/loss" in row]
    assert evaluated == list(range(5, NUM_STEPS + 1, 5))

    events = events_in(service.download(job_id, tmp_path) / "tensorboard")
    assert [step for step, _ in events["train/loss"]] == list(range(1, NUM_STEPS + 1))
    assert [value for _, value in events["train/loss"]] == pytest.approx(service.losses(job_id), rel=1e-6)  # float32 there
    assert [step for step, _ in events["eval/loss"]] == evaluated
    assert events.keys() >= FIGURES
    assert _files_with(service.data_dir, WANDB_KEY) == []
    assert not [body for body in wandb.bodies if WANDB_KEY.encode() in body]


def test_a_push_that_was_interrupted_is_made_by_the_next_attempt(
    service: Service, model: Path, training_file: str, hub: Hub, tmp_path: Path
) -> None:
    hub.failures["/commit/"] = 0  # no answer comes
    job_id = service.create_job(model, training_file, PUSHED).id
    wait_until(lambda: any("/commit/" in path for _, path, _ in hub.requests), "the push is under way")
    jobs = service.client.fine_tuning.jobs
    jobs.pause(job_id)
    wait_until(lambda: str(jobs.retrieve(job_id).status) == "paused", "the job is paused")
    hub.failures.clear()
    jobs.resume(job_id)
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    assert (job.model_extra or {})["attempt"] == 2
    repository = hub.repositories[REPO]
    assert repository.private
    assert f"Pushed to {hub.url}/{REPO}/commit/{repository.commits[-1]}" in _told(service, job_id)
    folder = service.download(job_id, tmp_path) / "adapter"
    assert repository.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert _files_with(service.data_dir, hub.token) == []
    assert hub.token not in job.model_dump_json() + repr(_told(service, job_id)) + repr(hub.requests)


def test_a_push_that_fails_is_a_warning_and_costs_nothing(service: Service, model: Path, training_file: str, hub: Hub) -> None:
    hub.failures["/preupload/"] = 403
    job_id = service.create_job(model, training_file, PUSHED).id
    job = service.wait_for_end(job_id)
    hub.failures.clear()
    assert job.status == "succeeded", job.error
    events = service.client.fine_tuning.jobs.list_events(job_id, limit=100).data
    (warning,) = (event for event in events if event.level == "warn")
    assert "The token may not write to acme/support" in warning.message
    assert dict(warning.data or {})["hub"]["code"] == "hub_forbidden"  # type: ignore[call-overload]
    assert service.client.models.retrieve(job.fine_tuned_model or "")


def events_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Per tag its steps and values, in the order of the event files: records of a length, its check, the event, its check."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        content = memoryview(path.read_bytes())
        while content:
            (length,) = struct.unpack_from("<Q", content)
            event = event_pb2.Event.FromString(bytes(content[12 : 12 + length]))
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            content = content[16 + length :]
    return found


def _keep(service: Service, name: str, value: str) -> None:
    headers = {"Authorization": f"Bearer {service.key}"}
    httpx2.post(f"{service.url}/secrets", json={"name": name, "value": value}, headers=headers).raise_for_status()


def _told(service: Service, job_id: str) -> list[str]:
    return [event.message for event in service.client.fine_tuning.jobs.list_events(job_id, limit=100).data]


def _files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
