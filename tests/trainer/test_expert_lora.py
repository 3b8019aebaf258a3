"""The low-rank forward of adapted experts is PEFT's, number for number, and is taken."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from app.jobs.spec import TrainingSpec
from worker.trainer import expert_lora
from worker.trainer.model import load_model

from .conftest import EXPERTS

IDS = torch.arange(3, 60).unsqueeze(0)
# float32 of both ways differs by its rounding only: measured 8e-7 in logits; a wrong scale shows as 1e-2 and more.
assert_same = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def model_of(path: Path, choice: str, **adapter: Any) -> PeftModel:
    """The tiny gpt-oss with adapted experts, and no B that is zero: a fresh adapter would hide any fault."""
    sections = {"name_or_path": str(path), "dtype": "float32"}
    spec = {"model": sections, "adapter": EXPERTS | adapter | {"low_rank_experts": choice}, "resources": {"accelerator": "cpu"}}
    model = load_model(TrainingSpec.model_validate(spec))
    assert isinstance(model, PeftModel)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def outcome(model: PeftModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of every adapter weight."""
    logits = model(input_ids=IDS).logits
    logits.float().pow(2).mean().backward()
    return logits.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per call of the low-rank forward."""
    seen: list[int] = []
    original = expert_lora.low_rank_forward

    def counted(*args: Any) -> torch.Tensor:
        seen.append(1)
        return original(*args)

    monkeypatch.setattr(expert_lora, "low_rank_forward", counted)
    return seen


@pytest.mark.parametrize(
    "adapter", [{}, {"target_modules": []}, {"target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {}}]
)
def test_logits_and_gradients_are_pefts(gpt_oss: Path, calls: list[int], adapter: dict[str, Any]) -> None:
    ours, peft = outcome(model_of(gpt_oss, "on", **adapter)), outcome(model_of(gpt_oss, "off", **adapter))
    assert len(calls) == 2  # once a layer, and only with the model that asked for it
    assert_same(ours[0], peft[0])
    assert ours[1].keys() == peft[1].keys()
    for name, gradient in peft[1].items():
        assert_same(ours[1][name], gradient)


def test_another_scale_would_be_seen(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peft = model_of(gpt_oss, "on"), model_of(gpt_oss, "off")
    factors = expert_lora._factors
    monkeypatch.setattr(expert_lora, "_factors", lambda wrapper: (factors(wrapper)[0], factors(wrapper)[1] / 2))
    with pytest.raises(AssertionError):
        assert_same(outcome(ours)[0], outcome(peft)[0])


def test_parameters_files_and_merges_are_pefts(gpt_oss: Path, tmp_path: Path) -> None:
    ours, peft = model_of(gpt_oss, "on"), model_of(gpt_oss, "off")
    assert {name: value.shape for name, value in ours.named_parameters()} == {
        name: value.shape for name, value in peft.named_parameters()
    }
    live, _ = outcome(ours)
    ours.save_pretrained(str(tmp_path))
    reloaded = PeftModel.from_pretrained(peft.unload(), str(tmp_path))
    assert_same(reloaded(input_ids=IDS).logits, live)
    assert_same(ours.merge_and_unload()(input_ids=IDS).logits, live)


def test_without_the_adapter_the_base_answers(gpt_oss: Path, calls: list[int]) -> None:
    ours, peft = model_of(gpt_oss, "on"), model_of(gpt_oss, "off")
    with ours.disable_adapter(), peft.disable_adapter():
        assert torch.equal(ours(input_ids=IDS).logits, peft(input_ids=IDS).logits)
    assert not calls


def test_on_cpu_it_is_on_unless_the_job_says_otherwise(gpt_oss: Path, calls: list[int]) -> None:
    outcome(model_of(gpt_oss, "auto"))
    assert len(calls) == 2
