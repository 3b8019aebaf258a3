"""A model that cannot fit is refused before its weights are read: there are none here."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import GptOssConfig

from app.jobs.spec import ModelSection, TrainingSpec
from tests import tiny
from worker.trainer.failures import TrainerError
from worker.trainer.memory import rank_bytes, require_memory
from worker.trainer.model import num_weights

LAYERS_120B = 36


def config(folder: Path, *, layers: int = LAYERS_120B) -> Path:
    """gpt-oss-120b's shape, as its config has it: in MXFP4."""
    shape = GptOssConfig(num_hidden_layers=layers, num_local_experts=128).to_dict()
    shape |= {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def spec(folder: Path, **sections: Any) -> TrainingSpec:
    return TrainingSpec.model_validate({"model": {"name_or_path": str(folder), "dtype": "bfloat16"}} | sections)


def test_the_weights_of_the_120b_model_are_counted(tmp_path: Path) -> None:
    assert num_weights(ModelSection(name_or_path=str(config(tmp_path)))) == pytest.approx(116.83e9, rel=1e-4)


def test_an_mxfp4_base_counts_as_what_it_becomes(tmp_path: Path) -> None:
    assert rank_bytes(spec(config(tmp_path))) == pytest.approx(233.7e9, rel=1e-3)  # 65 GB on the disk


@pytest.mark.parametrize(
    ("sections", "bytes_per_weight"),
    [
        ({}, 2),
        ({"adapter": {"type": "full"}}, 16),
        ({"parallelism": {"strategy": "ddp", "nproc_per_node": 4}}, 2),
        ({"parallelism": {"strategy": "fsdp2", "nproc_per_node": 4}}, 0.5),
        ({"parallelism": {"strategy": "fsdp2", "nproc_per_node": 4, "nnodes": 2}, "adapter": {"type": "full"}}, 2),
    ],
)
def test_a_rank_holds_its_part(tmp_path: Path, sections: dict[str, Any], bytes_per_weight: float) -> None:
    folder = config(tmp_path, layers=1)
    weights = num_weights(ModelSection(name_or_path=str(folder)))
    assert rank_bytes(spec(folder, **sections)) == int(bytes_per_weight * weights)


@pytest.mark.parametrize(
    ("sections", "param"),
    [
        ({}, "model"),
        ({"adapter": {"type": "full"}}, "adapter.type"),
        ({"parallelism": {"nproc_per_node": 2}}, "parallelism.strategy"),
    ],
)
def test_a_model_larger_than_the_host_is_refused_with_both_sizes_and_what_to_set(
    tmp_path: Path, sections: dict[str, Any], param: str
) -> None:
    host = psutil.virtual_memory().total
    layers = LAYERS_120B * (1 + int(host // 200e9))
    with pytest.raises(TrainerError, match=r"at least .* GB") as caught:
        require_memory(spec(config(tmp_path, layers=layers), **sections))
    failure = caught.value.failure
    assert (failure.code, failure.param) == ("host_out_of_memory", param)
    assert f"{host / 1e9:.3g} GB" in failure.message


def test_one_that_fits_is_let_through(tmp_path: Path) -> None:
    require_memory(spec(tiny.build_llama(tmp_path)))


def test_a_model_of_a_kind_that_writes_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    with pytest.raises(TrainerError) as caught:
        require_memory(spec(tmp_path))
    assert (caught.value.failure.code, caught.value.failure.param) == ("model_not_supported", "model")
