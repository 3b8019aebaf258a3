"""What a model would learn from rows: their text under its template, and which tokens carry loss. By the trainer's own code."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.jobs.spec import TrainingSpec
from worker.trainer.chat import ChatRenderer, RowError, chat_renderer
from worker.trainer.data import IGNORED, Counts, Example, Tokens, fit, tokenize_row, touched
from worker.trainer.preferences import Pair

MAX_LISTED = 100  # rows named for each thing that may be wrong; all are counted
SHOWN_TOKENS = 4096  # of a row that is shown
SHOWN_CUT_CHARACTERS = 2000


@dataclass
class Spread:
    """Numbers of which the fewest, the most and the sum are kept."""

    count: int = 0
    fewest: int = 0
    most: int = 0
    total: int = 0

    def add(self, number: int) -> None:
        self.fewest = min(self.fewest, number) if self.count else number
        self.most = max(self.most, number)
        self.total += number
        self.count += 1

    def as_json(self) -> dict[str, Any]:
        mean = round(self.total / self.count, 2) if self.count else 0.0
        return {"fewest": self.fewest, "most": self.most, "mean": mean, "total": self.total}


@dataclass
class Preview:
    """Gathered row by row: those of `lines` are shown whole, of the others their tokens are counted."""

    spec: TrainingSpec
    tokenizer: PreTrainedTokenizerBase
    lines: Collection[int]
    shown: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    num_refused: int = 0
    long_rows: list[dict[str, Any]] = field(default_factory=list)
    num_long_rows: int = 0
    counts: Counts = field(default_factory=Counts)
    tokens: Spread = field(default_factory=Spread)
    trained: Spread = field(default_factory=Spread)

    def __post_init__(self) -> None:
        self.chat = chat_renderer(self.tokenizer, self.spec.data)

    def add(self, line: int, row: dict[str, Any]) -> str | None:
        """Tokenize one row in canonical form; why nothing can be learned from it, if so."""
        self.counts.rows_read += 1
        is_shown, lost = line in self.lines, self._lost()
        try:
            example = tokenize_row(row, self.spec.data, self.tokenizer, self.chat, self.spec.method)
        except RowError as error:
            self._refuse(line, error)
            if is_shown:
                self.shown.append({"line": line, "error": str(error), "sequences": [], "messages": [], "dropped": []})
            return str(error)
        if is_shown:
            dropped = [text for text, times in self._lost().items() if times > lost.get(text, 0)]
            self.shown.append(self._show(line, row, example) | {"dropped": dropped})
        return self._count(line, row, example)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        data = self.spec.data
        return {
            "rows_read": self.counts.rows_read,
            "rows_used": self.counts.rows_used,
            "num_errors": self.num_refused,
            "errors": self.refused,
            "tokens_per_row": self.tokens.as_json(),
            "trained_tokens_per_row": self.trained.as_json(),
            "dropped": self._lost(),
            "max_length": data.max_length,
            "on_long_rows": data.on_long_rows,
            "num_long_rows": self.num_long_rows,
            "long_rows": self.long_rows,
            "rows": self.shown,
        }

    def _lost(self) -> dict[str, int]:
        """What the template has left out so far, and how often."""
        return dict(self.chat.warnings) if self.chat else {}

    def _refuse(self, line: int, error: RowError) -> None:
        self.num_refused += 1
        if len(self.refused) < MAX_LISTED:
            self.refused.append({"line": line, "message": str(error)})

    def _count(self, line: int, row: dict[str, Any], example: Example) -> str | None:
        if example.longest > self.spec.data.max_length:
            self.num_long_rows += 1
            if len(self.long_rows) < MAX_LISTED:
                self.long_rows.append({"line": line, "tokens": example.longest})
        try:
            fitting = fit(example, self.spec.data, self.counts, is_text="text" in row)
        except RowError as error:
            self._refuse(line, error)
            return str(error)
        self.counts.rows_used += bool(fitting)
        if fitting:
            self.tokens.add(sum(piece.num_tokens for piece in fitting))
            self.trained.add(sum(piece.num_trained for piece in fitting))
        return None

    def _show(self, line: int, row: dict[str, Any], example: Example) -> dict[str, Any]:
        sequences = [self._sequence(name, ids, labels) for name, ids, labels in _sequences(example)]
        messages: list[dict[str, Any]] = []
        if "messages" in row and isinstance(example, Tokens) and self.chat is not None:
            messages = list(self._messages(row, example, self.chat))
        return {"line": line, "error": None, "sequences": sequences, "messages": messages}

    def _sequence(self, name: str, ids: list[int], labels: list[int]) -> dict[str, Any]:
        limit = self.spec.data.max_length
        segments = []
        for is_trained, group in groupby(zip(ids[:SHOWN_TOKENS], labels, strict=False), key=lambda pair: pair[1] != IGNORED):
            piece = [token for token, _ in group]
            segments.append({"text": self._text(piece), "tokens": len(piece), "trained": is_trained})
        beyond = {
            "tokens": len(ids) - limit,
            "trained_tokens": sum(label != IGNORED for label in labels[limit:]),
            "text": self._text(ids[limit:])[:SHOWN_CUT_CHARACTERS],
        }
        return {
            "name": name,
            "text": self._text(ids[:SHOWN_TOKENS]),
            "tokens": len(ids),
            "trained_tokens": sum(label != IGNORED for label in labels),
            "token_ids": ids[:SHOWN_TOKENS],
            "segments": segments,
            "beyond_max_length": beyond if len(ids) > limit else None,
        }

    def _messages(self, row: dict[str, Any], example: Tokens, chat: ChatRenderer) -> Iterator[dict[str, Any]]:
        """What of each message is learned: nothing, unless the assistant wrote it. With `loss_on: all` also all around it."""
        rendered = replace(chat, warnings=Counter()).render(row["messages"], row.get("tools"))
        encoded = self.tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        spans = iter(rendered.spans)
        for index, message in enumerate(row["messages"]):
            learned = message["role"] == "assistant" and message.get("weight") != 0
            start, end = next(spans) if learned else (0, 0)
            hits = touched(encoded["offset_mapping"], [(start, end)])
            trained = sum(hit and label != IGNORED for hit, label in zip(hits, example.labels, strict=True))
            yield {
                "index": index,
                "role": message["role"],
                "trained_tokens": trained,
                "trained_text": rendered.text[start:end][: SHOWN_TOKENS * 4],
            }

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _sequences(example: Example) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, ids and labels of what the model reads of a row: one sequence, or one per answer."""
    if isinstance(example, Tokens):
        yield "row", example.input_ids, example.labels
        return
    if isinstance(example, Pair):
        answers = {"chosen": example.chosen_ids, "rejected": example.rejected_ids}
    else:
        answers = {"completion": example.completion_ids}
    for name, answer in answers.items():
        yield name, example.prompt_ids + answer, [IGNORED] * len(example.prompt_ids) + answer
