"""The base is what its checkpoint says, the adapter is where the job wants it, and packed rows do not see each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from app.jobs.spec import TrainingSpec
from tests import tiny
from worker.trainer.dequantized import CACHE_VARIABLE, LIMIT_VARIABLE
from worker.trainer.failures import TrainerError
from worker.trainer.model import (
    EXACT_PACKING,
    adapted_kinds,
    is_mxfp4,
    load_base,
    load_config,
    load_model,
    load_tokenizer,
    packing_is_exact,
)

from .conftest import EXPERTS


def spec_of(model: Path | str, /, *, dtype: str = "float32", **sections: Any) -> TrainingSpec:
    base = {"model": {"name_or_path": str(model), "dtype": dtype}, "resources": {"accelerator": "cpu"}}
    return TrainingSpec.model_validate(base | sections)


class TestMxfp4:
    def test_is_dequantized_to_what_the_format_says(self, gpt_oss_mxfp4: Path) -> None:
        spec = spec_of(gpt_oss_mxfp4, dtype="bfloat16")
        stored, weights = load_file(gpt_oss_mxfp4 / "model.safetensors"), load_base(spec).state_dict()
        experts = [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        assert len(experts) == 4
        for name in experts:
            expected = tiny.from_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(weights[name], expected)
        for name in set(weights) - set(experts):
            assert torch.equal(weights[name], stored[name])

    def test_loads_as_a_plain_trainable_model(self, gpt_oss_mxfp4: Path) -> None:
        spec = spec_of(gpt_oss_mxfp4)
        assert is_mxfp4(load_config(spec.model))
        model = load_model(spec)
        assert not hasattr(model.config, "quantization_config")
        assert any(parameter.requires_grad for parameter in model.parameters())

    def test_the_test_quantizer_keeps_four_bits_of_the_weights(self) -> None:
        torch.manual_seed(0)
        weight = torch.randn(2, 64, 32)
        error = (tiny.from_mxfp4(*tiny.to_mxfp4(weight)).float() - weight).abs().reshape(2, -1, tiny.MXFP4_BLOCK, 32)
        # A block's largest weight, in [4, 8) of its scale, is the worst case: a gap of 2 in [4, 6], and 8 clips to 6.
        largest = weight.abs().reshape(2, -1, tiny.MXFP4_BLOCK, 32).amax(dim=2, keepdim=True)
        assert error.max() > 0
        assert (error <= largest / 4 + 2**-8 * largest).all()


class TestDequantizedCache:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
        return tmp_path / "cache"

    def copies(self, cache: Path) -> list[Path]:
        return sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)

    def test_gives_the_weights_that_dequantizing_gives(
        self, gpt_oss_mxfp4: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = spec_of(gpt_oss_mxfp4, dtype="bfloat16")
        copied = load_base(spec).state_dict()
        assert len(self.copies(cache)) == 1
        monkeypatch.delenv(CACHE_VARIABLE)
        for name, value in load_base(spec).state_dict().items():
            assert torch.equal(copied[name], value)

    @pytest.mark.usefixtures("cache")
    def test_is_made_once(self, gpt_oss_mxfp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        load_base(spec_of(gpt_oss_mxfp4))
        monkeypatch.setattr("worker.trainer.model._load_mxfp4", lambda *_: pytest.fail("dequantized twice"))
        load_base(spec_of(gpt_oss_mxfp4))

    def test_of_a_checkpoint_that_changed_is_made_anew(self, tmp_path: Path, cache: Path) -> None:
        for seed in (0, 1):
            tiny.build_gpt_oss(tmp_path / "model", mxfp4=True, seed=seed)
            load_base(spec_of(tmp_path / "model"))
        assert len(self.copies(cache)) == 2

    def test_what_a_killed_rank_left_is_not_used(self, gpt_oss_mxfp4: Path, cache: Path) -> None:
        load_base(spec_of(gpt_oss_mxfp4))
        (copy,) = self.copies(cache)
        copy.rename(copy.with_suffix(".tmp"))
        (copy.with_suffix(".tmp") / "model.safetensors").write_bytes(b"half")
        load_base(spec_of(gpt_oss_mxfp4))
        assert self.copies(cache) == [copy]

    def test_deletes_what_was_used_longest_ago(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        models = [tiny.build_gpt_oss(tmp_path / str(seed), mxfp4=True, seed=seed) for seed in range(3)]
        for model in (*models[:2], models[0]):
            load_base(spec_of(model))
        second, first = self.copies(cache)
        size = sum(path.stat().st_size for path in first.iterdir())
        monkeypatch.setenv(LIMIT_VARIABLE, str(2.5 * size / 1e9))
        load_base(spec_of(models[2]))
        left = self.copies(cache)
        assert len(left) == 2
        assert first in left
        assert second not in left


class TestAdapter:
    def test_all_linear_alone_leaves_the_experts_out(self, gpt_oss: Path) -> None:
        assert adapted_kinds(load_model(spec_of(gpt_oss))) == {"attention": 8}

    def test_reaches_the_experts_of_every_layer_with_their_own_rank(self, gpt_oss: Path) -> None:
        model = load_model(spec_of(gpt_oss, adapter=EXPERTS))
        assert adapted_kinds(model) == {"attention": 8, "experts": 4}
        ranks = {next(iter(value.shape)) for name, value in model.named_parameters() if "experts" in name and "lora_A" in name}
        assert ranks == {4 * 4}  # rank 4 for each of 4 experts, not the adapter's 8

    @pytest.mark.parametrize(
        ("adapter", "param"),
        [
            ({"target_modules": ["q_proj", "w_proj"]}, "adapter.target_modules"),
            ({"target_parameters": ["mlp.experts.gate_proj"]}, "adapter.target_parameters"),
            ({"rank_pattern": {"mlp.expert.down_proj": 4}}, "adapter.rank_pattern"),
        ],
    )
    def test_a_target_that_is_not_there_is_named(self, gpt_oss: Path, adapter: dict[str, Any], param: str) -> None:
        with pytest.raises(TrainerError, match="adapter_target_unmatched") as caught:
            load_model(spec_of(gpt_oss, adapter=adapter))
        assert caught.value.failure.param == param

    def test_starts_from_the_same_weights_with_the_same_seed(self, llama: Path) -> None:
        first, second = load_model(spec_of(llama)), load_model(spec_of(llama))
        other = load_model(spec_of(llama, seed=1))
        name = next(name for name in first.state_dict() if "lora_A" in name)
        assert torch.equal(first.state_dict()[name], second.state_dict()[name])
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


class TestMissingModels:
    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TrainerError, match="model_not_found"):
            load_tokenizer(spec_of(tmp_path / "nothing"))

    def test_a_hub_id_that_cannot_be_had_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment's word counts at import only
        with pytest.raises(TrainerError, match="model_not_found"):
            load_tokenizer(spec_of("nobody/no-such-model"))

    def test_pickled_weights_are_not_loaded(self, llama: Path, tmp_path: Path) -> None:
        for path in llama.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        torch.save(load_file(llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
        with pytest.raises(TrainerError, match="model_not_found"):
            load_base(spec_of(tmp_path))

    def test_code_in_the_model_folder_is_not_run(self, llama: Path, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
        (tmp_path / "config.json").write_text(
            '{"model_type": "evil", "auto_map": {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}}'
        )
        with pytest.raises(TrainerError, match="remote_code_not_allowed"):
            load_base(spec_of(tmp_path))
        assert not marker.exists()


def small(model_type: str, attention: str) -> Any:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    return model.eval()


def packing_error(model: Any) -> float:
    """Largest difference of a row's logits between a packed sequence and one of its own."""
    rows = [torch.randint(1, 128, (1, length)) for length in (11, 23, 5)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(rows, dim=1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], dim=1)
    return float((packed - alone).abs().max())


class TestPacking:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("model_type", sorted(EXACT_PACKING))
    def test_rows_of_one_sequence_do_not_see_each_other(self, model_type: str, attention: str) -> None:
        model = small(model_type, attention)
        assert packing_is_exact(model.config)
        assert packing_error(model) < 1e-5

    def test_is_not_claimed_for_a_model_that_nobody_checked(self) -> None:
        assert not packing_is_exact(AutoConfig.for_model("gpt2"))
