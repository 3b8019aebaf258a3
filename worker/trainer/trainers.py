"""TRL's trainers, each taught three things: to take our tokens as they are, to count what carried loss, to agree over ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from worker.trainer.data import IGNORED

Batch = dict[str, Any]


class Trainer(transformers.Trainer):
    """What every method's trainer has beside TRL's."""

    num_trained_tokens = 0
    """Tokens that carried loss since the job's first step, over all ranks."""
    padding_free = False
    aux_loss_enabled = False
    _num_batches = 0
    """Of this rank in this epoch."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """torch takes cpu:1 for another device than cpu: moving there would copy what the ranks of a host map and share."""
        if device.type != "cpu":
            super()._move_model_to_device(model, device)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers asks only after a step whether to stop: a run that had stopped early, or had made its last step and
        was killed while it handed over its result, would make one more."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            return
        goes_on = kwargs["epoch"] == kwargs["epochs_trained"]
        self._num_batches = kwargs["steps_trained_in_current_epoch"] if goes_on else 0
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Batch], Any]:
        """The batches of one step, counted before they are trained on."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self.count(batches, num_items)
        return batches, num_items

    def count(self, batches: list[Batch], num_items: Any) -> None:
        """Add what a step trains on."""
        raise NotImplementedError

    def num_own_rows(self, dataset: Any, num_batches: int, size: int) -> int:
        """Rows of this rank's batch after `num_batches` others that are not repeated: ranks get batches in turn, and the last
        ones are filled up with rows of the first."""
        position = num_batches * self.accelerator.num_processes + self.accelerator.process_index
        left: int = len(dataset) - position * size
        return max(0, min(size, left))

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value's sum over all ranks; every rank must ask."""
        tensor = torch.tensor([values], dtype=torch.float64, device=self.accelerator.device)
        return [float(value) for value in self.accelerator.gather(tensor).sum(dim=0)]


class SupervisedTrainer(Trainer, SFTTrainer):
    """Supervised fine-tuning and continued pretraining. Its losses are per trained token, in training and in evaluation."""

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], *args: Any, **kwargs: Any) -> tuple[list[Batch], Any]:
        """The batches of one step, without loss on the rows that only fill up the last ones of an epoch."""
        return super().get_batch_samples(map(self._without_repeated, epoch_iterator), *args, **kwargs)

    def _without_repeated(self, batch: Batch) -> Batch:
        num_rows = self.num_own_rows(self.train_dataset, self._num_batches, int(self.args.train_batch_size))
        self._num_batches += 1
        forget_beyond(batch, num_rows)
        return batch

    def count(self, batches: list[Batch], num_items: Any) -> None:
        """TRL's count divides the loss, so ours is the very number of labels that were trained on, over all ranks."""
        assert num_items is not None, "TRL counts the labels of every batch"
        self.num_trained_tokens += int(num_items)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, with the mean over tokens in place of the mean over batches."""
        self._eval_batches, self._eval_loss, self._eval_tokens = 0, 0.0, 0
        output = super().evaluation_loop(*args, **kwargs)
        loss, tokens = self.sum_over_ranks(self._eval_loss, self._eval_tokens)
        assert output.metrics is not None
        output.metrics["eval_loss"] = loss / tokens
        return output

    def prediction_step(self, model: Any, inputs: Batch, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        num_rows = self.num_own_rows(self.eval_dataset, self._eval_batches, int(self.args.eval_batch_size))
        self._eval_batches += 1
        own = first_rows(inputs, num_rows)
        result = super().prediction_step(model, own or inputs, prediction_loss_only, ignore_keys)
        if own:
            num_tokens = int((own["labels"][..., 1:] != IGNORED).sum())
            self._eval_loss += float(result[0]) * num_tokens
            self._eval_tokens += num_tokens
        return result


def first_rows(inputs: Batch, num_rows: int) -> Batch:
    """The first rows of a batch, padded or packed; empty where there are none."""
    if num_rows <= 0:
        return {}
    if "position_ids" not in inputs:
        return {name: value[:num_rows] for name, value in inputs.items()}
    starts = _starts(inputs)
    if num_rows >= len(starts):
        return inputs
    return {name: inputs[name][:, : starts[num_rows]] for name in ("input_ids", "labels", "position_ids")}


def forget_beyond(batch: Batch, num_rows: int) -> None:
    """Take the loss off all rows of a batch, padded or packed, but the first."""
    if "position_ids" not in batch:
        batch["labels"][num_rows:] = IGNORED
        return
    starts = _starts(batch)
    if num_rows < len(starts):
        batch["labels"][:, starts[num_rows] :] = IGNORED


def _starts(batch: Batch) -> list[int]:
    """Where the rows of a packed batch begin."""
    found: list[int] = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    return found


class PreferenceTrainer(Trainer):
    """What the preference methods share: rows come as our tokens, and an answer's tokens are those that carry loss."""

    num_tokens = 0

    def count(self, batches: list[Batch], num_items: Any) -> None:
        """An answer's first token is predicted from the prompt, so all of its tokens count."""
        trained = sum(int(batch["completion_mask"].sum()) for batch in batches)
        present = sum(int(batch["attention_mask"].sum()) for batch in batches)
        trained_by_all, present_by_all = self.sum_over_ranks(trained, present)
        self.num_trained_tokens += int(trained_by_all)
        self.num_tokens += int(present_by_all)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["num_tokens"] = self.num_tokens  # ORPO counts none
        super().log(logs, start_time)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class DpoTrainer(PreferenceTrainer, DPOTrainer):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""


class KtoTrainer(PreferenceTrainer, KTOTrainer):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306)."""


class OrpoTrainer(PreferenceTrainer, ORPOTrainer):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691). Needs no reference."""

    def tokenize_row(self, feature: Any, model: Any = None) -> dict[str, Any]:
        """Rows are tokenised already."""
        return dict(feature)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        """TRL's, from our batches (the preferred answers, then the others), with loss on the answer and not on the prompt."""
        batch = self._prepare_inputs(batch)
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        log_probabilities = self.get_batch_logps(logits, labels, average_log_prob=True)
        chosen = slice(None, len(labels) // 2)
        rejected = slice(len(labels) // 2, None)
        loss = functional.cross_entropy(
            logits[chosen, :-1].flatten(0, 1).float(), labels[chosen, 1:].flatten(), ignore_index=IGNORED
        )
        return log_probabilities[chosen], log_probabilities[rejected], logits[chosen, :-1], logits[rejected, :-1], loss


class ShiftedCompletions(DataCollatorForUnpairedPreference):
    """KTO's estimate of the divergence needs answers to other prompts: each row takes the answer of the row before it.

    TRL pairs them once in the file's order, and so may not shuffle; here they are paired within the batch as it is drawn.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        completions = [example["completion_ids"] for example in examples]
        others = completions[-1:] + completions[:-1]
        shifted = [{**example, "KL_completion_ids": other} for example, other in zip(examples, others, strict=True)]
        batch: dict[str, Any] = super().torch_call(shifted)
        return batch
