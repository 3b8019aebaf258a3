"""Packed rows of gpt-oss get the logits and the gradients that each would get alone, from transformers' own attention."""

from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from worker.trainer import row_attention

WINDOW = 8
# Shorter than a window, longer, longer than a chunk and its window, a single token, just a chunk.
LENGTHS = (5, 11, 29, 1, 13)
CHUNK = 13


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "CHUNK", CHUNK)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """One layer with a sliding window and one without, and sinks that take their share."""
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


@pytest.fixture
def ours(theirs: Any) -> Any:
    model = deepcopy(theirs)
    row_attention.install(model)
    return model


@pytest.fixture(scope="module")
def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 128, (1, length), generator=generator) for length in LENGTHS]


def packed_logits(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    positions = torch.tensor([list(chain.from_iterable(range(row.shape[1]) for row in rows))])
    result: torch.Tensor = model(input_ids=torch.cat(rows, dim=1), position_ids=positions, use_cache=False).logits
    return result


def separate_logits(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], dim=1)


def test_transformers_lets_packed_rows_see_each_other(theirs: Any, rows: list[torch.Tensor]) -> None:
    assert (packed_logits(theirs, rows) - separate_logits(theirs, rows)).abs().max() > 1e-2


def test_a_packed_row_has_the_logits_it_has_alone(ours: Any, theirs: Any, rows: list[torch.Tensor]) -> None:
    torch.testing.assert_close(packed_logits(ours, rows), separate_logits(theirs, rows), atol=1e-5, rtol=0)


def test_every_weight_gets_the_gradient_it_gets_from_rows_alone(ours: Any, theirs: Any, rows: list[torch.Tensor]) -> None:
    theirs.zero_grad()
    weights = torch.linspace(-1, 1, sum(LENGTHS) * 128).view(1, sum(LENGTHS), 128)
    torch.autograd.backward((packed_logits(ours, rows) * weights).sum())
    torch.autograd.backward((separate_logits(theirs, rows) * weights).sum())
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float((mine.grad - other.grad).abs().max()) <= 1e-5 * float(other.grad.abs().max()), name
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in ours.model.layers)


def test_a_padded_batch_goes_through_transformers(ours: Any, theirs: Any) -> None:
    batch = {"input_ids": torch.randint(1, 128, (2, 20)), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    batch["attention_mask"][1, 15:] = 0
    assert torch.equal(ours(**batch).logits, theirs(**batch).logits)


def test_answers_are_generated_as_before(ours: Any, theirs: Any, rows: list[torch.Tensor]) -> None:
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(rows[1], **options), theirs.generate(rows[1], **options))


def test_dropout_of_attention_is_applied_in_training_only(ours: Any, rows: list[torch.Tensor]) -> None:
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(packed_logits(ours, rows), packed_logits(ours, rows))
    ours.train()
    assert not torch.equal(packed_logits(ours, rows), packed_logits(ours, rows))
