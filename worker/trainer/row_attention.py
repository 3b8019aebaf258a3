"""Attention of gpt-oss over packed rows, row by row: exact, and no score is computed that would be masked away.

gpt-oss makes its masks without position ids, so its packed rows see each other; and its own attention computes a score for
every pair of tokens of the whole sequence, those beyond the sliding window too. Here each row is cut into chunks of queries
that meet only the keys they may see. Attention sinks (OpenAI 2025, arXiv:2508.10925) are one more key, whose score is the
sink and whose value is nothing. Whatever is not a packed sequence goes through transformers' own forward.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

NAME = "by_row"
CHUNK = 256  # queries; shorter ones waste fewer scores above the diagonal and cost more calls


def install(base: PreTrainedModel) -> None:
    """Let `base`, a gpt-oss with eager attention, attend by row whenever it is given position ids of one packed sequence."""
    base.set_attn_implementation(NAME)
    base.base_model.register_forward_pre_hook(_tell_rows, with_kwargs=True)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: list[int] | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[1, tokens, heads, head_dim]` from queries `[1, heads, tokens, head_dim]` and keys and values `[1, groups, ...]`.

    `rows`: where each row begins, and the end of the last; a mask where the batch is not packed. `s_aux`: the sinks, `[heads]`.
    """
    if not isinstance(rows, list):
        result: tuple[torch.Tensor, torch.Tensor] = eager_attention_forward(
            module, query, key, value, rows, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    assert s_aux is not None
    sinks = s_aux.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    queries = torch.cat([query * scaling, sinks], dim=-1)[0]
    keys, values = functional.pad(key, (0, 1))[0], value[0]
    parts = []
    for begin, end in pairwise(rows):
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            first = begin if sliding_window is None else max(begin, start - sliding_window + 1)
            hidden = _hidden(start - first, stop - start, sliding_window, query.device)
            seen = slice(first, stop)
            parts.append(_attend(queries[:, start:stop], keys[:, seen], values[:, seen], hidden, dropout))
    return torch.cat(parts)[None], None


def _tell_rows(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The rows in place of the mask: transformers hands a mask per kind of layer on as it is."""
    positions = kwargs.get("position_ids")
    if positions is None or len(positions) != 1 or kwargs.get("attention_mask") is not None or kwargs.get("cache") is not None:
        return args, kwargs
    starts = (positions[0, 1:] == 0).nonzero().flatten() + 1
    rows = [0, *starts.tolist(), positions.shape[1]]
    return args, kwargs | {"attention_mask": {"full_attention": rows, "sliding_attention": rows}}


def _hidden(offset: int, num_queries: int, window: int | None, device: torch.device) -> torch.Tensor:
    """What a chunk's queries may not see of its keys, `[queries, 1 + keys]`: the first key is the sink, which all see; the
    first query stands `offset` behind the first key."""
    query = torch.arange(num_queries, device=device)[:, None] + offset
    key = torch.arange(offset + num_queries, device=device)[None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return functional.pad(hidden, (1, 0))


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, dropout: float
) -> torch.Tensor:
    """`[queries, heads, head_dim]` of one chunk. Heads of a group share its keys, so their queries meet them in one product."""
    heads, num_queries, width = queries.shape
    groups = len(keys)
    sink = functional.one_hot(torch.tensor(width - 1, device=keys.device), width).to(keys.dtype).expand(groups, 1, width)
    scores = torch.bmm(queries.reshape(groups, -1, width), torch.cat([sink, keys], dim=1).transpose(1, 2))
    bias = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, float("-inf"))
    shares = torch.softmax(scores.view(heads, num_queries, -1) + bias, dim=-1, dtype=scores.dtype)[..., 1:]
    shares = functional.dropout(shares, p=dropout)
    result = torch.bmm(shares.reshape(groups, -1, shares.shape[-1]), values)
    return result.view(heads, num_queries, -1).transpose(0, 1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)
