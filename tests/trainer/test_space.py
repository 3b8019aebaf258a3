"""The disk is looked at before the first step."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from app.jobs.spec import TrainingSpec
from worker.trainer.failures import TrainerError
from worker.trainer.space import require_space
from worker.workspace import Workspace

MB = 1e6


def model() -> nn.Module:
    """4 MB of frozen weights, 1 MB of trained ones: 3 MB a checkpoint."""
    frozen, trained = nn.Linear(1000, 1000, bias=False), nn.Linear(500, 500, bias=False)
    frozen.requires_grad_(False)
    return nn.Sequential(frozen, trained)


def require(folder: Path, monkeypatch: pytest.MonkeyPatch, free_mb: float, **sections: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free_mb * MB)))
    require_space(Workspace(folder), TrainingSpec.model_validate(sections), model())


def test_what_fits_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(tmp_path, monkeypatch, 11.01)  # 3 checkpoints and 2 x 1 MB


def test_too_many_checkpoints_are_refused_with_the_number_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainerError, match=r"keep to 2") as caught:
        require(tmp_path, monkeypatch, 11.01, checkpoints={"keep": 5})
    failure = caught.value.failure
    assert (failure.code, failure.param) == ("disk_full", "checkpoints.keep")
    assert "0.02 GB" in failure.message
    assert "0.011 GB left" in failure.message


@pytest.mark.parametrize("sections", [{"export": {"merged": True}}, {"adapter": {"type": "full"}}])
def test_a_result_that_does_not_fit_is_said_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    require(tmp_path, monkeypatch, 21.01, **sections)
    with pytest.raises(TrainerError):
        require(tmp_path, monkeypatch, 11.01, **sections)


def test_where_not_one_checkpoint_fits_no_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainerError, match="Free space on the node") as caught:
        require(tmp_path, monkeypatch, 3)
    assert caught.value.failure.param is None


def test_checkpoints_that_are_there_already_take_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Workspace(tmp_path).checkpoints / "checkpoint-4").mkdir(parents=True)
    require(tmp_path, monkeypatch, 8.01)
