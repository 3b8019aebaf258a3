"""Files become token ids and labels: counted, by position, and refused with the line where a row teaches nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import DataSection, TrainingSpec
from tests import tiny
from tests.conftest import CASES
from worker.trainer.data import IGNORED, Counts, Tokens, load_data, tokenize_file
from worker.trainer.failures import TrainerError
from worker.trainer.methods import num_steps
from worker.trainer.model import load_tokenizer
from worker.workspace import lines_of, read_json

from .conftest import MakeWorkspace

LONG = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "Ja."}]}
SHORT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Ja. " * 30}]}


def tokenize(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], **data: Any
) -> tuple[list[Tokens], Counts]:
    read, counts = tokenize_file(tiny.write_rows(tmp_path / "train.jsonl", rows), DataSection(**data), tokenizer)
    return [row for row in read if isinstance(row, Tokens)], counts


def trained_text(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> str:
    return str(tokenizer.decode([label for label in tokens.labels if label != IGNORED]))


def refusal(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], **data: Any) -> str:
    with pytest.raises(TrainerError) as caught:
        tokenize(tmp_path, tokenizer, rows, **data)
    assert caught.value.failure.code == "invalid_training_file"
    return caught.value.failure.message


class TestLabels:
    def test_the_end_token_is_trained_once_per_turn_though_it_is_the_pad_token_too(
        self, tmp_path: Path, chatml: PreTrainedTokenizerBase
    ) -> None:
        assert chatml.pad_token_id == chatml.eos_token_id
        turns = [{"role": role, "content": text} for text in ("x", "y") for role in ("user", "assistant")]
        ((row,), _) = tokenize(tmp_path, chatml, [{"messages": turns}])
        assert row.labels.count(chatml.eos_token_id) == 2
        assert trained_text(chatml, row) == "x<|im_end|>y<|im_end|>"

    def test_labels_are_the_ids_at_their_own_places(self, tmp_path: Path, harmony: PreTrainedTokenizerBase) -> None:
        rows, counts = tokenize(tmp_path, harmony, tiny.chat_rows(8))
        for row in rows:
            assert all(label in (IGNORED, token) for token, label in zip(row.input_ids, row.labels, strict=True))
        assert counts.trained_tokens == sum(row.num_trained for row in rows)
        assert counts.rows_used == counts.rows_read == 8

    def test_trained_tokens_are_what_the_tokenizer_counts(self, tmp_path: Path, harmony: PreTrainedTokenizerBase) -> None:
        answer = (
            "<|start|>assistant<|channel|>analysis<|message|>Ich denke kurz nach.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is Canberra.<|return|>"
        )
        _, counts = tokenize(tmp_path, harmony, tiny.chat_rows(1))
        assert counts.trained_tokens == len(harmony(answer, add_special_tokens=False)["input_ids"])

    def test_loss_on_all_trains_every_token_but_the_first(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        ((row,), _) = tokenize(tmp_path, chatml, [SHORT], loss_on="all")
        assert row.labels == [IGNORED, *row.input_ids[1:]]

    def test_characters_of_several_tokens_are_trained_whole(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        messages = [{"role": "user", "content": "答え"}, {"role": "assistant", "content": "東京です🙂"}]
        ((row,), _) = tokenize(tmp_path, chatml, [{"messages": messages}])
        assert trained_text(chatml, row) == "東京です🙂<|im_end|>"


class TestForms:
    def test_a_text_completion_is_trained_with_an_end_token(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        ((row,), _) = tokenize(tmp_path, chatml, [{"prompt": "2+2=", "completion": "4"}])
        assert trained_text(chatml, row) == "4<|im_end|>"

    def test_a_chat_completion_leaves_the_prompts_answers_out(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        prompt = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
        ((tokens,), _) = tokenize(tmp_path, chatml, [row])
        assert trained_text(chatml, tokens) == "d<|im_end|>"

    def test_plain_text_is_trained_whole(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        ((row,), _) = tokenize(tmp_path, chatml, [{"text": "abc"}])
        assert row.num_trained == len(row.input_ids) - 1

    def test_values_of_changing_type_beside_the_messages_do_no_harm(
        self, tmp_path: Path, chatml: PreTrainedTokenizerBase
    ) -> None:
        rows = [SHORT | {"metadata": {"title": title}} for title in ("text", 7, ["list"])]
        assert len(tokenize(tmp_path, chatml, rows)[0]) == 3


class TestRefusals:
    def test_a_row_with_nothing_to_learn_is_named_by_its_line(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        only_user = {"messages": [{"role": "user", "content": "a"}]}
        assert refusal(tmp_path, chatml, [SHORT, only_user, SHORT]).startswith("line 2: nothing to learn")

    def test_a_completion_that_is_empty_is_refused(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        assert "line 1: nothing to learn" in refusal(tmp_path, chatml, [{"prompt": "a", "completion": ""}])

    def test_unknown_columns_are_named(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        assert "instruction, output" in refusal(tmp_path, chatml, [{"instruction": "a", "output": "b"}])

    def test_a_broken_line_is_named_and_blank_lines_count(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        path = tmp_path / "train.jsonl"
        path.write_text(json.dumps(SHORT) + '\n\n{"messages": [}\n', encoding="utf-8")
        with pytest.raises(TrainerError, match="line 3: not valid JSON"):
            tokenize_file(path, DataSection(), chatml)

    def test_only_the_first_problems_are_listed(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        message = refusal(tmp_path, chatml, [{"text": ""}] * 30)
        assert "line 10:" in message
        assert "line 11:" not in message
        assert "and 20 more" in message


class TestBadRows:
    """Rows whose answer lies beyond max_length (tests/cases A09b and A09c): only the tokens tell."""

    def tokenized(self, name: str, tokenizer: PreTrainedTokenizerBase, **data: Any) -> Counts:
        return tokenize_file(CASES / name, DataSection(max_length=512, **data), tokenizer)[1]

    def test_refuse_the_data_by_line_with_the_setting_that_cuts_them(self, chatml: PreTrainedTokenizerBase) -> None:
        with pytest.raises(TrainerError, match=r"line 3: .*data\.max_length 512.*no_trainable_tokens") as caught:
            self.tokenized("A09b_prompt_over_max_one.jsonl", chatml)
        assert caught.value.failure.code == "invalid_training_file"

    def test_are_skipped_and_counted_when_the_job_says_so(self, chatml: PreTrainedTokenizerBase) -> None:
        counts = self.tokenized("A09b_prompt_over_max_one.jsonl", chatml, on_bad_rows="skip")
        assert (counts.rows_read, counts.rows_used, counts.rows_skipped) == (4, 3, 1)
        assert any("line 3" in warning for warning in counts.warnings)

    def test_refuse_the_data_all_the_same_where_no_other_is_left(self, chatml: PreTrainedTokenizerBase) -> None:
        with pytest.raises(TrainerError, match="4 skipped") as caught:
            self.tokenized("A09c_prompt_over_max_all.jsonl", chatml, on_bad_rows="skip")
        assert caught.value.failure.code == "dataset_no_trainable_rows"

    def test_are_named_by_the_line_in_the_users_own_file(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        path = tiny.write_rows(tmp_path / "train.jsonl", [SHORT, LONG])
        lines_of(path).write_text("4\n9\n")
        with pytest.raises(TrainerError, match="file: line 9: "):
            tokenize_file(path, DataSection(max_length=150), chatml)


class TestLongRows:
    def test_are_refused_by_line_when_the_job_says_so(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        message = refusal(tmp_path, chatml, [SHORT, LONG], max_length=150, on_long_rows="refuse")
        assert message.startswith("line 2:")
        assert "data.max_length" in message

    def test_are_skipped_and_counted(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        rows, counts = tokenize(tmp_path, chatml, [SHORT, LONG], max_length=150, on_long_rows="skip")
        assert (len(rows), counts.rows_skipped, counts.rows_used, counts.rows_read) == (1, 1, 1, 2)

    def test_a_file_of_which_nothing_is_left_is_refused(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        assert "no row is left" in refusal(tmp_path, chatml, [LONG], max_length=150, on_long_rows="skip")

    def test_are_cut_and_counted(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        rows, counts = tokenize(tmp_path, chatml, [SHORT], max_length=60, on_long_rows="truncate")
        assert len(rows[0].input_ids) == 60
        assert counts.rows_truncated == 1
        assert counts.warnings == {"row cut to data.max_length": 1}

    def test_a_cut_that_leaves_nothing_to_learn_is_refused(self, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
        assert "no_trainable_tokens" in refusal(tmp_path, chatml, [LONG], max_length=150, on_long_rows="truncate")


class TestOncePerHost:
    def test_other_ranks_take_what_the_first_wrote(
        self, make_workspace: MakeWorkspace, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workspace = make_workspace("w", llama, ranks=2)
        spec = TrainingSpec.model_validate(read_json(workspace.spec))
        tokenizer = load_tokenizer(spec)
        first = load_data(workspace, spec, tokenizer)
        monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
        monkeypatch.setattr("worker.trainer.data.tokenize_file", lambda *_: pytest.fail("tokenised twice"))
        second = load_data(workspace, spec, tokenizer)
        assert second.train[:] == first.train[:]
        assert second.fingerprint == first.fingerprint

    def test_a_rank_that_waits_stops_when_the_first_one_failed(
        self, make_workspace: MakeWorkspace, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workspace = make_workspace("w", llama, ranks=2)
        spec = TrainingSpec.model_validate(read_json(workspace.spec))
        monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
        workspace.failure.write_text("{}")
        with pytest.raises(RuntimeError, match="another rank"):
            load_data(workspace, spec, load_tokenizer(spec))

    def test_other_rows_are_other_data(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        workspace = make_workspace("w", llama)
        spec = TrainingSpec.model_validate(read_json(workspace.spec))
        tokenizer = load_tokenizer(spec)
        before = load_data(workspace, spec, tokenizer).fingerprint
        tiny.write_rows(workspace.train_data, tiny.chat_rows(4))
        after = load_data(workspace, spec, tokenizer)
        assert after.fingerprint != before
        assert len(after.train) == 4


@pytest.mark.parametrize(
    ("rows", "training", "ranks", "steps"),
    [
        (16, {"per_device_train_batch_size": 2, "num_train_epochs": 2}, 2, 8),
        (17, {"per_device_train_batch_size": 2, "num_train_epochs": 1}, 2, 5),
        (17, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 3}, 1, 9),
        (16, {"max_steps": 3}, 1, 3),
    ],
)
def test_steps_are_known_before_the_run(rows: int, training: dict[str, Any], ranks: int, steps: int) -> None:
    spec = TrainingSpec.model_validate({"training": training, "parallelism": {"nproc_per_node": ranks}})
    assert num_steps(spec, rows) == steps
