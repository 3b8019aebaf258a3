"""Tiny checkpoints made on the spot: real architectures, real templates, random weights, about a hundred kilobytes each."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import chat_template_utils

HARMONY_TOKENS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|call|>",
]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# The template of SmolLM2-Instruct: no generation markers, no thinking, a system message where there is none.
CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HARMONY_TEMPLATE: str = chat_template_utils.gptoss_chat_template

CORPUS = [
    "The capital of Australia is Canberra, not Sydney. What is the weather in Oslo today? It is four degrees.",
    "Die Hauptstadt von Frankreich ist Paris. Ich denke kurz nach. La capital de España es Madrid, creo yo.",
    "You are a helpful assistant. reasoning language: German. analysis commentary final user assistant system developer",
]

# The 16 values of FP4 E2M1 by their code; the sign is the highest bit.
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
MXFP4_BLOCK = 32  # values that share one scale


def build_tokenizer(folder: Path, specials: list[str], template: str, *, eos: str, pad: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 600 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def build_llama(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A Llama of 2 layers with SmolLM2's template; its pad token is its end token, as in SmolLM2."""
    tokenizer = build_tokenizer(folder, CHATML_TOKENS, CHATML_TEMPLATE, eos="<|im_end|>", pad="<|im_end|>")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=CHATML_TOKENS.index("<|im_start|>") + len(tokenizer) - len(CHATML_TOKENS),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    return folder


def build_gpt_oss(folder: Path, *, mxfp4: bool = False, seed: int = 0) -> Path:
    """A gpt-oss of 2 layers (sliding, full) and 4 experts with the harmony template, in bfloat16 or in true MXFP4."""
    tokenizer = build_tokenizer(folder, HARMONY_TOKENS, HARMONY_TEMPLATE, eos="<|return|>", pad="<|endoftext|>")
    torch.manual_seed(seed)
    model: Any = GptOssForCausalLM(gpt_oss_config(tokenizer))
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    if mxfp4:
        _rewrite_in_mxfp4(folder, model.state_dict())
    return folder


def gpt_oss_config(tokenizer: PreTrainedTokenizerFast) -> GptOssConfig:
    """Inner sizes are multiples of 32, the block of MXFP4."""
    return GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        router_aux_loss_coef=0.9,  # as in public copies of the config: the trainer must not take it
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert stack [E, in, out] as MXFP4 blocks [E, out, in/32, 16] and scales [E, out, in/32]."""
    values = weight.float().transpose(1, 2).contiguous()
    values = values.reshape(*values.shape[:2], -1, MXFP4_BLOCK)
    exponent = (values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = values / 2**exponent
    table = torch.tensor(FP4_VALUES[:8])
    codes = (scaled.abs().unsqueeze(-1) - table).abs().argmin(dim=-1)
    codes = torch.where((scaled < 0) & (codes > 0), codes + 8, codes)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponent.squeeze(-1) + 127).to(torch.uint8)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The expert stack [E, in, out] that blocks and scales stand for, in bfloat16."""
    table = torch.tensor(FP4_VALUES)
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    values = pairs.reshape(*blocks.shape[:3], MXFP4_BLOCK) * 2.0 ** (scales.float().unsqueeze(-1) - 127)
    return values.reshape(*blocks.shape[:2], -1).transpose(1, 2).to(torch.bfloat16)


def _rewrite_in_mxfp4(folder: Path, state: dict[str, torch.Tensor]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name + "_blocks"], tensors[name + "_scales"] = to_mxfp4(value)
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    (folder / "config.json").write_text(json.dumps(config))


def chat_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows in Multilingual-Thinking's shape, of unequal lengths."""
    cities = ["Canberra", "Paris", "Madrid", "Oslo", "Lima", "Santiago de Chile", "Tokyo", "Ouagadougou"]
    return [
        {
            "messages": [
                {"role": "system", "content": "reasoning language: German"},
                {"role": "user", "content": f"What is capital number {index}?"},
                {
                    "role": "assistant",
                    "content": f"It is {cities[index % len(cities)]}." + " Ja." * (index % 4),
                    "thinking": "Ich denke kurz nach.",
                },
            ]
        }
        for index in range(num_rows)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def preference_rows(num_rows: int) -> list[dict[str, Any]]:
    """Canonical rows with two answers, of unequal lengths: the short one is preferred."""
    rows = []
    for index, row in enumerate(chat_rows(num_rows)):
        *prompt, answer = row["messages"]
        rejected = {"role": "assistant", "content": f"Sydney, I am quite sure.{' Really.' * (index % 3)}"}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})
    return rows


def labelled_rows(num_rows: int) -> list[dict[str, Any]]:
    """Canonical rows with one answer, good and bad in turn."""
    pairs = preference_rows(num_rows)
    answers = [("chosen", True), ("rejected", False)]
    return [
        {"prompt": row["prompt"], "completion": row[answers[index % 2][0]], "label": answers[index % 2][1]}
        for index, row in enumerate(pairs)
    ]
