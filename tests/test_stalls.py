"""A rank that stops without dying: seen, told with its cause, and made good by another attempt. Two real ranks each."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import tiny
from tests.service import Service, running, trainer_processes_of

pytestmark = pytest.mark.slow
SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4},
    "data": {"max_length": 256},
    "training": {"per_device_train_batch_size": 1, "max_steps": 120},
    "checkpoints": {"save_steps": 5},
    "parallelism": {"nproc_per_node": 2},
}
STEP_S = COLLECTIVE_S = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    environment = {"TUNEYARD_MODEL_ROOTS": json.dumps([str(model.parent)]), "TUNEYARD_NODE_CPU_SLOTS": "2"}
    with running(tmp_path_factory.mktemp("service"), **environment) as service:
        yield service


@pytest.fixture(scope="module")
def disturbed(service: Service, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two jobs at once, by what limits them: of each, one rank stands still after its first checkpoint."""
    file = service.upload(tiny.write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", tiny.chat_rows(32)))
    limits = {"step_timeout_s": STEP_S, "collective_timeout_s": COLLECTIVE_S}
    jobs = {name: service.create_job(model, file, SPEC | {"resources": {name: limit}}).id for name, limit in limits.items()}
    for job_id in jobs.values():
        service.wait_for_step(job_id, 8)
        rank(job_id, 1).send_signal(signal.SIGSTOP)
    return jobs


def rank(job_id: str, number: int) -> psutil.Process:
    return next(one for one in trainer_processes_of(job_id) if one.environ().get("RANK") == str(number))


@pytest.mark.parametrize(
    ("limit", "code", "told", "logged"),
    [
        # The rank that still ran has said where it waited.
        ("step_timeout_s", "step_stalled", f"Training stalled: nothing moved for {STEP_S} s", "most recent call first"),
        ("collective_timeout_s", "collective_timeout", "A rank waited in vain for the others", "Timed out waiting"),
    ],
)
def test_a_rank_that_stands_still_costs_an_attempt(
    service: Service, disturbed: dict[str, str], limit: str, code: str, told: str, logged: str
) -> None:
    job = service.wait_for_end(disturbed[limit])
    assert job.status == "succeeded", job.error
    answer = service.client.get(f"/fine_tuning/jobs/{job.id}/attempts", cast_to=object)
    assert isinstance(answer, dict)
    first, second = sorted(answer["data"], key=lambda attempt: attempt["attempt"])
    assert (first["end"], first["code"], second["end"]) == ("lost", code, "succeeded")
    assert first["message"].startswith(told)
    assert second["first_step"] > 5  # from its checkpoint
    assert logged in (service.data_dir / "workspace" / job.id / "1" / "trainer.log").read_text()
