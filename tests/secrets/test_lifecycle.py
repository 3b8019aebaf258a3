"""A job whose trainer prints its whole environment: the token is in no place that anybody reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests import tiny
from tests.service import Service, processes_of, running

pytestmark = pytest.mark.slow

TOKEN = "hf_TESTTOKEN123"
SPEC: dict[str, Any] = {
    "adapter": {"r": 4},
    "data": {"max_length": 256},
    "training": {"max_steps": 30, "per_device_train_batch_size": 4, "learning_rate": 0.01},
    "secrets": {"HF_TOKEN": "hub"},
}
CARELESS = "import os, sys\nif 'RANK' in os.environ:\n    print('ENV', sys.argv, dict(os.environ), flush=True)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """A service whose every rank starts by printing its command line and environment."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CARELESS)
    environment = {"TUNEYARD_MODEL_ROOTS": json.dumps([str(model.parent)]), "PYTHONPATH": str(folder / "site")}
    with running(folder / "data", **environment) as service:
        headers = {"Authorization": f"Bearer {service.key}"}
        secret = {"name": "hub", "value": TOKEN}
        httpx2.post(f"{service.url}/secrets", json=secret, headers=headers).raise_for_status()
        yield service


@pytest.fixture(scope="module")
def training_file(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    return service.upload(tiny.write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", tiny.chat_rows(16)))


def test_the_token_reaches_the_trainer_and_nobody_else(service: Service, model: Path, training_file: str) -> None:
    job = service.create_job(model, training_file, SPEC)
    service.wait_for_step(job.id, 1)
    processes = processes_of(job.id)
    given = [_has_token(process) for process in processes if "worker.trainer.train" in " ".join(process.cmdline())]
    assert any(given)
    assert not [p for p in processes if "worker.supervisor" in p.cmdline() and _has_token(p)]
    assert TOKEN not in " ".join(" ".join(process.cmdline()) for process in psutil.process_iter(["cmdline"]))
    job = service.wait_for_end(job.id)
    assert job.status == "succeeded", job.error

    log = service.client.get(f"/fine_tuning/jobs/{job.id}/logs?tail=10000", cast_to=str)
    assert "'HF_TOKEN': '***'" in log
    assert TOKEN not in log
    assert TOKEN not in service.client.fine_tuning.jobs.retrieve(job.id).model_dump_json()
    events = service.client.fine_tuning.jobs.list_events(job.id, limit=100)
    assert TOKEN not in "".join(event.model_dump_json() for event in events)
    assert _files_with_token(service.data_dir) == []


def test_a_failure_that_quotes_the_token_says_three_stars(service: Service, model: Path, training_file: str) -> None:
    spec = SPEC | {"adapter": {"target_modules": [TOKEN]}}
    job = service.wait_for_end(service.create_job(model, training_file, spec).id)
    assert job.error is not None
    assert job.error.code == "adapter_target_unmatched"
    assert "'***' of adapter.target_modules" in job.error.message
    told = [event.message for event in service.client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert TOKEN not in "".join(told)


def test_a_secret_that_was_deleted_meanwhile_fails_the_job_by_name(service: Service, model: Path, training_file: str) -> None:
    headers = {"Authorization": f"Bearer {service.key}"}
    secret = {"name": "gone", "value": TOKEN}
    httpx2.post(f"{service.url}/secrets", json=secret, headers=headers).raise_for_status()
    running_job = service.create_job(model, training_file, SPEC | {"training": SPEC["training"] | {"max_steps": 100_000}})
    waiting = service.create_job(model, training_file, SPEC | {"secrets": {"HF_TOKEN": "gone"}})
    httpx2.delete(f"{service.url}/secrets/gone", headers=headers).raise_for_status()
    service.client.fine_tuning.jobs.cancel(running_job.id)
    job = service.wait_for_end(waiting.id)
    assert job.error is not None
    assert (job.error.code, job.error.param) == ("secret_not_found", "spec.secrets")


def _has_token(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get("HF_TOKEN") == TOKEN)
    except psutil.Error:
        return False


def _files_with_token(folder: Path) -> list[str]:
    """Of everything the service has written: database, storage, workspaces, logs."""
    found = [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    return [str(path.relative_to(folder)) for path in found]
