"""What the demo asks of the service."""

import pytest

from app.jobs.spec import TrainingSpec
from demo import run


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_the_demo_takes_the_same_optimizer_steps_on_any_hardware(accelerator: str) -> None:
    spec = TrainingSpec.model_validate(run._spec(accelerator))
    assert spec.global_batch_size == run.BATCH_SIZE
    assert spec.resources.accelerator == accelerator


def test_the_questions_are_asked_of_both_models() -> None:
    spec = TrainingSpec.model_validate(run._spec("cpu"))
    assert [chat[0]["content"] for chat in spec.evaluation.prompts] == list(run.QUESTIONS)
