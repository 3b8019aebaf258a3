"""Further instances of the public bug reports about data (tests/cases, A): each gives all its rows, or names its line."""

import io
import json
import zipfile
from typing import Any

import pytest

from app.files import dataset

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
GOOD = json.dumps({"messages": [USER, ANSWER]})
CALL = '{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}'


def chat(*messages: Any) -> str:
    return json.dumps({"messages": messages})


def rows(content: str | bytes, name: str = "a.jsonl") -> list[dict[str, Any]]:
    return [row.value for row in dataset.read_rows(io.BytesIO(content.encode() if isinstance(content, str) else content), name)]


def problems(content: str | bytes, name: str = "a.jsonl") -> list[tuple[str, int | None]]:
    content = content.encode() if isinstance(content, str) else content
    return [(problem.code, problem.line) for problem in dataset.check(io.BytesIO(content), name).problems]


@pytest.mark.parametrize(
    ("content", "num_rows"),
    [
        (f"\ufeff{GOOD}", 1),
        (f"\ufeff\r\n\r\n{GOOD}\r\n", 1),
        (f"\t\n{GOOD}\n \t \r\n{GOOD}", 2),
        (f"  {GOOD}  \n", 1),
        (f"\ufeff[{GOOD},\r\n{GOOD}]\r\n", 2),
        (GOOD.replace("Hi", "a\u2028b\u0085c"), 1),  # ends of lines to some readers, never to JSON Lines
    ],
)
def test_a01_noise_around_rows_is_no_error(content: str, num_rows: int) -> None:
    assert len(rows(content)) == num_rows
    assert not any("\r" in json.dumps(row) or "\ufeff" in json.dumps(row) for row in rows(content))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "dataset_duplicate_key"),
        ('{"text": "a", "te\\u0078t": "b"}', "dataset_duplicate_key"),
        ('{"messages": [' + json.dumps(USER) + ", " + CALL % '{"a": 1, "a": 2}' + "]}", "dataset_duplicate_key"),
        (GOOD[:-1], "dataset_bad_json"),
        (GOOD + GOOD, "dataset_bad_json"),
        (GOOD.replace('"Hi"', '"say "Hi""'), "dataset_bad_json"),
        (GOOD.replace('"', "'"), "dataset_bad_json"),
        (GOOD.replace("]", ",]"), "dataset_bad_json"),
        ('{"text": "a", "score": NaN}', "dataset_bad_json"),
        ('{"text": "a\tb"}', "dataset_bad_json"),
        ("[" + GOOD + "]", "row_not_object"),
        ("null", "row_not_object"),
    ],
)
def test_a03_a_broken_row_is_named_and_its_neighbours_are_not(line: str, code: str) -> None:
    assert problems("\n".join([GOOD, "", line, GOOD])) == [(code, 3)]


@pytest.mark.parametrize(
    "values", [[1, 1.5], [True, 1], ["a", {"b": 1}], [[1], ["a"]], [None, 3, "c"], [{"deep": {"x": 1}}, {"deep": {"x": "1"}}]]
)
def test_a05_an_unread_column_may_hold_anything(values: list[Any]) -> None:
    found = dataset.check(
        io.BytesIO("\n".join(json.dumps({"messages": [USER, ANSWER], "meta": value}) for value in values).encode()), "a.jsonl"
    )
    assert (found.rows_read, found.rows_used) == (len(values), len(values))


