"""The names of fine-tuned models, in OpenAI's form."""

from app.config import get_settings


def finished_name(base_model: str, suffix: str | None, job_id: str) -> str:
    """`ft:<base>:<owner>:<suffix>:<id>`; of a base given by path, its folder's name."""
    base = base_model.rstrip("/").rsplit("/", 1)[-1] if base_model.startswith(("/", ".", "~", "file:")) else base_model
    return f"ft:{base}:{get_settings().model_owner}:{suffix or ''}:{job_id.removeprefix('ftjob-')}"


def checkpoint_name(finished: str, step: int) -> str:
    """The name of a checkpoint of the model to be."""
    return f"{finished}:ckpt-step-{step}"
