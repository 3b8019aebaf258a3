"""Chats become text under the model's template, with the character ranges that the assistant wrote."""

import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from app.jobs.spec import ChatMessage, DataSection

ROLES = {"system", "developer", "user", "assistant", "tool"}
THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")

Span = tuple[int, int]


class RowError(ValueError):
    """A row that cannot be trained on; the message says why."""


class Rendered(NamedTuple):
    """A chat as text, and the ranges of it that carry loss."""

    text: str
    spans: list[Span]


@dataclass
class ChatRenderer:
    """One tokenizer's template, and how thinking is put into it."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    has_markers: bool
    """The template marks the assistant's tokens itself; otherwise they are found by rendering prefixes."""
    thinking: Literal["field", "inline", "drop"] = "inline"
    warnings: Counter[str] = field(default_factory=Counter)

    def render(self, messages: Any, tools: Any = None) -> Rendered:
        """The text of a chat; RowError where the template would lose a part of it without a word."""
        turns = [self._turn(index, message) for index, message in enumerate(check_messages(messages))]
        schemas = _tool_schemas(tools)
        text, spans = self._marked(turns, schemas) if self.has_markers else self._by_prefixes(turns, schemas)
        assistants = [turn for turn in turns if turn["role"] == "assistant"]
        if len(spans) != len(assistants):
            raise RowError(f"the chat template renders {len(spans)} of {len(assistants)} assistant messages")
        self._check_nothing_is_lost(turns, text)
        trained = [span for span, turn in zip(spans, assistants, strict=True) if turn.get("weight", 1) != 0]
        return Rendered(text, [self._up_to_end_token(text, span) for span in trained])

    def text(self, messages: list[ChatMessage], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        """The plain text of prepared messages."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def _turn(self, index: int, message: ChatMessage) -> ChatMessage:
        turn = {key: value for key, value in message.items() if value is not None and key not in THINKING_FIELDS}
        turn["content"] = _joined_text(index, message.get("content"))
        if "tool_calls" in turn:
            turn["tool_calls"] = [_with_object_arguments(index, call) for call in turn["tool_calls"]]
        thinking = next((message[name] for name in THINKING_FIELDS if message.get(name)), None)
        if thinking is not None:
            self._add_thinking(turn, _joined_text(index, thinking))
        return turn

    def _add_thinking(self, turn: ChatMessage, thinking: str) -> None:
        if self.thinking == "field":
            turn["thinking"] = thinking
        elif self.thinking == "inline":
            turn["content"] = f"<think>\n{thinking}\n</think>\n\n{turn['content']}"
        else:
            self.warnings["thinking left out"] += 1

    def _marked(self, turns: list[ChatMessage], tools: Any) -> tuple[str, list[Span]]:
        text, spans = self._render(turns, tools, return_assistant_tokens_mask=True)
        return text, spans

    def _by_prefixes(self, turns: list[ChatMessage], tools: Any) -> tuple[str, list[Span]]:
        """Each assistant turn is what its chat has more than the chat before it with the generation prompt."""
        text = self.text(turns, tools)
        spans = []
        for index in (index for index, turn in enumerate(turns) if turn["role"] == "assistant"):
            before = self.text(turns[:index], tools, add_generation_prompt=True) if index else ""
            until = self.text(turns[: index + 1], tools)
            if not (until.startswith(before) and text.startswith(until)):
                raise RowError(
                    "the chat template renders earlier messages differently once later ones follow, so the assistant's "
                    "tokens cannot be told apart: set data.chat_template to one with {% generation %} markers, or "
                    "data.loss_on to `all`"
                )
            spans.append((len(before), len(until)))
        return text, spans

    def _render(self, messages: list[ChatMessage], tools: Any, **options: Any) -> tuple[str, list[Span]]:
        try:
            rendered: Any = render_jinja_template(
                [messages], tools=tools, chat_template=self.template, **(options | self.tokenizer.special_tokens_map)
            )
        except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            raise RowError(f"the chat template cannot render this chat: {error}") from error
        (text,), spans = rendered
        return text, [(start, end) for start, end in spans[0]] if spans else []

    def _up_to_end_token(self, text: str, span: Span) -> Span:
        """The model must learn to stop: a turn ends with its end token, and what the template writes after is not its own."""
        start, end = span
        end = start + len(text[start:end].rstrip())
        if not text[start:end].endswith(tuple(end_tokens(self.tokenizer))):
            raise RowError(
                "the chat template ends an assistant message with no end token, so the model would not learn to stop"
            )
        return start, end

    def _check_nothing_is_lost(self, turns: list[ChatMessage], text: str) -> None:
        for index, turn in enumerate(turns):
            calls = [call["function"]["name"] for call in turn.get("tool_calls", [])]
            if any(name not in text for name in calls):
                raise RowError(f"the chat template leaves out a tool call of messages[{index}]")
            if not _appears(turn.get("thinking", ""), text):
                self.warnings["thinking not rendered by the chat template"] += 1
            if _appears(turn["content"], text):
                continue
            if turn["role"] != "assistant":
                raise RowError(f"the chat template leaves out the content of messages[{index}] (role {turn['role']!r})")
            self.warnings["assistant content not rendered by the chat template"] += 1


def chat_renderer(tokenizer: PreTrainedTokenizerBase, data: DataSection) -> ChatRenderer | None:
    """How this model's chats are rendered; None where it has no chat template."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["default"]
    if template is None:
        return None
    training_template = template if has_generation_markers(template) else _training_template(tokenizer)
    date = dt.date.fromisoformat(data.template_date) if data.template_date else dt.date.today()
    renderer = ChatRenderer(tokenizer, _dated(training_template or template, date), training_template is not None)
    renderer.thinking = "field" if data.thinking == "auto" and _renders_thinking(renderer) else _fallback(data.thinking)
    return renderer


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Tokens that may end a turn: every special one."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return special | set(tokenizer.all_special_tokens)


def check_messages(messages: Any) -> list[ChatMessage]:
    """The messages of a row, each with a role that templates know: an unknown one is dropped by many without a word."""
    if not isinstance(messages, list) or not messages:
        raise RowError("`messages` must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RowError(f"messages[{index}] must be an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            hint = " (this looks like ShareGPT's from/value form)" if "from" in message else ""
            raise RowError(f"messages[{index}].role is {role!r}{hint}: use one of {', '.join(sorted(ROLES))}")
    return messages


def _dated(template: str, date: dt.date) -> str:
    """The template with its day fixed, so that a run resumed tomorrow sees the same rows."""
    return re.sub(r"""strftime_now\((["'])(.*?)\1\)""", lambda match: json.dumps(date.strftime(match[2])), template)


def _fallback(thinking: Literal["auto", "inline", "drop"]) -> Literal["inline", "drop"]:
    return "drop" if thinking == "drop" else "inline"


def _training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """TRL's variant of a known template with the assistant's tokens marked."""
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        return None


def _renders_thinking(renderer: ChatRenderer) -> bool:
    probe = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "thought-of-the-probe"}]
    try:
        return "thought-of-the-probe" in renderer.text(probe)
    except RowError:
        return False


def _joined_text(index: int, content: Any) -> str:
    """Content as text: parts are joined, none at all is empty and never the word None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise RowError(f"messages[{index}].content must be text or a list of text parts")


def _with_object_arguments(index: int, call: Any) -> dict[str, Any]:
    """OpenAI's wire has arguments as JSON text, templates print an object: as text they would be encoded twice."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": {"arguments": {}, **function, "name": function["name"]}}
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise RowError(f"messages[{index}].tool_calls holds no valid function call: {error}") from error


def _tool_schemas(tools: Any) -> list[dict[str, Any]] | None:
    """OpenAI leaves a description optional, the harmony template does not."""
    if not tools:
        return None
    try:
        schemas = json.loads(tools) if isinstance(tools, str) else tools
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in schemas]
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise RowError(f"`tools` must be a list of function tools: {error}") from error


def _appears(part: str, text: str) -> bool:
    part = part.strip()
    return part in text or any(form in text for form in _json_forms(part))


def _json_forms(part: str) -> Iterable[str]:
    """How templates print text through `tojson`."""
    return (json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
