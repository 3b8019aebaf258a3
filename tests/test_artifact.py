"""What a user downloads: whole, signed, able to talk as it was trained; and the same again from a rerun."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai.types.fine_tuning import FineTuningJob
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from app.cli import cli
from tests import tiny
from tests.service import Service, running

pytestmark = pytest.mark.slow

# A turn of its own making: nothing of the base's template is in it.
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
SPEC: dict[str, Any] = {
    "adapter": {"r": 4, "alpha": 8},
    "data": {"max_length": 256, "chat_template": TEMPLATE, "thinking": "drop", "template_date": "2026-01-02"},
    "training": {"learning_rate": 0.02, "per_device_train_batch_size": 4, "num_train_epochs": 1},
    "export": {"merged": True},
    "parallelism": {"nproc_per_node": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running(folder / "data", TUNEYARD_MODEL_ROOTS=json.dumps([str(model.parent)])) as service:
        yield service


@pytest.fixture(scope="module")
def finished(service: Service, model: Path, tmp_path_factory: pytest.TempPathFactory) -> FineTuningJob:
    """A job in bfloat16 on two ranks, with a template of its own and a merged export."""
    rows = tiny.write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", tiny.chat_rows(16))
    job = service.wait_for_end(service.create_job(model, service.upload(rows), SPEC).id)
    assert job.status == "succeeded", job.error
    return job


@pytest.fixture(scope="module")
def downloaded(service: Service, finished: FineTuningJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service.download(finished.id, tmp_path_factory.mktemp("downloaded"))


@pytest.fixture(scope="module")
def manifest(downloaded: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((downloaded / "manifest.json").read_text())
    return manifest


def test_a_download_is_good_by_the_public_key_alone(service: Service, downloaded: Path, tmp_path: Path) -> None:
    answer = httpx2.get(f"{service.url}/signing_key", headers={"Authorization": f"Bearer {service.key}"})
    (tmp_path / "key.json").write_bytes(answer.raise_for_status().content)
    shown = CliRunner().invoke(cli, ["verify", str(downloaded), "--public-key", str(tmp_path / "key.json")])
    assert shown.output.startswith("good: ")
    assert shown.exit_code == 0


def test_the_manifest_says_what_the_result_was_made_from(
    model: Path, finished: FineTuningJob, manifest: dict[str, Any], service: Service
) -> None:
    assert manifest["spec"] == (finished.model_extra or {})["spec"]
    assert manifest["seed"] == finished.seed
    weights = (model / "model.safetensors").read_bytes()
    assert manifest["base"]["files"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    rows = (service.data_dir / "workspace" / finished.id / "1" / "data" / "train.jsonl").read_bytes()
    assert manifest["data"]["training"] == {"source": finished.training_file, "sha256": hashlib.sha256(rows).hexdigest()}
    (attempt,) = manifest["attempts"]
    assert attempt["attempt"] == 1
    assert attempt["started_at"] > 0
    assert manifest["hardware"]["accelerator"] == "cpu"
    assert manifest["trained_tokens"] == finished.trained_tokens


def test_the_verification_stands_in_the_manifest_with_its_figures(manifest: dict[str, Any]) -> None:
    figures = manifest["verification"]
    assert figures["max_difference_from_live"] <= figures["tolerance"] < figures["max_difference_from_base"]
    # bfloat16: the merge is off by what rounding its weights costs, and by nothing else.
    assert abs(figures["merged_difference_from_live"] - figures["merged_rounding"]) <= figures["tolerance"]


@pytest.mark.parametrize("folder", ["adapter", "merged"])
def test_the_artifact_talks_as_it_was_trained(
    service: Service, finished: FineTuningJob, downloaded: Path, manifest: dict[str, Any], folder: str
) -> None:
    assert manifest["chat_template_sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    tokenizer = AutoTokenizer.from_pretrained(downloaded / folder)
    rendered: Any = tokenizer.apply_chat_template(tiny.chat_rows(16)[0]["messages"], return_dict=True)
    workspace = service.data_dir / "workspace" / finished.id / "1"
    assert rendered["input_ids"] == load_file(workspace / "probe.safetensors")["input_ids"][0].tolist()


def test_a_job_goes_on_from_a_result(service: Service, finished: FineTuningJob, downloaded: Path, tmp_path: Path) -> None:
    rows = tiny.write_rows(tmp_path / "train.jsonl", tiny.chat_rows(16))
    assert finished.fine_tuned_model is not None
    training = {"learning_rate": 1e-9, "per_device_train_batch_size": 4, "max_steps": 1}
    job = service.create_job(finished.fine_tuned_model, service.upload(rows), SPEC | {"training": training, "adapter": {}})
    assert service.wait_for_end(job.id).status == "succeeded"
    again = service.download(job.id, tmp_path / "again")
    before, after = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (downloaded, again))
    assert all((after[name] - value).abs().max() < 1e-6 for name, value in before.items())
    sha256 = hashlib.sha256((downloaded / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
    continues = {"model": finished.fine_tuned_model, "files": {"adapter_model.safetensors": sha256}}
    assert json.loads((again / "manifest.json").read_text())["continues"] == continues


def test_a_rerun_gives_the_same_losses_and_weights(
    service: Service, finished: FineTuningJob, manifest: dict[str, Any], tmp_path: Path
) -> None:
    answer = service.client.post(f"/fine_tuning/jobs/{finished.id}/rerun", cast_to=object)
    assert isinstance(answer, dict)
    again = service.wait_for_end(answer["id"])
    assert again.status == "succeeded", again.error
    assert service.losses(again.id) == service.losses(finished.id)
    repeated = json.loads((service.download(again.id, tmp_path) / "manifest.json").read_text())
    assert repeated["rerun_of"] == finished.id
    weights = [name for name in manifest["files"] if name.endswith(".safetensors")]
    assert len(weights) == 2
    assert {name: repeated["files"][name] for name in weights} == {name: manifest["files"][name] for name in weights}
