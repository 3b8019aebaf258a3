"""A job in MLflow: a real server, every figure of every step, and a registered model that answers."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from mlflow import MlflowClient
from openai import BadRequestError
from openai.types.fine_tuning import FineTuningJob

from tests import tiny
from tests.servers import free_port
from tests.service import Service, processes_of, running, trainer_processes_of, wait_until

pytestmark = pytest.mark.slow

TOKEN = "mlflow-token-of-a-test"
SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4},
    "data": {"max_length": 256},
    "training": {"per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 0.02},
}


class MlflowServer:
    """`mlflow server` on SQLite, which may be away for a while."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        stores = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination", str(self.folder)]
        with (self.folder / "log").open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "mlflow", *command, *stores], stdout=out, stderr=out)
        wait_until(self._answers, "MLflow answers", 120)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"{self.url}/health").status_code == 200
        return False


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow") / "up")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A server that is allowed and does not run yet."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow") / "away")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, model: Path, mlflow_server: MlflowServer, away: MlflowServer
) -> Iterator[Service]:
    environment = {
        "TUNEYARD_MODEL_ROOTS": json.dumps([str(model.parent)]),
        "TUNEYARD_MLFLOW_TRACKING_URI": mlflow_server.url,
        "TUNEYARD_MLFLOW_ALLOWED_URIS": json.dumps([away.url]),
    }
    with running(tmp_path_factory.mktemp("service") / "data", **environment) as service:
        headers = {"Authorization": f"Bearer {service.key}"}
        secret = {"name": "mlflow", "value": TOKEN}
        httpx2.post(f"{service.url}/secrets", json=secret, headers=headers).raise_for_status()
        yield service


