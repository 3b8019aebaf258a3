"""The disk is looked at before the first step."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from app.jobs.spec import TrainingSpec
from worker.trainer.callbacks import Checkpoints, find_checkpoints
from worker.trainer.failures import TrainerError, record_failure
from worker.trainer.space import require_space
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace, read_json

from .conftest import MakeWorkspace, lines, losses

RunHere = Callable[[Workspace], Trainer]
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


class TestARealVolume:
    """A file system of its own, full to the last byte when it is full."""

    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[Path]:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        yield tmp_path
        subprocess.run(["umount", "--lazy", tmp_path], check=True)

    def test_a_run_that_does_not_fit_is_refused_before_its_first_step(
        self, volume: Path, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama, checkpoints={"save_steps": 1, "keep": 100})
        with pytest.raises(TrainerError, match=r"100|101 checkpoints") as caught:
            run_here(workspace)
        assert (caught.value.failure.code, caught.value.failure.param) == ("disk_full", "checkpoints.keep")
        assert not workspace.metrics.exists()

    def test_one_that_is_crowded_out_leaves_its_last_whole_checkpoint_and_goes_on_from_it(
        self, volume: Path, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 4}, checkpoints={"save_steps": 1, "keep": 2})
        on_save: Any = Checkpoints.on_save

        def crowd_out(self: Checkpoints, args: Any, state: Any, control: Any, **rest: Any) -> None:
            on_save(self, args, state, control, **rest)
            if state.global_step == 2:
                fill(volume, but=100_000)  # some other job's files

        with monkeypatch.context() as other_job:
            other_job.setattr(Checkpoints, "on_save", crowd_out)
            with pytest.raises(Exception) as caught:  # noqa: PT011
                run_here(workspace)
        record_failure(workspace, caught.value)
        (volume / "ballast").unlink()
        assert read_json(workspace.failure)["code"] == "disk_full"
        assert [found.step for found in find_checkpoints(workspace) if found.is_complete] == [1, 2]
        run_here(workspace)
        assert list(losses(workspace)) == [1, 2, 3, 4]
        assert "resumed from the checkpoint at step 2" in [line["message"] for line in lines(workspace.log)]


def fill(volume: Path, but: int) -> None:
    with (volume / "ballast").open("wb") as file:
        file.write(bytes(shutil.disk_usage(volume).free - but))
