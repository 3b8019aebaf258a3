"""What the trainer is told to report to, before it starts."""

import importlib.util
from typing import Any

import pytest

from app.jobs.tables import Job
from worker.failures import JobFailed
from worker.tracking import reports_of
from worker.workspace import Reports

WANDB: dict[str, Any] = {"project": "support", "name": None, "entity": None, "tags": []}
INTEGRATIONS = [{"type": "wandb", "wandb": WANDB}, {"type": "tensorboard"}]


def test_the_trainer_reports_to_what_the_job_names_under_its_id() -> None:
    job = Job(id="ftjob-1", integrations=INTEGRATIONS)
    assert reports_of(job) == Reports(run_id="ftjob-1", tensorboard=True, wandb=WANDB)
    assert reports_of(Job(id="ftjob-2", integrations=[])) == Reports(run_id="ftjob-2")


@pytest.mark.parametrize(("integration", "package"), [(INTEGRATIONS[0], "wandb"), (INTEGRATIONS[1], "tensorboardX")])
def test_a_node_without_the_package_fails_the_job_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, integration: dict[str, object], package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobFailed, match=f"lacks the package `{package}`") as caught:
        reports_of(Job(id="ftjob-1", integrations=[integration]))
    assert (caught.value.code, caught.value.param) == ("tracker_not_installed", "integrations")
