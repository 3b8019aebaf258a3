"""Preference methods and continued pretraining: what they learn, count and refuse."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import DataSection, TrainingSpec
from tests import tiny
from worker.trainer.data import tokenize_file
from worker.trainer.failures import TrainerError
from worker.trainer.preferences import Pair
from worker.trainer.train import num_repeated
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace, read_json

from .conftest import MakeWorkspace, lines, losses, verify

RunHere = Callable[[Workspace], Trainer]
TRAINING = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01}


@pytest.mark.slow  # each proves its artifact in a process of its own
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("method", ["dpo", "orpo", "kto"])
def test_a_preference_method_learns_to_prefer(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, method: str, kind: str
) -> None:
    rows = tiny.labelled_rows(16) if method == "kto" else tiny.preference_rows(16)
    training = TRAINING | {"learning_rate": 0.01 if kind == "lora" else 0.001}
    workspace = make_workspace("w", llama, rows=rows, method=method, adapter={"type": kind}, training=training)
    run_here(workspace)
    margins = [line["values"]["rewards/margins"] for line in lines(workspace.metrics) if "rewards/margins" in line["values"]]
    assert all(math.isfinite(loss) for loss in losses(workspace).values())
    assert margins[-1] > margins[0]
    verification = verify(workspace)
    assert verification["ok"], verification["message"]


@pytest.mark.parametrize("method", ["dpo", "orpo", "kto"])
def test_trained_tokens_are_the_answers_tokens(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, chatml: PreTrainedTokenizerBase, method: str
) -> None:
    rows = tiny.labelled_rows(8) if method == "kto" else tiny.preference_rows(8)
    workspace = make_workspace("w", llama, rows=rows, method=method, training=TRAINING | {"num_train_epochs": 1})
    run_here(workspace)
    answers = [row[name][0] for row in rows for name in ("chosen", "rejected", "completion") if name in row]
    assert read_json(workspace.result)["trained_tokens"] == sum(num_answer_tokens(chatml, answer) for answer in answers)
    assert lines(workspace.metrics)[0]["tokens_per_second"] > 0


def num_answer_tokens(tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any]) -> int:
    thinking = f"<think>\n{answer['thinking']}\n</think>\n\n" if "thinking" in answer else ""
    return len(tokenizer.encode(f"{thinking}{answer['content']}<|im_end|>", add_special_tokens=False))


def test_dpo_is_held_to_the_base_and_not_to_a_copy_of_the_adapter(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
) -> None:
    workspace = make_workspace("w", llama, rows=tiny.preference_rows(8), method="dpo", training=TRAINING)
    trainer = run_here(workspace)
    assert set(trainer.accelerator.unwrap_model(trainer.model).peft_config) == {"default"}
    first = next(line["values"] for line in lines(workspace.metrics) if "loss" in line["values"])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # before the first update, model and reference are one
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)


def test_evaluation_of_preferences_is_told(make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
    for method in ("dpo", "orpo", "kto"):
        rows = tiny.labelled_rows(8) if method == "kto" else tiny.preference_rows(8)
        workspace = make_workspace(method, llama, rows=rows, method=method, training=TRAINING | {"max_steps": 2})
        tiny.write_rows(workspace.validation_data, rows)
        run_here(workspace)
        figures = next(line["values"] for line in lines(workspace.metrics) if "eval_loss" in line["values"])
        assert math.isfinite(figures["eval_rewards/margins"])


def test_continued_pretraining_learns_every_token_of_a_split_text(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, chatml: PreTrainedTokenizerBase
) -> None:
    text = "Die Hauptstadt von Frankreich ist Paris. " * 20
    workspace = make_workspace(
        "w", llama, rows=[{"text": text}], method="cpt", data={"max_length": 64}, training=TRAINING | {"num_train_epochs": 1}
    )
    run_here(workspace)
    num_tokens = len(chatml.encode(text, add_special_tokens=False)) + 1
    assert read_json(workspace.result)["trained_tokens"] == num_tokens - 1


def test_accumulation_does_not_change_the_loss_of_pairs(make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
    def run(name: str, batch: int, passes: int) -> list[float]:
        training = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": passes, "learning_rate": 0.01}
        workspace = make_workspace(name, llama, rows=tiny.preference_rows(8), method="dpo", training=training)
        run_here(workspace)
        return list(losses(workspace).values())

    assert run("split", 2, 4) == pytest.approx(run("whole", 8, 1), rel=1e-3)


@pytest.mark.parametrize(("method", "ranks", "repeated"), [("dpo", 2, [1, 0, 3, 0]), ("dpo", 1, [0] * 4), ("cpt", 2, [0] * 4)])
def test_rows_that_are_repeated_so_that_all_ranks_have_as_many_are_counted(
    method: str, ranks: int, repeated: list[int]
) -> None:
    sections = {"parallelism": {"nproc_per_node": ranks}, "training": {"per_device_train_batch_size": 2}}
    spec = TrainingSpec.model_validate({"method": method, **sections})
    assert [num_repeated(spec, rows) for rows in (3, 4, 5, 8)] == repeated


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "row", "words"),
        [
            ("dpo", {"messages": []}, "needs rows with prompt, chosen, rejected"),
            ("kto", {"prompt": "a", "completion": "b"}, "lacks label"),
            ("cpt", {"prompt": "a", "completion": "b"}, "lacks text"),
            ("dpo", {"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty"),
            ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "nothing to prefer"),
            ("dpo", {"prompt": "word " * 50, "chosen": "a", "rejected": "b"}, "prompt alone fills data.max_length 32"),
            ("kto", {"prompt": "word " * 50, "completion": "a", "label": True}, "no_trainable_tokens"),
            ("orpo", {"prompt": "a", "chosen": "x " * 50 + "b", "rejected": "x " * 50 + "c"}, "same in their first 32"),
        ],
    )
    def test_a_row_that_teaches_nothing_is_named_by_its_line(
        self, tmp_path: Path, chatml: PreTrainedTokenizerBase, method: str, row: dict[str, Any], words: str
    ) -> None:
        good = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "completion": "4", "label": True, "text": "abc"}
        path = tiny.write_rows(tmp_path / "train.jsonl", [good, row])
        with pytest.raises(TrainerError) as caught:
            tokenize_file(path, DataSection(max_length=32), chatml, method)
        assert caught.value.failure.message.startswith("line 2: ")
        assert words in caught.value.failure.message

    def test_plain_text_pairs_end_with_the_end_token_and_share_their_prompt(
        self, tmp_path: Path, chatml: PreTrainedTokenizerBase
    ) -> None:
        path = tiny.write_rows(tmp_path / "train.jsonl", [{"prompt": "2+2=", "chosen": "4", "rejected": "five"}])
        ((row,), counts) = tokenize_file(path, DataSection(), chatml, "dpo")
        assert isinstance(row, Pair)
        assert chatml.decode(row.prompt_ids) == "2+2="
        assert (chatml.decode(row.chosen_ids), chatml.decode(row.rejected_ids)) == ("4<|im_end|>", "five<|im_end|>")
        assert counts.trained_tokens == len(row.chosen_ids) + len(row.rejected_ids)
