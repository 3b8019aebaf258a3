"""The shipped training data: its shape, its promise, and that the demo does not ask what it taught."""

import json
from typing import Any

import pytest

from demo.run import BATCH_SIZE, DATA, QUESTIONS
from demo.show import TAUGHT_STYLE

COLUMNS = ["reasoning_language", "developer", "user", "analysis", "final", "messages"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def test_there_are_enough_rows_and_they_fill_every_batch(rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= 100
    assert len(rows) % BATCH_SIZE == 0


def test_rows_have_the_columns_of_multilingual_thinking(rows: list[dict[str, Any]]) -> None:
    assert all(list(row) == COLUMNS for row in rows)


def test_messages_repeat_the_columns_and_only_the_assistant_thinks(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        system = f"reasoning language: {row['reasoning_language']}\n\n{row['developer']}"
        assert row["messages"] == [
            {"content": system, "role": "system", "thinking": None},
            {"content": row["user"], "role": "user", "thinking": None},
            {"content": row["final"], "role": "assistant", "thinking": row["analysis"]},
        ]


def test_every_answer_is_of_the_taught_style(rows: list[dict[str, Any]]) -> None:
    assert all(TAUGHT_STYLE.match(f"<think>\n{row['analysis']}\n</think>\n\n{row['final']}") for row in rows)
    assert not any(TAUGHT_STYLE.match(row["final"]) for row in rows)


def test_no_question_comes_twice(rows: list[dict[str, Any]]) -> None:
    assert len({row["user"] for row in rows}) == len(rows)


def test_the_demo_asks_nothing_that_is_in_the_data(rows: list[dict[str, Any]]) -> None:
    assert not {row["user"] for row in rows} & set(QUESTIONS)