@pytest.fixture(scope="module")
def training_file(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    return service.upload(tiny.write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", tiny.chat_rows(16)))


def _create(service: Service, model: Path, training_file: str, spec: dict[str, Any], **wanted: Any) -> str:
    integration: Any = {"type": "mlflow", "mlflow": {"experiment": "support"} | wanted}
    return service.create_job(model, training_file, spec, integrations=[integration]).id


def _run_of(service: Service, job_id: str) -> dict[str, Any]:
    tracking = (service.client.fine_tuning.jobs.retrieve(job_id).model_extra or {})["tracking"]
    return dict(tracking[0]) if tracking else {}


@pytest.fixture(scope="module")
def finished(service: Service, model: Path, training_file: str, mlflow_server: MlflowServer) -> FineTuningJob:
    """A job that MLflow was told about to the end."""
    wanted = {"register_as": "main.default.support", "tags": {"team": "blue"}, "secrets": {"MLFLOW_TRACKING_TOKEN": "mlflow"}}
    job_id = _create(service, model, training_file, SPEC | {"export": {"merged": True}}, run_name="first", **wanted)
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    _wait_for_run(service, job_id, mlflow_server)
    return service.client.fine_tuning.jobs.retrieve(job_id)


def _wait_for_run(service: Service, job_id: str, server: MlflowServer) -> None:
    client = MlflowClient(server.url)

    def has_ended() -> bool:
        run_id = _run_of(service, job_id).get("run_id")
        return run_id is not None and client.get_run(run_id).info.status != "RUNNING"

    wait_until(has_ended, "the run has ended in MLflow")


def test_the_job_names_its_run_and_mlflow_has_every_figure_of_every_step(
    service: Service, finished: FineTuningJob, mlflow_server: MlflowServer
) -> None:
    facts, client = _run_of(service, finished.id), MlflowClient(mlflow_server.url)
    run = client.get_run(facts["run_id"])
    assert run.info.experiment_id == facts["experiment_id"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.tags["tuneyard.job_id"] == finished.id
    assert run.data.tags["team"] == "blue"
    assert run.data.params["training.learning_rate"] == "0.02"
    history = client.get_metric_history(facts["run_id"], "loss")
    assert [metric.step for metric in history] == list(range(1, 9))
    assert [metric.value for metric in history] == service.losses(finished.id)
    assert {"grad_norm", "learning_rate", "mean_token_accuracy", "tokens_per_second", "trained_tokens"} <= set(run.data.metrics)


def test_the_result_is_among_the_runs_artifacts(service: Service, finished: FineTuningJob, mlflow_server: MlflowServer) -> None:
    client, run_id = MlflowClient(mlflow_server.url), _run_of(service, finished.id)["run_id"]
    assert {file.path for file in client.list_artifacts(run_id, "result")} >= {"result/manifest.json", "result/adapter"}
    assert {"model/MLmodel", "model/model"} <= {file.path for file in client.list_artifacts(run_id, "model")}


def test_the_registered_model_loads_and_answers(finished: FineTuningJob, mlflow_server: MlflowServer, service: Service) -> None:
    facts = _run_of(service, finished.id)
    assert (facts["registered_model"], facts["model_version"]) == ("main.default.support", "1")
    assert _answer(mlflow_server, "models:/main.default.support/1")


def test_a_bare_adapter_loads_on_its_base_and_answers(
    service: Service, model: Path, training_file: str, mlflow_server: MlflowServer
) -> None:
    job_id = _create(service, model, training_file, SPEC, register_as="main.default.adapter")
    assert service.wait_for_end(job_id).status == "succeeded"
    _wait_for_run(service, job_id, mlflow_server)
    assert _answer(mlflow_server, "models:/main.default.adapter/1")


def test_a_server_that_is_away_is_a_warning_and_gets_everything_later(
    service: Service, model: Path, training_file: str, away: MlflowServer
) -> None:
    job_id = _create(service, model, training_file, SPEC, tracking_uri=away.url)
    assert service.wait_for_end(job_id).status == "succeeded"
    wait_until(lambda: any("is tried again" in text for text in _told(service, job_id)), "the outage is told")
    away.start()
    wait_until(lambda: "mlflow has this job's figures again" in _told(service, job_id), "the outage is over")
    run = MlflowClient(away.url).get_run(_run_of(service, job_id)["run_id"])
    assert run.info.status == "FINISHED"
    assert len(MlflowClient(away.url).get_metric_history(run.info.run_id, "loss")) == 8
    assert len([told for told in _told(service, job_id) if "is tried again" in told]) == 1


def test_a_tracker_that_is_killed_goes_on_where_it_was(
    service: Service, model: Path, training_file: str, mlflow_server: MlflowServer
) -> None:
    spec = SPEC | {"training": {"max_steps": 150, "per_device_train_batch_size": 4}}
    job_id = _create(service, model, training_file, spec, register_as="main.default.killed")
    client = MlflowClient(mlflow_server.url)
    wait_until(lambda: "run_id" in _run_of(service, job_id), "the run is known")
    service.wait_for_step(job_id, 3)
    with _held(trainer_processes_of(job_id)):
        _tracker_of(job_id).kill()
        wait_until(lambda: _is_running(job_id), "the node has started it again")
        second = _tracker_of(job_id)
        second.suspend()
    assert service.wait_for_end(job_id).status == "succeeded"
    run_id = _run_of(service, job_id)["run_id"]
    assert client.get_run(run_id).info.status == "RUNNING"
    second.kill()  # nobody but the node is left to notice
    _wait_for_run(service, job_id, mlflow_server)
    figures = client.get_run(run_id).data.metrics
    for name in figures:
        assert [metric.step for metric in client.get_metric_history(run_id, name)] == list(range(1, 151)), name
    assert [metric.value for metric in client.get_metric_history(run_id, "loss")] == service.losses(job_id)
    assert {file.path for file in client.list_artifacts(run_id)} == {"model", "result"}
    assert _run_of(service, job_id)["model_version"] == "1"
    wait_until(lambda: not _is_running(job_id), "the tracker has ended")
    assert list((service.data_dir / "workspace" / "trackers").glob(f"{job_id}.*")) == []


@contextlib.contextmanager
def _held(processes: list[psutil.Process]) -> Iterator[None]:
    """Processes that do not move during the block."""
    for process in processes:
        process.suspend()
    yield
    for process in processes:
        process.resume()


def _tracker_of(job_id: str) -> psutil.Process:
    return next(process for process in processes_of(job_id) if "worker.tracking" in process.cmdline())


def _is_running(job_id: str) -> bool:
    return any("worker.tracking" in process.cmdline() for process in processes_of(job_id))


def test_a_cancelled_job_is_a_killed_run(
    service: Service, model: Path, training_file: str, mlflow_server: MlflowServer
) -> None:
    spec = SPEC | {"training": {"max_steps": 100_000, "per_device_train_batch_size": 4}}
    job_id = _create(service, model, training_file, spec)
    service.wait_for_step(job_id, 2)
    wait_until(lambda: "run_id" in _run_of(service, job_id), "the run is known")
    service.client.fine_tuning.jobs.cancel(job_id)
    _wait_for_run(service, job_id, mlflow_server)
    assert MlflowClient(mlflow_server.url).get_run(_run_of(service, job_id)["run_id"]).info.status == "KILLED"


def test_a_server_that_no_operator_allowed_is_refused(service: Service, model: Path, training_file: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        _create(service, model, training_file, SPEC, tracking_uri="http://169.254.169.254/")
    assert caught.value.code == "tracking_uri_not_allowed"


def test_the_trackers_token_is_nowhere(service: Service, finished: FineTuningJob) -> None:
    assert TOKEN not in finished.model_dump_json()
    files = (path for path in service.data_dir.rglob("*") if path.is_file())
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def _told(service: Service, job_id: str) -> list[str]:
    """The messages of a job's story, newest first."""
    events = service.client.fine_tuning.jobs.list_events(job_id, limit=100).data
    return [event.message for event in events]


def _answer(server: MlflowServer, uri: str) -> str:
    """What a model of the registry says, in a process that knows MLflow only."""
    script = f"""
import mlflow
pipeline = mlflow.transformers.load_model({uri!r})
chat = [{{"role": "user", "content": "What is capital number 1?"}}]
print("ANSWER", pipeline(chat, max_new_tokens=8, do_sample=False)[0]["generated_text"][-1]["content"])
"""
    environment = os.environ | {"MLFLOW_TRACKING_URI": server.url, "HF_HUB_OFFLINE": "1"}
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.partition("ANSWER ")[2].strip()
