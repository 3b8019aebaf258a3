"""FastAPI's validation errors in our words: where, what is wrong, and which name was probably meant."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel


class ErrorOut(BaseModel):
    """What went wrong. `param` is the dotted path of the field; `code` is stable, messages may change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """Every response that is not a success."""

    error: ErrorOut


CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
MAX_ERRORS = 20


def envelope(error: RequestValidationError, route: object) -> tuple[int, dict[str, Any]]:
    """Status and body for a request that does not fit its schema; the first error speaks, all are listed."""
    found = _merged([_describe(one, error.body, route) for one in error.errors()[:MAX_ERRORS]])
    is_unreadable = any(one["type"] == "json_invalid" for one in error.errors())
    return 400 if is_unreadable else 422, {"error": {**found[0], "type": "invalid_request_error", "errors": found}}


def _merged(found: list[dict[str, str | None]]) -> list[dict[str, str | None]]:
    """One finding per value: where several types are possible, Pydantic says of each why it does not fit."""
    merged: dict[str | None, dict[str, str | None]] = {}
    for one in found:
        first = merged.setdefault(one["param"], one)
        if first is not one:
            reason = str(one["message"]).removeprefix(f"`{one['param']}`: ")
            first["message"] = f"{first['message']}; or: {reason}"
    return list(merged.values())


def _describe(error: dict[str, Any], body: object, route: object) -> dict[str, str | None]:
    if error["type"] == "json_invalid":
        return _finding(
            f"The body is not valid JSON: {error['ctx']['error']} at character {error['loc'][-1]}.", None, "invalid_json"
        )
    where, *rest = error["loc"]
    in_body = where == "body"
    param = (
        error.get("ctx", {}).get("param") or (_path(rest, body, error["type"]) if in_body else ".".join(map(str, rest))) or None
    )
    if error["type"] == "extra_forbidden":
        return _finding(_unknown_field(str(param), route), param, CODES["extra_forbidden"])
    if param is None:
        return _finding("A JSON object is required, sent with `Content-Type: application/json`.", None, "invalid_body")
    if error["type"] == "missing":
        return _finding(f"`{param}` is required.", param, CODES["missing"])
    text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return _finding(f"`{param}`: {text}", param, "invalid_value")


def _finding(message: str, param: str | None, code: str) -> dict[str, str | None]:
    return {"message": message, "param": param, "code": code}


def _path(parts: Sequence[str | int], body: object, error_type: str) -> str:
    """The dotted path of the value in the body. Pydantic puts names of union branches between: they are no keys there."""
    path, last = "", None
    for part in parts:
        if part == last and isinstance(body, Mapping) and part not in body:
            continue  # {"type": "x", "x": {...}}: the branch has the name of its key, and was taken for it
        last = part
        if isinstance(part, int) and isinstance(body, Sequence) and part < len(body):
            path, body = f"{path}[{part}]", body[part]
        elif isinstance(body, Mapping) and (part in body or error_type == "missing"):
            path, body = (f"{path}.{part}" if path else str(part)), body.get(part)
    return path


def _unknown_field(param: str, route: object) -> str:
    fields = list(_field_paths(_body_model(route)))
    parent, _, name = param.rpartition(".")
    beside = [field for field in fields if field.rpartition(".")[0] == parent]
    close = _closest(name, beside) or _closest(name, fields)
    return f"Unknown field `{param}`." + (f" Did you mean `{close}`?" if close else "")


def _closest(name: str, fields: list[str]) -> str | None:
    names = {field.rpartition(".")[2]: field for field in reversed(fields)}
    matches = get_close_matches(name, names, n=1)
    return names[matches[0]] if matches else None


def _body_model(route: object) -> object:
    return route.body_field.field_info.annotation if isinstance(route, APIRoute) and route.body_field else None


def _field_paths(annotation: object, prefix: str = "") -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield prefix + name
            yield from _field_paths(field.annotation, f"{prefix}{name}.")
    else:
        for inner in get_args(annotation):
            yield from _field_paths(inner, prefix)
