"""The base model of the demo: converted once, whole or not at all, and still the model it was."""

from pathlib import Path
from typing import Any

import pytest

from demo import base_model


def test_a_model_that_is_there_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "_convert", None)
    (tmp_path / base_model.NAME).mkdir()
    assert base_model.prepare(tmp_path) == tmp_path / base_model.NAME


def test_a_conversion_that_breaks_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(base_model, "_convert", breaks)
    with pytest.raises(OSError, match="No space left"):
        base_model.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_conversions_at_once_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def converts_second(source: Path, target: Path) -> None:
        for folder, name in ((tmp_path / base_model.NAME, "first"), (target, "second")):
            folder.mkdir()
            (folder / name).touch()

    monkeypatch.setattr(base_model, "_convert", converts_second)
    assert [path.name for path in base_model.prepare(tmp_path).iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == [base_model.NAME]


@pytest.mark.slow
def test_the_converted_model_is_plain_and_still_answers(tmp_path: Path) -> None:
    folder = base_model.prepare(tmp_path)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert "quantization_config" not in (folder / "config.json").read_text(encoding="utf-8")
    assert answer(folder, "What is the capital of Australia?") == "The capital of Australia is Canberra."


def answer(folder: Path, question: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
