"""What a preview shows is what the trainer trains on."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import TrainingSpec
from worker.trainer.chat import chat_renderer
from worker.trainer.data import IGNORED, tokenize_row
from worker.trainer.preview import Preview

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "first", "weight": 0},
    {"role": "user", "content": "y"},
    {"role": "assistant", "content": "日本 second"},
]


def look(
    tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], lines: tuple[int, ...] = (1,), **spec: Any
) -> dict[str, Any]:
    preview = Preview(TrainingSpec.model_validate(spec), tokenizer, lines)
    for line, row in enumerate(rows, start=1):
        preview.add(line, row)
    return preview.as_json()


@pytest.mark.parametrize("name", ["chatml", "harmony"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_the_mask_is_the_trainers_token_by_token(request: pytest.FixtureRequest, name: str, loss_on: str) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(name)
    spec = TrainingSpec.model_validate({"data": {"loss_on": loss_on}})
    trained = tokenize_row({"messages": CHAT}, spec.data, tokenizer, chat_renderer(tokenizer, spec.data))
    (row,) = look(tokenizer, {"messages": CHAT}, data={"loss_on": loss_on})["rows"]
    (sequence,) = row["sequences"]
    assert sequence["token_ids"] == list(trained.input_ids)  # type: ignore[union-attr]
    mask = [segment["trained"] for segment in sequence["segments"] for _ in range(segment["tokens"])]
    assert mask == [label != IGNORED for label in trained.labels]  # type: ignore[union-attr]
    assert sequence["trained_tokens"] == trained.num_trained
    assert sequence["text"] == "".join(segment["text"] for segment in sequence["segments"])


def test_each_message_says_what_of_it_is_learned(chatml: PreTrainedTokenizerBase) -> None:
    (row,) = look(chatml, {"messages": CHAT})["rows"]
    assert [(message["index"], message["trained_text"]) for message in row["messages"]] == [
        (0, ""),
        (1, ""),
        (2, ""),
        (3, "日本 second<|im_end|>"),
    ]
    assert sum(message["trained_tokens"] for message in row["messages"]) == row["sequences"][0]["trained_tokens"]


def test_what_the_template_drops_is_told_for_the_row_and_counted_for_the_file(harmony: PreTrainedTokenizerBase) -> None:
    turns = [turn | ({"thinking": "hm"} if turn["role"] == "assistant" else {}) for turn in CHAT]
    found = look(harmony, {"messages": turns}, {"messages": CHAT}, data={"thinking": "drop"})
    assert found["rows"][0]["dropped"] == ["thinking left out"]
    assert found["dropped"] == {"thinking left out": 2}


def test_what_lies_beyond_max_length_is_shown(chatml: PreTrainedTokenizerBase) -> None:
    found = look(chatml, {"text": "short"}, {"text": "word " * 100}, lines=(2,), data={"max_length": 32})
    (row,) = found["rows"]
    beyond, tokens = row["sequences"][0]["beyond_max_length"], row["sequences"][0]["tokens"]
    assert (beyond["tokens"], beyond["trained_tokens"]) == (tokens - 32, tokens - 32)
    assert beyond["text"].endswith("word <|im_end|>")
    assert (found["num_long_rows"], found["long_rows"]) == (1, [{"line": 2, "tokens": tokens}])
    assert found["rows_used"] == 2
    assert found["tokens_per_row"]["most"] == 32


def test_a_row_that_teaches_nothing_is_an_error_with_its_line(chatml: PreTrainedTokenizerBase) -> None:
    silent = {"messages": [CHAT[0], {"role": "assistant", "content": "a", "weight": 0}]}
    found = look(chatml, {"messages": CHAT}, silent, lines=(2,))
    assert "no_trainable_tokens" in found["rows"][0]["error"]
    assert [error["line"] for error in found["errors"]] == [2]
    assert (found["rows_read"], found["rows_used"], found["num_errors"]) == (2, 1, 1)


def test_preferences_show_the_prompt_with_each_answer(chatml: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "Is it", "chosen": " yes", "rejected": " no"}
    found = look(chatml, row, method="dpo")
    shown = {sequence["name"]: sequence for sequence in found["rows"][0]["sequences"]}
    assert shown["chosen"]["text"].startswith("Is it yes")
    assert [segment["trained"] for segment in shown["rejected"]["segments"]] == [False, True]
