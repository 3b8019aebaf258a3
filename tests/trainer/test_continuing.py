"""Going on from another job's weights: training begins exactly where that job ended."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from worker.trainer.failures import TrainerError
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace

from .conftest import EXPERTS, MakeWorkspace, lines, losses, torchrun, verify

RunHere = Callable[[Workspace], Trainer]
SOURCE = "ft:base:team::earlier"
EVALUATED = {"eval_steps": 1}


def hand_over(source: Workspace, target: Workspace, *, checkpoint: int | None = None) -> None:
    """What the supervisor does: the weights of a result, or of a checkpoint, in the workspace of the job that goes on."""
    folder = source.checkpoints / f"checkpoint-{checkpoint}" if checkpoint else next(source.export.iterdir())
    shutil.copytree(folder, target.initial)


def first_loss(workspace: Workspace) -> float:
    return float(next(line["values"]["loss"] for line in lines(workspace.metrics) if "loss" in line["values"]))


def last_eval_loss(workspace: Workspace) -> float:
    return float([line["values"]["eval_loss"] for line in lines(workspace.metrics) if "eval_loss" in line["values"]][-1])


@pytest.fixture
def one_batch() -> list[dict[str, Any]]:
    """So few rows that a step sees all of them: its loss before the update is an evaluation of the weights."""
    return tiny.chat_rows(2)


@pytest.mark.parametrize("kind", ["lora", "experts", "full"])
@pytest.mark.parametrize("from_checkpoint", [False, True], ids=["from a result", "from a checkpoint"])
def test_the_first_loss_is_that_of_the_weights_gone_on_from(
    make_workspace: MakeWorkspace,
    llama: Path,
    gpt_oss: Path,
    run_here: RunHere,
    one_batch: list[dict[str, Any]],
    kind: str,
    from_checkpoint: bool,
) -> None:
    model, adapter = (gpt_oss, EXPERTS) if kind == "experts" else (llama, {"type": kind})
    training = {"max_steps": 4, "learning_rate": 0.001 if kind == "full" else 0.01}
    sections: dict[str, Any] = {"rows": one_batch, "adapter": adapter, "training": training, "evaluation": EVALUATED}
    source = make_workspace("source", model, **sections, checkpoints={"save_steps": 4})
    tiny.write_rows(source.validation_data, one_batch)
    run_here(source)
    target = make_workspace("target", model, **sections | {"training": training | {"from": SOURCE}})
    hand_over(source, target, checkpoint=4 if from_checkpoint else None)
    run_here(target)
    assert first_loss(target) == pytest.approx(last_eval_loss(source), rel=1e-6)
    assert first_loss(target) < first_loss(source)
    assert losses(target)[4] < first_loss(target)


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("kind", ["lora", "experts", "full"])
def test_a_preference_is_held_to_the_weights_gone_on_from(
    make_workspace: MakeWorkspace, llama: Path, gpt_oss: Path, run_here: RunHere, method: str, kind: str
) -> None:
    model, adapter = (gpt_oss, EXPERTS) if kind == "experts" else (llama, {"type": kind})
    source = make_workspace("source", model, adapter=adapter, training={"max_steps": 2})
    run_here(source)
    rows = tiny.labelled_rows(8) if method == "kto" else tiny.preference_rows(8)
    training = {"max_steps": 2, "from": SOURCE, "learning_rate": 0.01}
    target = make_workspace("target", model, rows=rows, method=method, adapter=adapter, training=training)
    hand_over(source, target)
    run_here(target)
    first = next(line["values"] for line in lines(target.metrics) if "loss" in line["values"])
    assert first["loss"] == pytest.approx(math.log(2) if method == "dpo" else 0.5, abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_an_adapter_of_another_rank_is_refused_by_name(make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
    source = make_workspace("source", llama, adapter={"r": 4}, training={"max_steps": 1})
    run_here(source)
    target = make_workspace("target", llama, adapter={"r": 8}, training={"max_steps": 1, "from": SOURCE})
    hand_over(source, target)
    with pytest.raises(TrainerError) as refused:
        run_here(target)
    assert (refused.value.failure.code, refused.value.failure.param) == ("adapter_mismatch", "training.from")


def test_an_adapter_that_lacks_a_layer_is_refused(make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
    source = make_workspace("source", llama, training={"max_steps": 1})
    run_here(source)
    target = make_workspace("target", llama, training={"max_steps": 1, "from": SOURCE})
    hand_over(source, target)
    path = target.initial / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if "layers.0" not in name}, path)
    with pytest.raises(TrainerError, match="does not fit"):
        run_here(target)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_two_sharded_ranks_go_on_and_resume_exactly(make_workspace: MakeWorkspace, llama: Path, method: str) -> None:
    source = make_workspace("source", llama, training={"max_steps": 2})
    assert torchrun(source, 1).returncode == 0
    rows = tiny.preference_rows(16) if method == "dpo" else None
    training = {"max_steps": 4, "from": SOURCE, "learning_rate": 0.01, "per_device_train_batch_size": 1}
    sections: dict[str, Any] = {
        "rows": rows,
        "method": method,
        "training": training,
        "checkpoints": {"save_steps": 2, "keep": 9},
    }
    undisturbed, resumed = (
        make_workspace(name, llama, ranks=2, parallelism={"strategy": "fsdp2"}, **sections) for name in ("whole", "resumed")
    )
    hand_over(source, undisturbed)
    hand_over(source, resumed)
    assert torchrun(undisturbed, 2).returncode == 0
    shutil.copytree(undisturbed.checkpoints / "checkpoint-2", resumed.checkpoints / "checkpoint-2")
    assert torchrun(resumed, 2).returncode == 0
    assert losses(resumed) == {step: loss for step, loss in losses(undisturbed).items() if step > 2}
    adapters = [load_file(one.export / "adapter" / "adapter_model.safetensors") for one in (undisturbed, resumed)]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    assert verify(resumed)["ok"]
