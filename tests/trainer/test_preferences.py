"""Preference methods and continued pretraining: what they learn, count and refuse."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace

from .conftest import MakeWorkspace, lines, losses, verify

RunHere = Callable[[Workspace], Trainer]
TRAINING = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01}


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("method", ["dpo", "orpo", "kto"])
def test_a_preference_method_learns_to_prefer(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, method: str, kind: str
) -> None:
    rows = tiny.labelled_rows(16) if method == "kto" else tiny.preference_rows(16)
    training = TRAINING | {"learning_rate": 0.01 if kind == "lora" else 0.001}
    workspace = make_workspace("w", llama, rows=rows, method=method, adapter={"type": kind}, training=training)
    run_here(workspace)
    margins = [line["values"]["rewards/margins"] for line in lines(workspace.metrics) if "rewards/margins" in line["values"]]
    assert all(math.isfinite(loss) for loss in losses(workspace).values())
    assert margins[-1] > margins[0]
    verification = verify(workspace)
    assert verification["ok"], verification["message"]
