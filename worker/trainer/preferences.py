"""Rows of preference methods: a prompt with two answers, or with one and whether it is good."""

from typing import NamedTuple, Self

from worker.trainer.chat import RowError


class Pair(NamedTuple):
    """A prompt with the answer to prefer and the one to avoid."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def num_trained(self) -> int:
        return len(self.chosen_ids) + len(self.rejected_ids)

    @property
    def num_tokens(self) -> int:
        return 2 * len(self.prompt_ids) + self.num_trained

    @property
    def longest(self) -> int:
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))

    def cut(self, max_length: int) -> Self:
        """Both answers cut at their end; RowError where nothing is left to prefer."""
        room = _room(self.prompt_ids, max_length)
        cut = self._replace(chosen_ids=self.chosen_ids[:room], rejected_ids=self.rejected_ids[:room])
        if cut.chosen_ids == cut.rejected_ids:
            raise RowError(f"the answers are the same in their first {max_length} tokens, so there is nothing to prefer")
        return cut


class Labelled(NamedTuple):
    """A prompt with an answer that is good or not."""

    prompt_ids: list[int]
    completion_ids: list[int]
    label: bool

    @property
    def num_trained(self) -> int:
        return len(self.completion_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def longest(self) -> int:
        return self.num_tokens

    def cut(self, max_length: int) -> Self:
        """The answer cut at its end; RowError where nothing of it is left."""
        return self._replace(completion_ids=self.completion_ids[: _room(self.prompt_ids, max_length)])


class Answer(NamedTuple):
    """The tokens of a prompt with an answer, and where the answer's begin."""

    ids: list[int]
    start: int


def pair(chosen: Answer, rejected: Answer) -> Pair:
    """Both answers after the tokens that they share: at the seam, plain text may merge into other tokens."""
    start = min(chosen.start, rejected.start, _num_shared(chosen.ids, rejected.ids))
    _check_prompt(start)
    if chosen.ids[start:] == rejected.ids[start:]:
        raise RowError("both answers are the same tokens: there is nothing to prefer")
    return Pair(chosen.ids[:start], chosen.ids[start:], rejected.ids[start:])


def labelled(answer: Answer, label: bool) -> Labelled:
    """One answer with its label."""
    _check_prompt(answer.start)
    return Labelled(answer.ids[: answer.start], answer.ids[answer.start :], label)


def _check_prompt(num_tokens: int) -> None:
    if num_tokens == 0:
        raise RowError("the prompt is empty: an answer's first token is predicted from it")


def _num_shared(left: list[int], right: list[int]) -> int:
    unlike = (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(unlike, min(len(left), len(right)))


def _room(prompt_ids: list[int], max_length: int) -> int:
    if len(prompt_ids) >= max_length:
        raise RowError(f"the prompt alone fills data.max_length {max_length}: nothing is left to learn (no_trainable_tokens)")
    return max_length - len(prompt_ids)
