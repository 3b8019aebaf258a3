"""Database, broker and workers go away and come back under running jobs: a real PostgreSQL and a real Valkey are stopped."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import servers, tiny
from tests.service import running, trainer_processes_of, wait_until

pytestmark = pytest.mark.slow

SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4, "alpha": 8},
    "data": {"max_length": 256, "packing": "off"},
    "training": {"per_device_train_batch_size": 2, "max_steps": 2},
    "parallelism": {"nproc_per_node": 2},
    "checkpoints": {"save_steps": 1000},
}
SHORT = SPEC | {"parallelism": {"nproc_per_node": 1}}
ENDLESS = SPEC | {"training": SPEC["training"] | {"max_steps": 100_000}}
ENOUGH_LINES = 10
ENVIRONMENT = {"TUNEYARD_NODE_CPU_SLOTS": "4"}


class World:
    """A database and a broker that can be taken away, and a service on them."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = ENVIRONMENT | environment
        self._stack, self._broker = ExitStack(), ExitStack()

    def __enter__(self) -> "World":
        self.database = self._stack.enter_context(servers.postgres())
        (self.folder / "broker").mkdir()
        broker = self.start_broker()
        self._stack.push(lambda *_: self._broker.close())
        self.models = self.folder / "models"
        tiny.build_llama(self.models / "tiny-llama")
        urls = {"TUNEYARD_DATABASE_URL": self.database.create_database(), "TUNEYARD_BROKER_URL": broker}
        roots = {"TUNEYARD_MODEL_ROOTS": json.dumps([str(self.models)])}
        self.environment |= urls | roots
        self.service = self._stack.enter_context(running(self.folder / "data", **self.environment))
        self.training_file = self.service.upload(tiny.write_rows(self.folder / "train.jsonl", tiny.chat_rows(16)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def start_broker(self) -> str:
        """One that knows nothing: it keeps nothing on disk."""
        return self._broker.enter_context(servers.valkey(self.folder / "broker"))

    def stop_broker(self) -> None:
        self._broker.close()

    def create(self, spec: dict[str, Any]) -> str:
        return self.service.create_job(self.models / "tiny-llama", self.training_file, spec).id

    def get(self, path: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.service.key}"}
        return httpx2.get(f"{self.service.url}/fine_tuning/jobs/{path}", headers=headers, timeout=60)

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.get(f"{job_id}/attempts").json()["data"]
        return listed

    def lines(self, job_id: str, attempt: int = 1) -> int:
        """How many steps the trainer has written down on its node."""
        path = self.service.data_dir / "workspace" / job_id / str(attempt) / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def reported_steps(self, job_id: str) -> list[int]:
        """The steps of the job's events, in the order they were told."""
        events = self.service.client.fine_tuning.jobs.list_events(job_id, limit=100)
        told = [event.data["step"] for event in events if event.type == "metrics" and isinstance(event.data, dict)]
        return told[::-1]

    def end(self, job_id: str) -> None:
        self.service.client.fine_tuning.jobs.cancel(job_id)
        self.service.wait_for_end(job_id)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("outages")) as world:
        yield world


def test_a_short_outage_of_the_database_delays_progress_and_loses_none(world: World) -> None:
    job_id = world.create(ENDLESS)
    world.service.wait_for_step(job_id, 3)
    world.database.stop()
    before = world.lines(job_id)
    wait_until(lambda: world.lines(job_id) > before + ENOUGH_LINES, "the job trains on without a database")
    answer = world.get(job_id)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
    assert answer.headers["retry-after"]
    world.database.start()
    world.service.wait_for_step(job_id, before + ENOUGH_LINES)
    world.end(job_id)
    steps = world.reported_steps(job_id)
    assert steps == list(range(1, len(steps) + 1))
    assert [attempt["end"] for attempt in world.attempts(job_id)] == ["cancelled"]


def test_without_a_broker_jobs_are_taken_run_on_and_start_when_it_is_back(world: World) -> None:
    running_job = world.create(ENDLESS)
    world.service.wait_for_step(running_job, 3)
    world.stop_broker()
    queued = world.create(SHORT)
    before = world.lines(running_job)
    world.service.wait_for_step(running_job, before + ENOUGH_LINES)
    world.start_broker()
    assert world.service.wait_for_end(queued).status == "succeeded"
    world.end(running_job)
    assert [attempt["end"] for attempt in world.attempts(running_job)] == ["cancelled"]


def test_a_second_delivery_of_a_running_job_ends_at_once(world: World) -> None:
    job_id = world.create(ENDLESS)
    world.service.wait_for_step(job_id, 3)
    before = {process.pid for process in trainer_processes_of(job_id)}
    environment = world.environment | {"TUNEYARD_DATA_DIR": str(world.service.data_dir)}
    command = [sys.executable, "-m", "worker.supervisor", job_id, "1", "0"]
    subprocess.run(command, check=True, env=os.environ | environment)
    log = world.service.data_dir / "workspace" / job_id / "1" / "supervisor.log"
    wait_until(lambda: "duplicate_delivery_ignored" in log.read_text(), "the second supervisor has ended")
    assert {process.pid for process in trainer_processes_of(job_id)} == before
    world.end(job_id)
    assert len(world.attempts(job_id)) == 1


def test_any_number_of_apis_and_control_workers_make_each_job_run_once(world: World, tmp_path: Path) -> None:
    environment = world.environment | {"TUNEYARD_DATA_DIR": str(world.service.data_dir)}
    control = [sys.executable, "-m", "app.cli", "control"]
    with servers.api(environment, tmp_path) as another, ExitStack() as stack:
        for number in range(2):
            log = stack.enter_context((tmp_path / f"control-{number}.log").open("wb"))
            process = stack.enter_context(subprocess.Popen(control, env=os.environ | environment, stdout=log, stderr=log))
            stack.callback(process.terminate)
        client = world.service.client.with_options(base_url=f"{another.url}/v1")
        model, extra = str(world.models / "tiny-llama"), {"spec": SHORT}
        mine = client.fine_tuning.jobs.create(model=model, training_file=world.training_file, extra_body=extra).id
        jobs = [mine, world.create(SHORT)]
        assert {world.service.wait_for_end(job_id).status for job_id in jobs} == {"succeeded"}
    for job_id in jobs:
        assert [attempt["end"] for attempt in world.attempts(job_id)] == ["succeeded"]
        told = [event.message for event in world.service.client.fine_tuning.jobs.list_events(job_id, limit=100)]
        assert told.count("The job has successfully completed") == 1


class TestLongerThanTheLease:
    """A lease of seconds, so that an outage outlasts it."""

    LEASE_S = 8.0

    @pytest.fixture
    def impatient(self, tmp_path: Path) -> Iterator[World]:
        with World(tmp_path, TUNEYARD_LEASE_S=str(self.LEASE_S)) as world:
            yield world

    def test_the_trainer_saves_and_stops_before_its_lease_ends_and_the_job_goes_on_exactly_there(
        self, impatient: World
    ) -> None:
        job_id = impatient.create(ENDLESS)
        impatient.service.wait_for_step(job_id, 3)
        impatient.database.stop()
        # The last renewal was before this moment, so its lease ends no later than a lease from now.
        wait_until(lambda: not trainer_processes_of(job_id), "the trainer has stopped", self.LEASE_S)
        trained = impatient.lines(job_id)
        impatient.database.start()
        impatient.service.wait_for_step(job_id, trained + 3)
        impatient.end(job_id)
        steps = impatient.reported_steps(job_id)
        assert steps == list(range(1, len(steps) + 1))
        first, second = impatient.attempts(job_id)
        assert (first["end"], first["last_step"]) == ("stopped", trained)
        assert second["first_step"] == trained + 1
