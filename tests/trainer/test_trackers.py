"""Trackers that are away: the run neither fails nor waits, and says it once."""

from pathlib import Path
from typing import Any

import pytest

from tests.standin import serving
from tests.trainer.conftest import MakeWorkspace, lines, torchrun
from worker.workspace import Reports, Workspace, read_json, write_json

pytestmark = pytest.mark.slow

WANDB: dict[str, Any] = {"project": "support", "name": None, "entity": None, "tags": []}


def _warnings(workspace: Workspace) -> list[str]:
    return [line["message"] for line in lines(workspace.log) if line["level"] == "warn"]


def test_a_server_that_is_away_is_said_once_and_not_waited_for(make_workspace: MakeWorkspace, llama: Path) -> None:
    workspace = make_workspace("w", llama)
    write_json(workspace.reports, Reports("ftjob-1", tensorboard=True, wandb=WANDB))
    done = torchrun(workspace, 1, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stderr
    assert read_json(workspace.result)["outcome"] == "finished"
    (warning,) = _warnings(workspace)
    assert warning.startswith("Weights & Biases does not take this job's figures, it is tried again: ")
    assert list((workspace.export / "tensorboard").iterdir())


def test_a_server_that_refuses_the_key_is_said_and_does_not_fail_the_run(make_workspace: MakeWorkspace, llama: Path) -> None:
    workspace = make_workspace("w", llama)
    write_json(workspace.reports, Reports("ftjob-1", wandb=WANDB))
    with serving(lambda *_: (401, {"errors": [{"message": "no such key"}]})) as url:
        done = torchrun(workspace, 1, WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stderr
    assert read_json(workspace.result)["outcome"] == "finished"
    assert all("Weights & Biases" in warning for warning in _warnings(workspace))
    assert _warnings(workspace)
    assert "k" * 40 not in workspace.log.read_text()
