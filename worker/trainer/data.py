"""Rows become token ids with labels, once per host, before any rank waits for another.

We tokenise ourselves: reading line by line keeps values that a table reader would coerce, and every row that would teach
nothing is an error with its line. TRL then gets plain `input_ids` and `labels` and prepares nothing.
"""

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import DataSection, TrainingSpec
from worker.trainer.chat import ChatRenderer, Rendered, RowError, Span, chat_renderer
from worker.trainer.failures import TrainerError
from worker.trainer.preferences import Answer, Labelled, Pair, labelled, pair
from worker.workspace import Workspace, lines_of, read_json, write_json

IGNORED = -100  # the label of a token that carries no loss, as torch's cross entropy has it
MAX_REPORTED_ERRORS = 10  # rows named in a failure; enough to see the pattern, few enough to read
POLL_INTERVAL_S = 0.1


class Tokens(NamedTuple):
    """A row as the model sees it."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_trained(self) -> int:
        return sum(label != IGNORED for label in self.labels)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def longest(self) -> int:
        return len(self.input_ids)

    def cut(self, max_length: int) -> "Tokens":
        """The row without its end; RowError where the end was all that carried loss."""
        cut = Tokens(self.input_ids[:max_length], self.labels[:max_length])
        if cut.num_trained == 0:
            raise RowError(
                f"{self.longest} tokens, more than data.max_length {max_length}, and its first {max_length} hold nothing to "
                "learn (no_trainable_tokens)"
            )
        return cut


Example = Tokens | Pair | Labelled
"""A row as its method learns from it."""


@dataclass
class Counts:
    """What became of the rows of one file."""

    rows_read: int = 0
    rows_used: int = 0
    rows_skipped: int = 0
    rows_truncated: int = 0
    rows_split: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest_row: int = 0
    warnings: dict[str, int] = field(default_factory=dict)


class Data(NamedTuple):
    """The tokenised files of a job."""

    train: datasets.Dataset
    validation: datasets.Dataset | None
    counts: dict[str, Counts]
    fingerprint: str
    """Changes with the rows, the template and every setting that decides tokens."""

    def example(self) -> list[int]:
        """The first row's tokens, with its answer where it has several."""
        row = self.train[0]
        if "input_ids" in row:
            return list(row["input_ids"])
        return list(row["prompt_ids"]) + list(row.get("chosen_ids") or row["completion_ids"])


