"""The check of an artifact finds what it is there to find."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from worker.trainer.verify import verify
from worker.workspace import Workspace

from .conftest import EXPERTS, train_here, workspace_in

PROMPT = [{"role": "user", "content": "What is capital number 1?"}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, gpt_oss_mxfp4: Path) -> Workspace:
    """A finished run on MXFP4 weights in bfloat16, experts adapted."""
    evaluation = {"prompts": [PROMPT], "max_new_tokens": 8}
    sections: dict[str, Any] = {"adapter": EXPERTS, "model": {"dtype": "bfloat16"}, "evaluation": evaluation}
    workspace = workspace_in(tmp_path_factory.mktemp("finished"), "w", gpt_oss_mxfp4, **sections)
    train_here(workspace)
    return workspace


@pytest.fixture
def trained(finished: Workspace, tmp_path: Path) -> Workspace:
    """A copy of it, for the test to spoil."""
    return copied(finished, tmp_path / "w")


def copied(workspace: Workspace, root: Path) -> Workspace:
    return Workspace(Path(shutil.copytree(workspace.root, root)))


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


@pytest.mark.parametrize("missing", ["generation_config.json", "README.md", "tokenizer.json"])
def test_a_missing_companion_of_the_weights_is_named(trained: Workspace, missing: str) -> None:
    (trained.export / "adapter" / missing).unlink()
    found = verify(trained, trained.export)
    assert not found.ok
    assert f"adapter/{missing} is missing" in found.message


def test_another_chat_template_is_found(trained: Workspace) -> None:
    folder = trained.export / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    found = verify(trained, trained.export)
    assert not found.ok
    assert "the chat template of adapter is not the one that was trained with" in found.message


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def finished_merge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gpt_oss_mxfp4: Path) -> Workspace:
    """A finished run that exports base and adapter in one, too."""
    sections: dict[str, Any] = {"adapter": EXPERTS, "model": {"dtype": request.param}, "export": {"merged": True}}
    workspace = workspace_in(tmp_path_factory.mktemp("merged"), "m", gpt_oss_mxfp4, **sections)
    train_here(workspace)
    return workspace


class TestMergedExport:
    """Base and adapter in one, in bfloat16 and in float32."""

    @pytest.fixture
    def merged(self, finished_merge: Workspace, tmp_path: Path) -> Workspace:
        return copied(finished_merge, tmp_path / "m")

    def test_a_good_merge_differs_by_the_rounding_of_its_weights_only(self, merged: Workspace) -> None:
        found = verify(merged, merged.export)
        assert found.ok, found.message
        assert found.merged_difference_from_live is not None
        assert found.merged_rounding is not None
        assert abs(found.merged_difference_from_live - found.merged_rounding) <= found.tolerance
        is_exact = "float32" in merged.spec.read_text()
        assert (found.merged_difference_from_live <= found.tolerance) is is_exact

    def test_a_merge_without_the_adapter_is_found(self, merged: Workspace, gpt_oss: Path) -> None:
        path = merged.export / "merged" / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if "experts.down_proj" in name and "bias" not in name]:
            tensors[name] = load_file(gpt_oss / "model.safetensors")[name].to(tensors[name].dtype)
        save_file(tensors, path, metadata={"format": "pt"})
        found = verify(merged, merged.export)
        assert not found.ok
        assert "logits of the merge differ from base and adapter by" in found.message

    def test_a_missing_tensor_of_the_merge_is_named(self, merged: Workspace) -> None:
        path = merged.export / "merged" / "model.safetensors"
        tensors = load_file(path)
        del tensors["model.norm.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
        found = verify(merged, merged.export)
        assert not found.ok
        assert "model.norm.weight is missing" in found.message

    def test_a_merge_that_is_not_there_is_named(self, merged: Workspace) -> None:
        shutil.rmtree(merged.export / "merged")
        found = verify(merged, merged.export)
        assert not found.ok
        assert "merged holds no weights" in found.message
        assert found.merged_difference_from_live is None
