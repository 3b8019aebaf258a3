"""What the benchmarks train: gpt-oss in true MXFP4 with random weights, and chats of lognormal length."""

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from tests import tiny

WORDS = " ".join(tiny.CORPUS).split()
LENGTHS = {"mean": 313, "sigma": 0.6, "longest": 1024}
"""Tokens per row of the measurements in docs/design.md."""


def build_gpt_oss(folder: Path, *, layers: int, hidden: int, experts: int) -> int:
    """A checkpoint in MXFP4 with the harmony template; the bytes of its weights in bfloat16."""
    tokenizer = tiny.build_tokenizer(folder, tiny.HARMONY_TOKENS, tiny.HARMONY_TEMPLATE, eos="<|return|>", pad="<|endoftext|>")
    config = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny._rewrite_in_mxfp4(folder, model.state_dict())
    return sum(value.numel() * 2 for value in model.state_dict().values())


def write_chats(path: Path, base: Path, num_rows: int) -> None:
    """Rows whose rendered lengths are lognormal."""
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(base), random.Random(0)
    overhead = len(tokenizer.apply_chat_template(_chat([]), return_dict=False))
    rows = []
    for _ in range(num_rows):
        drawn = rng.lognormvariate(math.log(LENGTHS["mean"]) - LENGTHS["sigma"] ** 2 / 2, LENGTHS["sigma"])
        words: list[str] = []
        left = min(drawn, LENGTHS["longest"]) - overhead
        while left > 0 or not words:
            words.append(rng.choice(WORDS))
            left -= len(tokenizer.encode(" " + words[-1], add_special_tokens=False))
        rows.append({"messages": _chat(words)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _chat(words: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": " ".join(words)}]