def load_data(workspace: Workspace, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The tokenised data of a job: written by the first rank of each host, mapped into memory by all."""
    fingerprint = _fingerprint(workspace, spec, tokenizer)
    folder = workspace.train_data.parent / f"tokens-{fingerprint[:16]}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if not folder.exists():
            _tokenize_files(workspace, spec, tokenizer, folder)
    else:
        _wait_for(folder, workspace)
    splits = {split: datasets.load_from_disk(str(folder / split)) for split in _files(workspace)}
    counts = {split: Counts(**value) for split, value in read_json(folder / "counts.json").items()}
    return Data(splits["train"], splits.get("validation"), counts, fingerprint)


def tokenize_file(
    path: Path, spec: DataSection, tokenizer: PreTrainedTokenizerBase, method: str = "supervised"
) -> tuple[list[Example], Counts]:
    """All usable rows of a file; TrainerError naming the first lines that are not."""
    chat = chat_renderer(tokenizer, spec)
    rows: list[Example] = []
    counts, problems = Counts(), []
    for number, line in _lines(path):
        counts.rows_read += 1
        try:
            row = _parse(line)
            fitting = fit(tokenize_row(row, spec, tokenizer, chat, method), spec, counts, is_text="text" in row)
        except RowError as error:
            counts.rows_skipped += 1
            problems.append(f"line {number}: {error}")
            continue
        counts.rows_used += bool(fitting)
        rows += fitting
    skips = spec.on_bad_rows == "skip"
    if problems and not skips:
        raise _invalid_file(path, problems)
    if not rows:
        left = f"no row is left to train on ({counts.rows_skipped} skipped)"
        raise _invalid_file(path, [left, *problems], "dataset_no_trainable_rows" if skips else None)
    counts.tokens = sum(row.num_tokens for row in rows)
    counts.trained_tokens = sum(row.num_trained for row in rows)
    counts.longest_row = max(row.longest for row in rows)
    handled = {
        "row skipped, longer than data.max_length": counts.rows_skipped - len(problems),
        f"row skipped, nothing to learn in it ({'; '.join(problems[:MAX_REPORTED_ERRORS])})": len(problems),
        "row cut to data.max_length": counts.rows_truncated,
        "text split at data.max_length": counts.rows_split,
    }
    counts.warnings = {text: times for text, times in handled.items() if times} | dict(chat.warnings if chat else {})
    return rows, counts


def tokenize_row(
    row: dict[str, Any],
    spec: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatRenderer | None,
    method: str = "supervised",
) -> Example:
    """One row in the canonical form that its method learns from; RowError where it teaches nothing."""
    if method in ("dpo", "orpo"):
        _require(row, method, "prompt", "chosen", "rejected")
        return pair(*(_answer(row, row[name], tokenizer, chat) for name in ("chosen", "rejected")))
    if method == "kto":
        _require(row, method, "prompt", "completion", "label")
        return labelled(_answer(row, row["completion"], tokenizer, chat), row["label"])
    if method == "cpt":
        _require(row, method, "text")
    return _tokens_with_labels(row, spec, tokenizer, chat)


def _tokens_with_labels(
    row: dict[str, Any], spec: DataSection, tokenizer: PreTrainedTokenizerBase, chat: ChatRenderer | None
) -> Tokens:
    if "messages" in row:
        tokens = _tokenize(_render(chat, row["messages"], row.get("tools")), tokenizer, add_special_tokens=False)
    elif "prompt" in row and "completion" in row:
        tokens = _tokenize_completion(row, tokenizer, chat)
    elif isinstance(row.get("text"), str):
        tokens = _tokenize_text("", row["text"], tokenizer)
    else:
        raise RowError(
            f"a row needs `messages`, `prompt` and `completion`, or `text`; this one has {', '.join(row) or 'nothing'}"
        )
    if spec.loss_on == "all":
        tokens = Tokens(tokens.input_ids, list(tokens.input_ids))
    # The first token is predicted from nothing, so it never carries loss; counting it would make the counts lie.
    tokens = Tokens(tokens.input_ids, [IGNORED, *tokens.labels[1:]])
    if tokens.num_trained == 0:
        raise RowError("nothing to learn: no assistant message or completion that carries loss (no_trainable_tokens)")
    return tokens


def _require(row: dict[str, Any], method: str, *names: str) -> None:
    if missing := [name for name in names if row.get(name) is None]:
        raise RowError(f"method {method} needs rows with {', '.join(names)}; this one lacks {', '.join(missing)}")


def _answer(row: dict[str, Any], answer: Any, tokenizer: PreTrainedTokenizerBase, chat: ChatRenderer | None) -> Answer:
    """The prompt with one answer, up to the answer's end token."""
    tokens = _tokenize_completion(row | {"completion": answer}, tokenizer, chat)
    trained = [index for index, label in enumerate(tokens.labels) if label != IGNORED]
    if not trained:
        raise RowError("nothing to learn: an answer is empty (no_trainable_tokens)")
    return Answer(tokens.input_ids[: trained[-1] + 1], trained[0])


def _render(chat: ChatRenderer | None, messages: Any, tools: Any) -> Rendered:
    if chat is None:
        raise RowError("the base model has no chat template: set data.chat_template, or use `text` or `prompt` rows")
    return chat.render(messages, tools)


def _tokenize_completion(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, chat: ChatRenderer | None) -> Tokens:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _tokenize_text(prompt, completion, tokenizer)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RowError("`prompt` and `completion` must both be text or both be lists of messages")
    context = [message | {"weight": 0} if isinstance(message, dict) else message for message in prompt]
    return _tokenize(_render(chat, context + completion, row.get("tools")), tokenizer, add_special_tokens=False)


def _tokenize_text(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Plain text, ended by the end token so that the model learns to stop."""
    span = (len(prompt), len(prompt) + len(completion))
    ids, labels = _tokenize(Rendered(prompt + completion, [span]), tokenizer, add_special_tokens=True)
    end = tokenizer.eos_token_id
    if isinstance(end, int) and (not ids or ids[-1] != end) and completion:
        return Tokens([*ids, end], [*labels, end])
    return Tokens(ids, labels)


def _tokenize(rendered: Rendered, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> Tokens:
    """Ids, and labels by position: a pad token that equals the end token must not hide the end token."""
    encoded = tokenizer(rendered.text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    offsets: list[Span] = encoded["offset_mapping"]
    trained = touched(offsets, rendered.spans)
    return Tokens(ids, [token if touched else IGNORED for token, touched in zip(ids, trained, strict=True)])


def touched(offsets: list[Span], spans: list[Span]) -> Iterator[bool]:
    """Which tokens hold a character of a span. Both lists run from left to right."""
    remaining = iter(spans)
    span = next(remaining, None)
    for start, end in offsets:
        while span is not None and span[1] <= start:
            span = next(remaining, None)
        yield span is not None and start < end and end > span[0]


def fit(row: Example, spec: DataSection, counts: Counts, *, is_text: bool) -> list[Example]:
    """A row no longer than max_length, handled as the job says: none of it, itself, or its pieces."""
    if row.longest <= spec.max_length:
        return [row]
    if spec.on_long_rows == "skip":
        counts.rows_skipped += 1
        return []
    if spec.on_long_rows == "truncate":
        cut = row.cut(spec.max_length)
        counts.rows_truncated += 1
        return [cut]
    if spec.on_long_rows == "split" and is_text and isinstance(row, Tokens):
        counts.rows_split += 1
        return list(_split(row, spec.max_length))
    length = f"{row.longest} tokens, more than data.max_length {spec.max_length}"
    raise RowError(f"{length}: raise data.max_length, or set data.on_long_rows to `skip` or `truncate`")


def _split(row: Tokens, max_length: int) -> Iterator[Tokens]:
    """The pieces of a text. Each begins with the last token of the one before, so that every token is predicted once."""
    for start in range(0, len(row.input_ids) - 1, max_length - 1):
        end = start + max_length
        yield Tokens(row.input_ids[start:end], [IGNORED, *row.labels[start + 1 : end]])


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise RowError("a row must be a JSON object")
    return row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every row, with the line that it stood on in the user's own file where that is known."""
    origin = lines_of(path)
    numbers = map(int, origin.read_text().split()) if origin.exists() else itertools.count(1)
    with path.open(encoding="utf-8-sig") as file:
        for number, line in zip(numbers, file, strict=False):
            if line.strip():
                yield number, line


def _invalid_file(path: Path, problems: list[str], named: str | None = None) -> TrainerError:
    more = len(problems) - MAX_REPORTED_ERRORS
    shown = problems[:MAX_REPORTED_ERRORS] + ([f"and {more} more"] if more > 0 else [])
    code, param = ("invalid_training_file", "training_file")
    if path.name.startswith("validation"):
        code, param = ("invalid_validation_file", "validation_file")
    return TrainerError(named or code, "; ".join(shown), param)


def _files(workspace: Workspace) -> dict[str, Path]:
    files = {"train": workspace.train_data, "validation": workspace.validation_data}
    return {split: path for split, path in files.items() if path.exists()}


def _fingerprint(workspace: Workspace, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([spec.method, spec.data.model_dump(), spec.model.name_or_path, spec.model.revision]).encode())
    digest.update(str(tokenizer.chat_template).encode())
    for split, path in _files(workspace).items():
        digest.update(split.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _tokenize_files(workspace: Workspace, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Tokenise every file of the job into `folder`, which appears only when it is whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    counts = {}
    for split, path in _files(workspace).items():
        rows, counts[split] = tokenize_file(path, spec.data, tokenizer, spec.method)
        columns = {name: [getattr(row, name) for row in rows] for name in rows[0]._fields}
        datasets.Dataset.from_dict(columns).save_to_disk(str(temporary / split))
    write_json(temporary / "counts.json", {split: asdict(value) for split, value in counts.items()})
    temporary.rename(folder)


def _wait_for(folder: Path, workspace: Workspace) -> None:
    """Wait for the host's first rank by looking at the disk: a collective would time out while it tokenises."""
    while not folder.exists():
        if workspace.failure.exists():
            raise RuntimeError("another rank failed while it tokenised the data")
        time.sleep(POLL_INTERVAL_S)
