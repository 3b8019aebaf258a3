"""One row of training data: what it must hold to be learned from, and its canonical form."""

import json
from typing import Any

from app.files.parsing import exact_json

Message = dict[str, Any]

FORMS = {
    "chat": {"messages"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
    "openai_preference": {"input"},
    "preference": {"chosen", "rejected"},
    "labelled": {"prompt", "completion", "label"},
    "prompt_completion": {"prompt", "completion"},
    "text": {"text"},
}
"""The forms of rows that are read, with the columns that make them."""
OPTIONAL = {
    "chat": {"tools"},
    "sharegpt": {"tools", "system"},
    "alpaca": {"input", "system", "history"},
    "openai_preference": {
        "preferred_output",
        "non_preferred_output",
        "preferred_completion",
        "non_preferred_completion",
    },
    "preference": {"prompt", "tools"},
    "labelled": {"tools"},
    "prompt_completion": {"tools"},
    "text": set(),
}
"""What else is read of them; every other column is left out, and counted."""
FORMATS = (
    "`messages`, `conversations`, `instruction` and `output`, `prompt` and `completion`, `text`, or for preferences "
    "`input` with `preferred_output` and "
    "`non_preferred_output`, `prompt` with `chosen` and `rejected`, or `prompt`, `completion` and `label`"
)
METHOD_KINDS = {
    "supervised": ("messages", "completion", "text"),
    "cpt": ("text",),
    "dpo": ("preference",),
    "orpo": ("preference",),
    "kto": ("label",),
}
"""Which kinds of rows a training method learns from."""
PREFERRED = (("preferred_output", "non_preferred_output"), ("preferred_completion", "non_preferred_completion"))
"""OpenAI's names of the two answers; the second pair is of its older specification."""
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = {"role", "content", "thinking", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name", "weight"}
THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")
ASSISTANTS_FIELDS = {*THINKING_FIELDS, "tool_calls", "weight"}
KINDS = {"messages": "messages", "chosen": "preference", "label": "label", "completion": "completion", "text": "text"}
"""A key of the canonical form -> what kind of row has it, in this order."""


class Unusable(Exception):
    """A row nothing should be learned from: `path` names the place in the row."""

    def __init__(self, code: str, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path


def canonical(row: dict[str, Any]) -> dict[str, Any]:
    """The row as the trainer reads it; Unusable where it cannot teach what it seems to."""
    form = form_of(row)
    if form == "chat":
        return _chat(row["messages"], row.get("tools"), "messages")
    if form == "sharegpt":
        return _chat(_from_sharegpt(row), row.get("tools"), "conversations")
    if form == "alpaca":
        return _chat(_from_alpaca(row), None, "output")
    if form == "openai_preference":
        return _openai_preference(row)
    if form == "preference":
        return _preference(row)
    if form == "labelled":
        return _labelled(row)
    if form == "prompt_completion":
        return _prompt_completion(row["prompt"], row["completion"], row.get("tools"))
    return {"text": _filled_text(row["text"], "text")}


def form_of(row: dict[str, Any]) -> str:
    """Which of the forms that are read a row has: the first whose columns are all there. Unusable for any other."""
    form = next((form for form, columns in FORMS.items() if columns <= row.keys()), None)
    if form is None:
        keys = ", ".join(f"`{key[:40]}`" for key in list(row)[:8]) or "nothing"
        raise Unusable("unknown_row_format", f"A row needs {FORMATS}; this one holds {keys}.")
    return form


def prompt(messages: list[dict[str, Any]], path: str) -> list[Message]:
    """A chat to be answered, in canonical form; Unusable where a template could not print it."""
    if not messages:
        raise Unusable("no_messages", "A prompt needs at least one message.", path)
    return [_message(message, f"{path}[{index}]") for index, message in enumerate(messages)]


def kind(row: dict[str, Any]) -> str:
    """Which of the canonical forms a row has."""
    return next(kind for key, kind in KINDS.items() if key in row)


def check_method(row: dict[str, Any], method: str) -> None:
    """Unusable where a method cannot learn from rows of this kind."""
    allowed = METHOD_KINDS[method]
    if kind(row) not in allowed:
        wanted = " or ".join(f"`{name}`" for name in allowed)
        raise Unusable("wrong_row_format", f"Method {method} learns from {wanted} rows; this is a `{kind(row)}` row.")


def _chat(messages: Any, tools: Any, path: str) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages:
        raise Unusable("no_messages", f"`{path}` must be a list of at least one message.", path)
    cleaned = [_message(message, f"{path}[{index}]") for index, message in enumerate(messages)]
    _check_turns(cleaned, path)
    return {"messages": cleaned} | _tools(tools)


def _tools(tools: Any) -> dict[str, Any]:
    if tools is None or tools == []:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("invalid_tools", "`tools` must be a list of objects.", "tools")
    return {"tools": tools}


def _check_turns(messages: list[Message], path: str) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise Unusable("no_assistant_turn", "No message is the assistant's: there is no answer to learn.", path)
    if messages[-1]["role"] != "assistant":
        last = f"{path}[{len(messages) - 1}]"
        raise Unusable(
            "last_turn_not_assistant", f"The last message is the {messages[-1]['role']}'s, not the assistant's.", last
        )
    if all(message.get("weight") == 0 for message in answers):
        raise Unusable("no_trainable_turn", "Every answer of the assistant has weight 0.", path)


def _message(message: Any, path: str) -> Message:
    if not isinstance(message, dict):
        raise Unusable("invalid_message", "A message must be an object with `role` and `content`.", path)
    if message.keys() == {"role", "content"} and message["role"] in ROLES and _is_said(message["content"]):
        return {"role": message["role"], "content": message["content"]}  # most messages: nothing else can be wrong
    given = {key: value for key, value in message.items() if value is not None}
    if not given.keys() <= FIELDS:
        unknown = next(key for key in given if key not in FIELDS)
        text = f"Unknown field `{unknown[:80]}`: it would be lost. Allowed: {', '.join(sorted(FIELDS))}."
        raise Unusable("unknown_message_field", text, f"{path}.{unknown[:80]}")
    role = given.get("role")
    if role not in ROLES:
        raise Unusable("unknown_role", f"The role is {json.dumps(role)[:80]}; allowed: {', '.join(ROLES)}.", f"{path}.role")
    cleaned: Message = {"role": role, "content": _text(given.get("content", ""), f"{path}.content")}
    for name in ("tool_call_id", "name"):
        if name in given:
            cleaned[name] = _string(given[name], f"{path}.{name}")
    if role == "assistant":
        return cleaned | _assistant_fields(given, cleaned["content"], path)
    _check_plain(given, path)
    return cleaned


def _is_said(content: Any) -> bool:
    return isinstance(content, str) and content.strip() != ""


def _assistant_fields(given: Message, content: str, path: str) -> Message:
    fields: Message = {}
    thinking = {name: _string(given[name], f"{path}.{name}") for name in THINKING_FIELDS if name in given}
    if len(set(thinking.values())) > 1:
        raise Unusable("ambiguous_thinking", f"{' and '.join(thinking)} differ: keep one.", path)
    if thinking:
        fields["thinking"] = next(iter(thinking.values()))
    if given.get("tool_calls"):
        fields["tool_calls"] = _tool_calls(given["tool_calls"], f"{path}.tool_calls")
    if "weight" in given:
        if given["weight"] not in (0, 1):
            raise Unusable("invalid_weight", "`weight` must be 0 or 1.", f"{path}.weight")
        fields["weight"] = int(given["weight"])
    if not content.strip() and not fields.get("tool_calls") and not fields.get("thinking"):
        raise Unusable("empty_assistant_turn", "The assistant says nothing: there is nothing to learn.", path)
    return fields


def _check_plain(given: Message, path: str) -> None:
    """A message that is not the assistant's must say something, in plain content."""
    if "content" not in given:
        raise Unusable("missing_content", "The message has no `content`.", f"{path}.content")
    for name in sorted(given.keys() & ASSISTANTS_FIELDS):
        if given[name] not in ("", []):
            raise Unusable("unknown_message_field", f"Only the assistant's messages may have `{name}`.", f"{path}.{name}")


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise Unusable("invalid_tool_calls", "`tool_calls` must be a list.", path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("invalid_tool_calls", "A tool call needs `function.name` and `function.arguments`.", path)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Templates print arguments as JSON: a text would come out as quoted, escaped JSON, and be learned so.
        try:
            arguments = exact_json(arguments or "{}")
        except (ValueError, RecursionError) as error:
            message = f"The arguments are not JSON: {str(error)[:80]}."
            raise Unusable("invalid_tool_arguments", message, f"{path}.function.arguments") from None
    if not isinstance(arguments, dict):
        raise Unusable("invalid_tool_arguments", "The arguments must be an object.", f"{path}.function.arguments")
    return {**call, "type": call.get("type", "function"), "function": function | {"arguments": arguments}}


def _text(content: Any, path: str) -> str:
    """A message's text. Parts are joined: templates print a list as a programming language would."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("invalid_content", "`content` must be text, a list of text parts, or null.", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise Unusable("unsupported_content_part", 'Only parts {"type": "text", "text": ...} can be trained on.', path)
    return str(part["text"])


def _from_sharegpt(row: dict[str, Any]) -> Any:
    turns = row["conversations"]
    if not isinstance(turns, list):
        return turns
    messages = [_sharegpt_turn(turn, f"conversations[{index}]") for index, turn in enumerate(turns)]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return system + messages


def _sharegpt_turn(turn: Any, path: str) -> Message:
    if not isinstance(turn, dict) or "from" not in turn:
        raise Unusable("invalid_message", "A turn must be an object with `from` and `value`.", path)
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        text = f"`from` is {json.dumps(speaker)[:80]}; known: {', '.join(SHAREGPT_ROLES)}."
        raise Unusable("unknown_role", text, f"{path}.from")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[speaker], "content": turn.get("value"), **rest}


def _from_alpaca(row: dict[str, Any]) -> list[Message]:
    """`instruction` with what it is applied to below it; a blank `input` is no input."""
    if row.get("history"):
        raise Unusable("invalid_message", "Earlier turns in `history` are not read: use `messages`.", "history")
    given = _string(row.get("input") or "", "input")
    asked = _filled_text(row["instruction"], "instruction") + (f"\n\n{given}" if given.strip() else "")
    system = _string(row.get("system") or "", "system")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": _filled_text(row["output"], "output")}]
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages


def _openai_preference(row: dict[str, Any]) -> dict[str, Any]:
    given = row["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise Unusable("invalid_preference", "`input` must be an object with `messages`.", "input")
    names = next((pair for pair in PREFERRED if all(name in row for name in pair)), None)
    if names is None:
        raise Unusable("invalid_preference", "`preferred_output` and `non_preferred_output` must stand beside `input`.")
    chat = {"prompt": given["messages"], "chosen": row[names[0]], "rejected": row[names[1]], "tools": given.get("tools")}
    return _conversational_preference(chat, {"prompt": "input.messages", "chosen": names[0], "rejected": names[1]})


def _preference(row: dict[str, Any]) -> dict[str, Any]:
    row = row if "prompt" in row else _with_shared_prompt(row)
    if isinstance(row["prompt"], list):
        return _conversational_preference(row, {name: name for name in ("prompt", "chosen", "rejected")})
    chosen, rejected = _filled_text(row["chosen"], "chosen"), _filled_text(row["rejected"], "rejected")
    return {"prompt": _string(row["prompt"], "prompt"), "chosen": chosen, "rejected": _unlike(chosen, rejected, "rejected")}


def _with_shared_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's rows without a prompt: two whole chats that are the same up to their answers."""
    chats = [row["chosen"], row["rejected"]]
    if not all(isinstance(chat, list) and len(chat) > 1 for chat in chats) or row["chosen"][:-1] != row["rejected"][:-1]:
        text = "Without `prompt`, `chosen` and `rejected` must be chats that differ only in their last message."
        raise Unusable("invalid_preference", text, "prompt")
    return {**row, "prompt": row["chosen"][:-1], "chosen": row["chosen"][-1:], "rejected": row["rejected"][-1:]}


def _conversational_preference(row: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    prompt = _context(row["prompt"], paths["prompt"])
    chosen, rejected = (_answer(row[name], paths[name]) for name in ("chosen", "rejected"))
    value = {"prompt": prompt, "chosen": chosen, "rejected": _unlike(chosen, rejected, paths["rejected"])}
    return value | _tools(row.get("tools"))


def _labelled(row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row["label"], bool):
        raise Unusable("invalid_label", "`label` must be true (a good answer) or false.", "label")
    if isinstance(row["prompt"], list):
        value = {"prompt": _context(row["prompt"], "prompt"), "completion": _answer(row["completion"], "completion")}
        return value | {"label": row["label"]} | _tools(row.get("tools"))
    completion = _filled_text(row["completion"], "completion")
    return {"prompt": _string(row["prompt"], "prompt"), "completion": completion, "label": row["label"]}


def _context(messages: Any, path: str) -> list[Message]:
    """What an answer answers: its own answers of the assistant carry no loss."""
    if not isinstance(messages, list) or not messages:
        raise Unusable("no_messages", f"`{path}` must be a list of at least one message.", path)
    cleaned = [_message(message, f"{path}[{index}]") for index, message in enumerate(messages)]
    return [message | {"weight": 0} if _is_answer(message) else message for message in cleaned]


def _answer(messages: Any, path: str) -> list[Message]:
    if not isinstance(messages, list) or len(messages) != 1:
        raise Unusable("invalid_preference", f"`{path}` must be a list of one message, the assistant's.", path)
    message = _message(messages[0], f"{path}[0]")
    if message["role"] != "assistant":
        text = f"The answer is the {message['role']}'s, not the assistant's."
        raise Unusable("last_turn_not_assistant", text, f"{path}[0].role")
    return [message]


def _unlike(chosen: Any, rejected: Any, path: str) -> Any:
    if chosen == rejected:
        raise Unusable("equal_answers", "Both answers are the same: there is nothing to prefer.", path)
    return rejected


def _prompt_completion(prompt: Any, completion: Any, tools: Any) -> dict[str, Any]:
    if isinstance(prompt, list) and isinstance(completion, list):
        # Only the completion is learned: earlier answers of the assistant are context.
        context = [message | {"weight": 0} if _is_answer(message) else message for message in prompt]
        return _chat(context + completion, tools, "messages")
    return {"prompt": _string(prompt, "prompt"), "completion": _filled_text(completion, "completion")}


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _filled_text(value: Any, path: str) -> str:
    if not _string(value, path).strip():
        raise Unusable("empty_text", f"`{path}` is empty: there is nothing to learn.", path)
    return str(value)


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise Unusable("invalid_text", f"`{path}` must be text.", path)
    return value
