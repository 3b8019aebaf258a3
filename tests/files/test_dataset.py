"""The one reader of training data: what it takes, what it refuses, and what it never changes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.files import dataset, parsing
from app.files.problems import FIXES, Problem
from app.files.rows import Unusable, check_method
from tests.conftest import CASES

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def rows(*objects: Any) -> list[dict[str, Any]]:
    content = "".join(json.dumps(value) + "\n" for value in objects).encode()
    return [row.value for row in dataset.read_rows(io.BytesIO(content), "a.jsonl")]


def check(content: bytes, filename: str = "a.jsonl") -> dataset.Report:
    return dataset.check(io.BytesIO(content), filename)


def only_problem(content: bytes, filename: str = "a.jsonl") -> Problem:
    report = check(content, filename)
    assert report.num_problems == 1
    return report.problems[0]


def chat(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


# Cases with options need a tokenizer, folders a job.
ALL = json.loads((CASES / "expected.json").read_text())["cases"]
READABLE = [case for case in ALL if (CASES / case["file"]).is_file() and "options" not in case]


class TestCases:
    """Inputs from public bug reports (tests/cases)."""

    @pytest.mark.parametrize("case", READABLE, ids=lambda case: case["file"])
    def test_every_case_gives_its_rows_or_names_its_lines(self, case: dict[str, Any]) -> None:
        path = CASES / case["file"]
        report = dataset.check(path, path.name)
        assert report.is_usable == (case["outcome"] != "refuse")
        assert [problem.line for problem in report.problems] == case.get("lines", [])
        assert report.rows_read == case.get("rows_read", report.rows_read)
        assert report.rows_used == case.get("with_skip", {}).get("rows_used", report.rows_used)

    def test_a_byte_order_mark_and_windows_line_ends_leave_no_trace(self) -> None:
        read = list(dataset.read_rows(CASES / "A01a_bom_crlf.jsonl", "A01a_bom_crlf.jsonl"))
        assert all(list(row.value) == ["messages"] for row in read)
        assert "\r" not in json.dumps([row.value for row in read], ensure_ascii=False)

    def test_lines_are_counted_as_an_editor_counts_them(self) -> None:
        read = dataset.read_rows(CASES / "A01b_blank_lines.jsonl", "A01b_blank_lines.jsonl")
        assert [row.line for row in read] == [2, 4, 6]

    def test_a_duplicate_key_is_named(self) -> None:
        problem = dataset.check(CASES / "A03a_duplicate_key.jsonl", "a.jsonl").problems[0]
        assert problem.code == "dataset_duplicate_key"
        assert "`messages`" in problem.message

    def test_bad_json_is_named_by_line_and_column(self) -> None:
        problem = dataset.check(CASES / "A03b_bad_quote_line37.jsonl", "a.jsonl").problems[0]
        assert (problem.code, problem.line) == ("dataset_bad_json", 37)
        assert problem.column

    def test_a_very_long_answer_is_read_whole(self) -> None:
        answer = "x" * 12_000_000
        long = chat(USER, {"role": "assistant", "content": answer})
        assert rows(long, CHAT)[0]["messages"][1]["content"] == answer

    def test_tool_arguments_as_text_and_as_object_are_the_same_row(self) -> None:
        both = [
            [row.value for row in dataset.read_rows(CASES / name, name)]
            for name in ("A07a_null_content_string_args.jsonl", "A07b_object_args.jsonl")
        ]
        assert both[0] == both[1]
        assert both[0][0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
        assert both[0][0]["messages"][1]["content"] == ""

    def test_rows_with_nothing_to_learn_are_told_apart(self) -> None:
        codes = [problem.code for problem in dataset.check(CASES / "A09a_no_answer.jsonl", "a.jsonl").problems]
        assert codes == ["last_turn_not_assistant", "no_assistant_turn"]

    def test_reasoning_is_kept_under_one_name(self) -> None:
        row = next(dataset.read_rows(CASES / "A11a_reasoning_content.jsonl", "a.jsonl")).value
        assert row["messages"][1]["thinking"] == "91 is 7 times 13, so it is composite."

    def test_text_parts_become_text(self) -> None:
        row = next(dataset.read_rows(CASES / "A11b_text_parts.jsonl", "a.jsonl")).value
        assert row["messages"][0]["content"] == "Good morning"

    def test_sharegpt_speakers_become_roles(self) -> None:
        read = [row.value for row in dataset.read_rows(CASES / "A13a_sharegpt.jsonl", "a.jsonl")]
        roles = [[message["role"] for message in row["messages"]] for row in read]
        assert roles == [["user", "assistant"], ["user", "assistant"], ["system", "user", "assistant"]]


class TestForms:
    def test_prompt_and_completion_stay_as_they_are(self) -> None:
        row = {"prompt": "2+2=", "completion": " 4"}
        assert rows(row | {"source": "a book"}) == [row]

    def test_text_stays_as_it_is(self) -> None:
        assert rows({"text": "  once upon a time\n"}) == [{"text": "  once upon a time\n"}]

    def test_only_the_completion_of_a_conversational_row_is_learned(self) -> None:
        row = rows({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})[0]
        assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]

    def test_tools_and_weights_are_kept(self) -> None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        row = rows(chat(USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}, tools=tools))[0]
        assert row["tools"] == tools
        assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]

    def test_null_fields_are_absent(self) -> None:
        assert rows(chat(USER | {"thinking": None, "name": None}, ANSWER | {"tool_calls": None})) == [CHAT]

    def test_a_sharegpt_system_column_becomes_the_first_message(self) -> None:
        turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
        assert rows({"system": "Be brief.", "conversations": turns})[0]["messages"][0]["content"] == "Be brief."


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "code", "path"),
        [
            (chat(USER), "no_assistant_turn", "messages"),
            (chat(USER, ANSWER, USER), "last_turn_not_assistant", "messages[2]"),
            (chat(USER, ANSWER | {"weight": 0}), "no_trainable_turn", "messages"),
            (chat(USER, ANSWER | {"weight": 2}), "invalid_weight", "messages[1].weight"),
            (chat(USER, {"role": "assistant", "content": ""}), "empty_assistant_turn", "messages[1]"),
            (chat(USER, ANSWER | {"mood": "good"}), "unknown_message_field", "messages[1].mood"),
            (chat(USER | {"thinking": "hm"}, ANSWER), "unknown_message_field", "messages[0].thinking"),
            (chat({"role": "robot", "content": "x"}, ANSWER), "unknown_role", "messages[0].role"),
            (chat({"role": "user"}, ANSWER), "missing_content", "messages[0].content"),
            (chat({"role": "user", "content": 5}, ANSWER), "invalid_content", "messages[0].content"),
            (chat("Hi", ANSWER), "invalid_message", "messages[0]"),
            ({"messages": []}, "no_messages", "messages"),
            (
                chat({"role": "user", "content": [{"type": "image_url"}]}, ANSWER),
                "unsupported_content_part",
                "messages[0].content[0]",
            ),
            (chat(USER, ANSWER | {"thinking": "a", "reasoning": "b"}), "ambiguous_thinking", "messages[1]"),
            (chat(USER, ANSWER | {"tool_calls": "f()"}), "invalid_tool_calls", "messages[1].tool_calls"),
            (
                chat(USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
                "invalid_tool_arguments",
                "messages[1].tool_calls[0].function.arguments",
            ),
            (chat(USER, ANSWER, tools="f"), "invalid_tools", "tools"),
            ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown_role", "conversations[0].from"),
            ({"prompt": "a", "completion": " "}, "empty_text", "completion"),
            ({"prompt": "a", "completion": [ANSWER]}, "invalid_text", "completion"),
            ({"text": ""}, "empty_text", "text"),
            ({"question": "a", "answer": "b"}, "unknown_row_format", None),
            ({}, "unknown_row_format", None),
        ],
    )
    def test_a_row_that_cannot_teach_is_refused_at_its_place(self, row: dict[str, Any], code: str, path: str | None) -> None:
        problem = only_problem(json.dumps(row).encode())
        assert (problem.code, problem.path, problem.line) == (code, path, 1)

    @pytest.mark.parametrize(
        ("content", "code"),
        [
            (b"", "dataset_empty"),
            (b"\n \n", "dataset_empty"),
            (b'"text"', "row_not_object"),
            (b'{"text": NaN}', "dataset_bad_json"),
            (b'{"text": "a"} {"text": "b"}', "dataset_bad_json"),
            (b'{"text": "\\ud800"}', "dataset_bad_unicode"),
            (b'{"text": "\xff"}', "dataset_bad_encoding"),
            (b'{"a":' * 100_000, "dataset_bad_json"),
            (b'{"text": ' + b"9" * 10_000 + b"}", "dataset_bad_json"),
            (b"PK\x03\x04rest", "archive_broken"),
            (b"\x1f\x8brest", "archive_broken"),
            ('{"text": "a"}'.encode("utf-16"), "unsupported_format"),
            (b"[1]", "row_not_object"),
            (b"[", "dataset_bad_json"),
            (b'[{"text": "a"}', "dataset_bad_json"),
            (b'[{"text": "a"}] x', "dataset_bad_json"),
            (b'[{"text": "a", "text": "b"}]', "dataset_duplicate_key"),
            (b'[{"text": "\xff"}]', "dataset_bad_encoding"),
        ],
    )
    def test_bytes_that_are_no_rows_give_one_clear_problem(self, content: bytes, code: str) -> None:
        assert only_problem(content).code == code

    @pytest.mark.parametrize("filename", ["a.xlsx", "a.parquet", "a.zip", "a.jsonl.gz", "a.tar"])
    def test_a_file_that_is_not_what_its_name_says_is_refused(self, filename: str) -> None:
        assert only_problem(b"a,b\n1,2\n", filename).code == "unsupported_format"

    def test_every_code_says_how_to_fix_what_it_names(self) -> None:
        folder = Path(dataset.__file__).parent
        source = "".join(path.read_text() for path in (*folder.glob("*.py"), folder.parents[1] / "worker" / "check.py"))
        codes = set(re.findall(r'(?:Problem|Unusable)\(\s*"([a-z_]+)"', source))
        assert codes == set(FIXES)

    def test_rows_of_different_forms_do_not_mix(self) -> None:
        report = check(json.dumps(CHAT).encode() + b'\n{"text": "a"}\n')
        assert [(problem.code, problem.line) for problem in report.problems] == [("mixed_row_formats", 2)]

    def test_a_row_over_the_limit_is_refused_and_the_next_one_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parsing, "MAX_ROW_BYTES", 100)
        report = check(b'{"text": "' + b"x" * 500 + b'"}\n{"text": "a"}\n')
        assert (report.rows_used, report.problems[0].code, report.problems[0].line) == (1, "row_too_large", 1)

    def test_reading_for_a_job_stops_at_the_first_problem(self) -> None:
        with pytest.raises(dataset.InvalidDataset, match="line 2, column 2: Not valid JSON"):
            list(dataset.read_rows(io.BytesIO(json.dumps(CHAT).encode() + b"\n{\n"), "a.jsonl"))

    def test_every_problem_is_counted_though_only_the_first_are_told(self) -> None:
        report = check(b"{\n" * 2000)
        assert report.num_problems == 2000
        assert len(report.problems) == dataset.MAX_PROBLEMS
        assert "and 1995 more" in report.summary


class TestArrays:
    def test_an_array_of_any_size_is_read_row_by_row_with_its_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        texts = [f"row {number} " + "é" * 300 for number in range(6000)]  # several blocks, cut inside characters
        path.write_text("[\n" + ",\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n]")
        read = list(dataset.read_rows(path, path.name))
        assert [row.value["text"] for row in read] == texts
        assert [row.line for row in read] == list(range(2, 6002))

    def test_a_row_longer_than_a_block_is_read(self) -> None:
        long = "x" * (3 * parsing.BLOCK_BYTES)
        content = json.dumps([{"text": long}, {"text": "a"}]).encode()
        assert [row.value["text"] for row in dataset.read_rows(io.BytesIO(content), "a.json")] == [long, "a"]

    def test_a_broken_row_is_named_by_line_and_column(self) -> None:
        problem = only_problem(b'[\n{"text": "a"},\n{"text": "b" "c"}\n]')
        assert (problem.code, problem.line, problem.column) == ("dataset_bad_json", 3, 14)

    def test_an_empty_array_holds_no_rows(self) -> None:
        assert only_problem(b"[ ]").code == "dataset_empty"


class TestPreferences:
    def test_openais_rows_become_a_prompt_with_two_answers(self) -> None:
        row = {
            "input": {"messages": [USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [ANSWER | {"content": "No."}],
        }
        assert rows(row) == [{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}]}]

    def test_the_older_names_and_tools_are_read_too(self) -> None:
        tool = {"type": "function", "function": {"name": "f"}}
        given = {"messages": [USER], "tools": [tool]}
        row = {"input": given, "preferred_completion": [ANSWER], "non_preferred_completion": [ANSWER | {"content": "No."}]}
        (read,) = rows(row)
        assert (read["chosen"], read["tools"]) == ([ANSWER], [tool])

    def test_two_whole_chats_share_all_but_their_answer(self) -> None:
        row = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "No."}]}
        assert rows(row)[0]["prompt"] == [USER]

    def test_earlier_answers_of_the_prompt_carry_no_loss(self) -> None:
        row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "label": False}
        assert rows(row) == [{"prompt": [USER, ANSWER | {"weight": 0}, USER], "completion": [ANSWER], "label": False}]

    @pytest.mark.parametrize(
        ("row", "code"),
        [
            ({"input": {"messages": [USER]}, "preferred_output": [ANSWER]}, "invalid_preference"),
            ({"input": [USER], "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]}, "invalid_preference"),
            ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "equal_answers"),
            ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal_answers"),
            ({"prompt": "a", "chosen": "b", "rejected": " "}, "empty_text"),
            ({"prompt": [USER], "chosen": [USER], "rejected": [ANSWER]}, "last_turn_not_assistant"),
            ({"prompt": [USER], "chosen": [ANSWER, ANSWER], "rejected": [ANSWER]}, "invalid_preference"),
            ({"chosen": [USER, ANSWER], "rejected": [ANSWER, ANSWER]}, "invalid_preference"),
            ({"prompt": "a", "completion": "b", "label": 1}, "invalid_label"),
            ({"prompt": "a", "completion": "", "label": True}, "empty_text"),
        ],
    )
    def test_a_row_that_prefers_nothing_is_refused(self, row: dict[str, Any], code: str) -> None:
        assert only_problem(json.dumps(row).encode()).code == code

    @pytest.mark.parametrize(
        ("method", "row", "is_learned"),
        [
            ("supervised", CHAT, True),
            ("dpo", CHAT, False),
            ("cpt", {"text": "a"}, True),
            ("cpt", CHAT, False),
            ("orpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, True),
            ("kto", {"prompt": "a", "completion": "b", "label": True}, True),
            ("supervised", {"prompt": "a", "completion": "b", "label": True}, False),
        ],
    )
    def test_a_method_learns_from_its_own_kind_of_rows(self, method: str, row: dict[str, Any], is_learned: bool) -> None:
        (value,) = rows(row)
        if is_learned:
            check_method(value, method)
        else:
            with pytest.raises(Unusable, match=method):
                check_method(value, method)
