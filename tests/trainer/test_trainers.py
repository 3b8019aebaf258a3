"""Which rows of a rank's batch are its own: accelerate fills up the last ones, so that all ranks have as many."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard  # type: ignore[import-untyped]
from torch.utils.data import BatchSampler

from worker.trainer.data import IGNORED
from worker.trainer.trainers import Trainer, forget_beyond


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 13])
def test_every_row_is_some_ranks_own_once(rows: int, size: int, ranks: int) -> None:
    own: Counter[int] = Counter()
    for rank in range(ranks):
        trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(num_processes=ranks, process_index=rank))
        batches = BatchSampler(range(rows), size, drop_last=False)
        for number, batch in enumerate(BatchSamplerShard(batches, ranks, rank) if ranks > 1 else batches):
            own.update(batch[: Trainer.num_own_rows(trainer, range(rows), number, size)])
    assert own == Counter(range(rows))


@pytest.mark.parametrize(("num_rows", "kept"), [(0, 0), (1, 3), (2, 5), (7, 5)])
def test_the_loss_is_taken_off_the_others_padded_or_packed(num_rows: int, kept: int) -> None:
    padded = {"labels": torch.tensor([[1, 2, 3], [4, 5, IGNORED]])}
    packed = {"labels": torch.tensor([[1, 2, 3, 4, 5]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    for batch in (padded, packed):
        forget_beyond(batch, num_rows)
        assert batch["labels"][batch["labels"] != IGNORED].tolist() == [1, 2, 3, 4, 5][:kept]
