"""OpenAI's names for the figures of a step; ours are the trainer's."""

from typing import Any

OPENAI_NAMES = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_mean_token_accuracy",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}


def in_openais_words(values: dict[str, Any]) -> dict[str, Any]:
    """The same figures under OpenAI's names; those it has no name for keep ours."""
    return {OPENAI_NAMES.get(name, name): value for name, value in values.items()}
