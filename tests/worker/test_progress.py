"""A slow training is not a stalled one."""

from pathlib import Path

import pytest

from worker.progress import Progress
from worker.trainer import callbacks
from worker.workspace import Workspace


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("worker.progress.time", clock)
    return clock


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_a_training_whose_every_step_takes_almost_as_long_as_it_may_is_left_alone(clock: Clock, workspace: Workspace) -> None:
    progress = Progress(workspace, 60)
    for step in range(50):
        workspace.progress.write_text(str(step))
        assert not progress.has_stalled()
        clock.now += 59
        assert not progress.has_stalled()


def test_one_that_stands_still_for_longer_has_stalled(clock: Clock, workspace: Workspace) -> None:
    progress = Progress(workspace, 60)
    workspace.progress.write_text("7")
    assert not progress.has_stalled()
    clock.now += 61
    assert progress.has_stalled()


def test_neither_what_comes_before_the_first_step_nor_what_comes_after_the_last_one_counts(
    clock: Clock, workspace: Workspace
) -> None:
    progress = Progress(workspace, 60)
    clock.now += 10_000  # reading the data, loading the model
    assert not progress.has_stalled()
    workspace.progress.write_text("1")
    assert not progress.has_stalled()
    workspace.progress.unlink()
    clock.now += 10_000  # exporting
    assert not progress.has_stalled()


@pytest.mark.parametrize("moved", ["step_end", "substep_end", "prediction_step", "save", "evaluate"])
def test_a_step_a_part_of_one_an_evaluated_batch_and_a_checkpoint_move_a_training_on(
    clock: Clock, workspace: Workspace, moved: str
) -> None:
    progress, trainer = Progress(workspace, 60), callbacks.Progress(workspace)
    trainer.on_train_begin()
    assert not progress.has_stalled()
    clock.now += 61
    getattr(trainer, f"on_{moved}")()
    assert not progress.has_stalled()
    trainer.on_train_end()
    assert not workspace.progress.exists()
