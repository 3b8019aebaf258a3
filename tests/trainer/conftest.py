"""Tiny checkpoints for the session, workspaces, and runs of the trainer in this process or under torchrun."""

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.jobs.spec import TrainingSpec
from tests import tiny
from worker.trainer.train import train
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace, read_json

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
TIMEOUT_S = 180  # far more than any run here takes; only a hang meets it
EXPERTS = {
    "r": 8,
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {"mlp.experts.gate_up_proj": 4, "mlp.experts.down_proj": 4},
}

MakeWorkspace = Callable[..., Workspace]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="session")
def gpt_oss_mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_gpt_oss(tmp_path_factory.mktemp("gpt-oss-mxfp4"), mxfp4=True)


@pytest.fixture(scope="session")
def chatml(llama: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(llama)
    return tokenizer


@pytest.fixture(scope="session")
def harmony(gpt_oss: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gpt_oss)
    return tokenizer


@pytest.fixture
def make_workspace(tmp_path: Path) -> MakeWorkspace:
    """`workspace_in` the test's own folder."""
    return partial(workspace_in, tmp_path)


@pytest.fixture
def run_here() -> Callable[[Workspace], Trainer]:
    """Run the trainer in this process: one rank, no process group."""
    return train_here


def workspace_in(
    folder: Path, name: str, model: Path, /, *, rows: list[dict[str, Any]] | None = None, ranks: int = 1, **sections: Any
) -> Workspace:
    """A workspace as the service prepares one: float32, CPU, 16 chat rows, 2 rows per rank and step, 2 epochs."""
    workspace = Workspace(folder / name)
    spec: dict[str, Any] = {
        "model": {"name_or_path": str(model), "dtype": "float32"},
        "resources": {"accelerator": "cpu"},
        "parallelism": {"nproc_per_node": ranks},
        "data": {"max_length": 512, "template_date": "2026-01-01"},
        "training": {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01},
    }
    for section, values in sections.items():
        spec[section] = spec.get(section, {}) | values if isinstance(values, dict) else values
    workspace.root.mkdir()
    workspace.spec.write_text(TrainingSpec.model_validate(spec).model_dump_json(), encoding="utf-8")
    tiny.write_rows(workspace.train_data, rows or tiny.chat_rows(16))
    return workspace


def train_here(workspace: Workspace) -> Trainer:
    """What `run_here` gives; it leaves the process's answer to SIGTERM as it was."""
    handler = signal.getsignal(signal.SIGTERM)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        trainer = train(workspace)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert trainer is not None
    return trainer


def torchrun(workspace: Workspace, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """The very line of train.py's docstring."""
    return run([*TORCHRUN, str(ranks), "-m", "worker.trainer.train", str(workspace.root)], **environment)


def verify(workspace: Workspace) -> dict[str, Any]:
    """The verification of a finished workspace, from a process of its own."""
    command = [sys.executable, "-m", "worker.trainer.verify", str(workspace.root), str(workspace.export)]
    done = run(command)
    assert done.returncode == 0, done.stderr
    verification: dict[str, Any] = read_json(workspace.verification)
    return verification


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a workspace's .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses(workspace: Workspace) -> dict[int, float]:
    """Training loss by step."""
    return {line["step"]: line["values"]["loss"] for line in lines(workspace.metrics) if "loss" in line["values"]}


def exported(workspace: Workspace) -> dict[str, torch.Tensor]:
    """The tensors of the artifact."""
    (path,) = workspace.export.glob("*/*.safetensors")
    return load_file(path)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, from the root of the repository."""
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
