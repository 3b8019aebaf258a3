"""The check of an artifact finds what it is there to find."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.trainer.trainers import Trainer
from worker.trainer.verify import verify
from worker.workspace import Workspace

from .conftest import EXPERTS, MakeWorkspace

PROMPT = [{"role": "user", "content": "What is capital number 1?"}]


@pytest.fixture
def trained(make_workspace: MakeWorkspace, gpt_oss_mxfp4: Path, run_here: Callable[[Workspace], Trainer]) -> Workspace:
    """A finished run on MXFP4 weights in bfloat16, experts adapted."""
    evaluation = {"prompts": [PROMPT], "max_new_tokens": 8}
    workspace = make_workspace("w", gpt_oss_mxfp4, adapter=EXPERTS, model={"dtype": "bfloat16"}, evaluation=evaluation)
    run_here(workspace)
    return workspace


def change(workspace: Workspace, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of an exported adapter."""
    path = workspace.export / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def expert_b(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    return (name for name in tensors if "experts" in name and "lora_B" in name)


def test_a_good_artifact_is_as_the_live_model_and_not_as_the_base(trained: Workspace) -> None:
    found = verify(trained, trained.export)
    assert found.ok, found.message
    assert found.max_difference_from_live is not None
    assert found.max_difference_from_base is not None
    assert found.max_difference_from_live <= found.tolerance < 1e-2
    assert found.max_difference_from_base > 0.1
    assert found.num_tensors == 24
    (answer,) = found.answers
    assert answer["messages"] == PROMPT
    assert answer["base"] != answer["tuned"]


def test_half_a_tensor_at_its_start_value_is_found(trained: Workspace) -> None:
    def lose_a_shard(tensors: dict[str, torch.Tensor]) -> None:
        for name in expert_b(tensors):
            tensors[name][: len(tensors[name]) // 2] = 0

    change(trained, lose_a_shard)
    found = verify(trained, trained.export)
    assert not found.ok
    assert "differ from the live model" in found.message


def test_experts_that_learned_nothing_are_named(trained: Workspace) -> None:
    change(trained, lambda tensors: [tensors[name].zero_() for name in expert_b(tensors)])
    found = verify(trained, trained.export)
    assert not found.ok
    assert "experts.lora_B.weight is zero" in found.message


def test_a_missing_tensor_is_named(trained: Workspace) -> None:
    change(trained, lambda tensors: tensors.pop(next(expert_b(tensors))))
    found = verify(trained, trained.export)
    assert not found.ok
    assert "lora_B.weight is missing" in found.message


def test_a_value_that_is_not_finite_is_named(trained: Workspace) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(expert_b(tensors))].view(-1)[0] = float("nan")

    change(trained, poison)
    found = verify(trained, trained.export)
    assert not found.ok
    assert "not finite" in found.message
    assert found.max_difference_from_live is None
