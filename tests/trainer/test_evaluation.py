"""What a run does with its evaluations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.jobs.spec import EarlyStopping, TrainingSpec
from tests import tiny
from worker.trainer.data import IGNORED, load_data
from worker.trainer.evaluation import Evaluation, best, num_without_best
from worker.trainer.model import load_tokenizer
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace, read_json

from .conftest import MakeWorkspace, exported, lines

RunHere = Callable[[Workspace], Trainer]
ALIKE = tiny.chat_rows(21)[16:]
# Whoever learns the training rows gets worse at these.
OPPOSITE = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "QXZ 0987 #~* QXZ"}]}]


def with_validation(workspace: Workspace, rows: list[dict[str, Any]] = ALIKE) -> Workspace:
    tiny.write_rows(workspace.validation_data, rows)
    return workspace


def eval_losses(workspace: Workspace) -> dict[int, float]:
    return {line["step"]: line["values"]["eval_loss"] for line in lines(workspace.metrics) if "eval_loss" in line["values"]}


class TestRule:
    @pytest.mark.parametrize(
        ("losses", "min_delta", "without"),
        [
            ([3.0], 0.0, 0),
            ([3.0, 2.0, 1.0], 0.0, 0),
            ([3.0, 1.0, 2.0, 1.0], 0.0, 2),
            ([3.0, 2.9, 2.8], 0.15, 0),
            ([3.0, 2.9, 2.8], 0.5, 2),
            ([float("nan"), 1.0, float("nan")], 0.0, 1),
        ],
    )
    def test_counts_evaluations_without_a_new_best(self, losses: list[float], min_delta: float, without: int) -> None:
        found = [Evaluation(step, loss) for step, loss in enumerate(losses)]
        assert num_without_best(found, EarlyStopping(min_delta=min_delta)) == without

    def test_of_equal_losses_the_first_is_the_best(self) -> None:
        assert best([Evaluation(1, 2.0), Evaluation(2, 1.0), Evaluation(3, 1.0)]) == Evaluation(2, 1.0)
        assert best([Evaluation(1, float("nan"))]) is None


@pytest.mark.parametrize("packing", ["on", "off"])
def test_eval_loss_is_the_mean_over_trained_tokens(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, packing: str
) -> None:
    """Five rows in batches of two: a mean over batches would be another number."""
    workspace = make_workspace(
        "w",
        llama,
        data={"packing": packing},
        training={"max_steps": 2},
        evaluation={"eval_steps": 2, "per_device_eval_batch_size": 2},
    )
    run_here(with_validation(workspace))
    assert eval_losses(workspace) == {2: pytest.approx(loss_by_hand(workspace, llama), rel=1e-4)}


def loss_by_hand(workspace: Workspace, base: Path) -> float:
    """Every row by itself through the exported adapter, in plain PEFT."""
    spec = TrainingSpec.model_validate(read_json(workspace.spec))
    validation = load_data(workspace, spec, load_tokenizer(spec)).validation
    assert validation is not None
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(workspace.export / "adapter")).eval()
    total, tokens = 0.0, 0
    for row in validation:
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        tokens += int((labels != IGNORED).sum())
    return total / tokens


def test_a_run_stops_when_its_evaluations_get_no_better(make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
    evaluation = {"eval_steps": 1, "early_stopping": {"patience": 2, "min_delta": 1000.0}}
    workspace = make_workspace("w", llama, evaluation=evaluation)
    run_here(with_validation(workspace))
    result = read_json(workspace.result)
    assert (result["outcome"], result["step"], result["total_steps"]) == ("finished", 3, 16)
    assert any("stopped early at step 3" in line["message"] for line in lines(workspace.log))


def test_a_run_that_is_paused_at_the_step_at_which_it_stops_early_trains_no_more_when_it_goes_on(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
) -> None:
    evaluation = {"eval_steps": 1, "early_stopping": {"patience": 1, "min_delta": 1000.0}}
    whole, paused = (make_workspace(name, llama, evaluation=evaluation) for name in ("whole", "paused"))
    run_here(with_validation(whole))
    assert (read_json(whole.result)["outcome"], read_json(whole.result)["step"]) == ("finished", 2)

    paused.stop.write_text('{"reason": "pause"}')
    run_here(with_validation(paused))
    run_here(paused)  # for one more step, as it is asked to pause again
    assert (read_json(paused.result)["outcome"], read_json(paused.result)["step"]) == ("stopped", 2)
    paused.stop.unlink()
    run_here(paused)
    assert (read_json(paused.result)["outcome"], read_json(paused.result)["step"]) == ("finished", 2)
    assert all(torch.equal(tensor, exported(paused)[name]) for name, tensor in exported(whole).items())


@pytest.mark.parametrize(
    ("kind", "eval_steps", "save_steps"),
    [("lora", 1, 2), ("full", 1, 2), pytest.param("lora", 2, 1, id="evaluated less often than saved")],
)
def test_the_best_checkpoint_is_kept_and_exported(
    make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, kind: str, eval_steps: int, save_steps: int
) -> None:
    workspace = make_workspace(
        "w",
        llama,
        adapter={"type": kind},
        training={"max_steps": 6, "learning_rate": 0.02},
        evaluation={"eval_steps": eval_steps, "keep_best": True},
        checkpoints={"save_steps": save_steps, "keep": 1},
    )
    run_here(with_validation(workspace, OPPOSITE))
    found = eval_losses(workspace)
    chosen = min(found, key=lambda step: found[step])
    assert chosen < 6
    assert any(f"exporting the best checkpoint, of step {chosen}" in line["message"] for line in lines(workspace.log))
    assert {path.name for path in workspace.checkpoints.glob("checkpoint-*")} == {f"checkpoint-{chosen}", "checkpoint-6"}
    (saved,) = (workspace.checkpoints / f"checkpoint-{chosen}").glob("*model.safetensors")
    kept = load_file(saved)
    assert all(torch.equal(tensor, exported(workspace)[name]) for name, tensor in kept.items())
