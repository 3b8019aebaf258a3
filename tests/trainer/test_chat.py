"""Chats become text and spans: nothing is lost in silence, and each assistant turn is trained up to its end token."""

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import DataSection
from worker.trainer.chat import RowError, chat_renderer

WEATHER_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def render(tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any = None, **data: Any) -> tuple[str, list[str]]:
    """The text of a chat and the parts of it that are trained."""
    renderer = chat_renderer(tokenizer, DataSection(template_date="2026-01-01", **data))
    assert renderer is not None
    text, spans = renderer.render(messages, tools)
    return text, [text[start:end] for start, end in spans]


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def chat(*contents: Any, **last: Any) -> list[dict[str, Any]]:
    """Messages by user and assistant in turn; `last` are further fields of the last one."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return [*messages[:-1], messages[-1] | last]


def weather_call(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"c": 4}'},
        {"role": "assistant", "content": "4 degrees."},
    ]


class TestSpans:
    def test_chatml_trains_each_answer_with_its_end_token(self, chatml: PreTrainedTokenizerBase) -> None:
        _, trained = render(chatml, chat("a", "first", "b", "second"))
        assert trained == ["first<|im_end|>", "second<|im_end|>"]

    def test_harmony_trains_thinking_answer_and_end_token(self, harmony: PreTrainedTokenizerBase) -> None:
        _, trained = render(harmony, chat("a", "Ja.", thinking="Hm."))
        assert trained == [
            "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ja.<|return|>"
        ]

    def test_an_assistant_message_of_weight_0_is_context(self, chatml: PreTrainedTokenizerBase) -> None:
        messages = chat("a", "first", "b", "second")
        messages[1]["weight"] = 0
        assert render(chatml, messages)[1] == ["second<|im_end|>"]

    def test_a_template_that_rewrites_earlier_turns_is_refused(self, chatml: PreTrainedTokenizerBase) -> None:
        template = "{% for m in messages %}{{ loop.length }}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
        with pytest.raises(RowError, match="generation"):
            render(with_template(chatml, template), chat("a", "first", "b", "second"))

    def test_a_template_without_end_token_is_refused(self, chatml: PreTrainedTokenizerBase) -> None:
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        with pytest.raises(RowError, match="end token"):
            render(with_template(chatml, template), chat("a", "first"))

    def test_the_day_a_template_prints_is_the_jobs(self, harmony: PreTrainedTokenizerBase) -> None:
        assert "Current date: 2026-01-01" in render(harmony, chat("a", "b"))[0]


class TestThinking:
    @pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
    def test_goes_to_the_templates_own_channel_under_any_name(self, harmony: PreTrainedTokenizerBase, name: str) -> None:
        assert "analysis<|message|>Hm.<|end|>" in render(harmony, chat("a", "Ja.", **{name: "Hm."}))[0]

    def test_goes_before_the_answer_where_the_template_has_no_place_for_it(self, chatml: PreTrainedTokenizerBase) -> None:
        assert render(chatml, chat("a", "Ja.", thinking="Hm."))[1] == ["<think>\nHm.\n</think>\n\nJa.<|im_end|>"]

    def test_is_left_out_and_counted_when_the_job_says_so(self, harmony: PreTrainedTokenizerBase) -> None:
        renderer = chat_renderer(harmony, DataSection(thinking="drop"))
        assert renderer is not None
        assert "Hm." not in renderer.render(chat("a", "Ja.", thinking="Hm.")).text
        assert renderer.warnings == {"thinking left out": 1}

    def test_of_earlier_turns_is_counted_where_the_template_drops_it(self, harmony: PreTrainedTokenizerBase) -> None:
        renderer = chat_renderer(harmony, DataSection())
        assert renderer is not None
        messages = chat("a", "first", "b", "second")
        messages[1]["thinking"] = "only once"
        renderer.render(messages)
        assert renderer.warnings == {"thinking not rendered by the chat template": 1}


class TestToolCalls:
    def test_arguments_as_text_and_as_object_render_alike(self, harmony: PreTrainedTokenizerBase) -> None:
        as_text, as_object = weather_call('{"city": "Oslo"}'), weather_call({"city": "Oslo"})
        text, trained = render(harmony, as_text, [WEATHER_TOOL])
        assert (text, trained) == render(harmony, as_object, [WEATHER_TOOL])
        assert '{"city": "Oslo"}<|call|>' in trained[0]
        assert "None" not in text

    def test_a_template_that_leaves_a_call_out_is_refused(self, chatml: PreTrainedTokenizerBase) -> None:
        with pytest.raises(RowError, match="tool call"):
            render(chatml, weather_call({"city": "Oslo"}))

    def test_arguments_that_are_no_json_are_refused(self, harmony: PreTrainedTokenizerBase) -> None:
        with pytest.raises(RowError, match=r"messages\[1\]"):
            render(harmony, weather_call("{city"), [WEATHER_TOOL])


class TestMessages:
    def test_text_parts_are_joined(self, chatml: PreTrainedTokenizerBase) -> None:
        parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "morning"}]
        text, _ = render(chatml, chat(parts, "Hi"))
        assert "user\nGood morning<|im_end|>" in text

    def test_no_content_at_all_is_empty_text(self, chatml: PreTrainedTokenizerBase) -> None:
        assert "None" not in render(chatml, chat(None, "Hi"))[0]

    def test_an_image_part_is_refused(self, chatml: PreTrainedTokenizerBase) -> None:
        with pytest.raises(RowError, match="text parts"):
            render(chatml, chat([{"type": "image_url", "image_url": {}}], "Hi"))

    def test_sharegpt_messages_are_refused(self, harmony: PreTrainedTokenizerBase) -> None:
        with pytest.raises(RowError, match="ShareGPT"):
            render(harmony, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])

    @pytest.mark.parametrize("role", ["human", "gpt", "critic", None])
    def test_an_unknown_role_is_refused(self, harmony: PreTrainedTokenizerBase, role: str | None) -> None:
        with pytest.raises(RowError, match="role"):
            render(harmony, [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}])

    def test_a_message_that_the_template_leaves_out_is_refused(self, harmony: PreTrainedTokenizerBase) -> None:
        late_system = [*chat("a", "b"), {"role": "system", "content": "be brief"}, *chat("c", "d")]
        with pytest.raises(RowError, match=r"messages\[2\]"):
            render(harmony, late_system)