@pytest.mark.parametrize("number", ["1", "1.0", "123456789012345678901234567890", "1e-7", "-0.0", "true"])
def test_a05_a_value_that_is_read_keeps_its_type_and_digits(number: str) -> None:
    (row,) = rows('{"messages": [' + json.dumps(USER) + ", " + CALL % f'{{"n": {number}}}' + "]}")
    arguments = row["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert repr(arguments["n"]) == repr(json.loads(number))


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', '{"a": {"b": []}}', "{}"])
def test_a07_arguments_are_the_same_as_text_and_as_object(arguments: str) -> None:
    lines = ['{"messages": [' + json.dumps(USER) + ", " + CALL % form + "]}" for form in (arguments, json.dumps(arguments))]
    first, second = rows("\n".join(lines))
    assert first == second
    assert first["messages"][1]["content"] == ""


@pytest.mark.parametrize(
    "arguments", ['"[]"', '"null"', '"not json"', '"\\"{}\\""', "[]", "5", r'"{\"a\": 1, \"a\": 2}"', r'"{\"a\": NaN}"']
)
def test_a07_arguments_that_are_no_object_are_named(arguments: str) -> None:
    line = '{"messages": [' + json.dumps(USER) + ", " + CALL % arguments + "]}"
    assert problems(f"{GOOD}\n{line}") == [("invalid_tool_arguments", 2)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (chat(USER, ANSWER, USER), "last_turn_not_assistant"),
        (chat(USER, USER), "no_assistant_turn"),
        (chat(USER, {"role": "assistant", "content": ""}), "empty_assistant_turn"),
        (chat(USER, {"role": "assistant", "content": " \n\t"}), "empty_assistant_turn"),
        (chat(USER, {"role": "assistant", "content": [{"type": "text", "text": " "}]}), "empty_assistant_turn"),
        (chat(USER, ANSWER | {"weight": 0}), "no_trainable_turn"),
        (chat(ANSWER, {"role": "tool", "content": "42", "tool_call_id": "1"}), "last_turn_not_assistant"),
        (json.dumps({"prompt": "a", "completion": "  "}), "empty_text"),
        (json.dumps({"instruction": "a", "input": "", "output": ""}), "empty_text"),
    ],
)
def test_a09_a_row_with_nothing_to_learn_is_named(line: str, code: str) -> None:
    assert problems(line) == [(code, 1)]


@pytest.mark.parametrize("messages", [(ANSWER,), ({"role": "system", "content": "s"}, ANSWER), (USER, ANSWER, USER, ANSWER)])
def test_a09_a_row_with_an_answer_is_used_whatever_comes_before(messages: tuple[Any, ...]) -> None:
    assert len(rows(chat(*messages))) == 1


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ANSWER | {"refusal": "no"}, "unknown_message_field"),
        (ANSWER | {"function_call": {"name": "f"}}, "unknown_message_field"),
        (ANSWER | {"thinking": "a", "reasoning_content": "b"}, "ambiguous_thinking"),
        ({"role": "assistant", "content": {"text": "a"}}, "invalid_content"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "unsupported_content_part"),
        ({"role": "assistant", "content": ["a"]}, "unsupported_content_part"),
    ],
)
def test_a11_a_part_that_would_be_lost_is_named(message: dict[str, Any], code: str) -> None:
    assert problems(chat(USER, message)) == [(code, 1)]


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
def test_a11_thinking_is_read_under_each_of_its_names(name: str) -> None:
    (row,) = rows(chat(USER, ANSWER | {name: "hm", "refusal": None}))
    assert row["messages"][1] == ANSWER | {"thinking": "hm"}


@pytest.mark.parametrize("speaker", ["tool", "bing", "HUMAN", 5, None])
def test_a13_an_unknown_speaker_is_named(speaker: Any) -> None:
    turns = [{"from": speaker, "value": "a"}, {"from": "gpt", "value": "b"}]
    assert problems(json.dumps({"conversations": turns})) == [("unknown_role", 1)]


@pytest.mark.parametrize("word", ["null", "NA", "None", "nan", "NaN", "N/A", "true", "007", "1e5", " spaced "])
def test_a15_a_cell_is_the_text_that_stands_in_it(word: str) -> None:
    (row,) = rows(f'prompt,completion\n,"{word}"\n', "a.csv")
    assert row == {"prompt": "", "completion": word}


@pytest.mark.parametrize("other", ["__MACOSX/._a.jsonl", ".DS_Store", "Thumbs.db", "data/.hidden.jsonl", "README.txt"])
def test_a15_what_holds_no_rows_in_an_archive_is_left_aside_and_listed(other: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(other, b"\x00\x05\x16\x07")
        archive.writestr("data/a.jsonl", GOOD)
    found = dataset.check(packed, "a.zip").as_json()
    assert (found["rows_used"], found["num_errors"], found["ignored_members"]) == (1, 0, [other])
