"""What a run does with its evaluations: stop when they no longer get better, keep the best checkpoint, export it.

Everything is read from the history of losses that a checkpoint carries, so a resumed run decides as an undisturbed one would.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate.utils.constants import FSDP_MODEL_NAME  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from app.jobs.spec import EarlyStopping, TrainingSpec
from worker.trainer.trainers import Trainer
from worker.workspace import LogLine, Workspace, append_line


class Evaluation(NamedTuple):
    """The loss on the validation file after a step."""

    step: int
    loss: float


class Evaluator(TrainerCallback):
    """Asks for a checkpoint of every new best evaluation, and for the end when there has been none for too long."""

    def __init__(self, workspace: Workspace, spec: TrainingSpec) -> None:
        self.workspace = workspace
        self.spec = spec.evaluation

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = self._has_stopped_early(state)  # and was asked to stop, or killed, at that very step

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        found = evaluations(state)
        if self.spec.keep_best and best(found) == found[-1]:
            control.should_save = True
        rule = self.spec.early_stopping
        if rule is None or not self._has_stopped_early(state):
            return
        control.should_training_stop = True
        if state.is_world_process_zero:
            text = f"stopped early at step {state.global_step}: no better eval_loss in {rule.patience} evaluation(s)"
            append_line(self.workspace.log, LogLine(text, data={"step": state.global_step, "patience": rule.patience}))

    def _has_stopped_early(self, state: TrainerState) -> bool:
        """Whether the last evaluation ended the run before its last step."""
        rule, found = self.spec.early_stopping, evaluations(state)
        if rule is None or not found or found[-1].step != state.global_step or state.global_step >= state.max_steps:
            return False
        return num_without_best(found, rule) >= rule.patience


def evaluations(state: TrainerState) -> list[Evaluation]:
    """Every evaluation since the job's first step."""
    return [Evaluation(int(log["step"]), log["eval_loss"]) for log in state.log_history if "eval_loss" in log]


def best(found: list[Evaluation]) -> Evaluation | None:
    """The lowest loss; of equal ones the first."""
    finite = [evaluation for evaluation in found if math.isfinite(evaluation.loss)]
    return min(finite, key=lambda evaluation: evaluation.loss, default=None)


def num_without_best(found: list[Evaluation], rule: EarlyStopping) -> int:
    """How many evaluations at the end were no new best by more than `min_delta`."""
    lowest, since = math.inf, 0
    for evaluation in found:
        since += 1
        if evaluation.loss < lowest - rule.min_delta:
            lowest, since = evaluation.loss, 0
    return since


def load_best(trainer: Trainer, workspace: Workspace, *, is_first_rank: bool) -> None:
    """Go back to the weights of the best evaluation, where their checkpoint is there; every rank must ask."""
    chosen = best(evaluations(trainer.state))
    if chosen is None or chosen.step == trainer.state.global_step:
        return
    folder = workspace.checkpoints / f"checkpoint-{chosen.step}"
    if not _is_on_first_node(folder):
        return
    if trainer.is_fsdp_enabled:
        # Other nodes have no such folder, and get the weights from the first rank: only the file's name is looked for there.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{FSDP_MODEL_NAME}.bin").touch()
    elif not folder.is_dir():
        return  # each rank has all weights, and the first one exports its own
    trainer._load_from_checkpoint(str(folder), trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model)
    if is_first_rank:
        facts = {"step": chosen.step, "eval_loss": chosen.loss}
        append_line(workspace.log, LogLine(f"exporting the best checkpoint, of step {chosen.step}", data=facts))


def _is_on_first_node(folder: Path) -> bool:
    """What the first rank finds counts for all, or some would wait for others that do nothing; every rank must ask."""
    found = [folder.is_dir()]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]
