"""What the trainer is told to report to before it starts, and trackers that a node finds without a process."""

import importlib.util
import os
from typing import Any

import pytest

from app.config import get_settings
from app.jobs.tables import Job
from worker.failures import JobFailed
from worker.tracking import reports_of, start_again
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


def test_a_tracker_of_a_job_that_nobody_knows_is_forgotten(database: str) -> None:
    left = get_settings().resolved_workspace_dir / "trackers" / "ftjob-gone.1.0"
    left.parent.mkdir(parents=True)
    left.touch()
    os.utime(left, (0, 0))
    start_again()
    assert not left.exists()
