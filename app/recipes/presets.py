"""The presets as data: parts of a training spec that have a name. docs/recipes.md compares two of them with their notebooks."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A named part of a spec; `model` is the base it was made for, and any other may be given."""

    id: str
    description: str
    model: str | None
    spec: dict[str, Any]


# What the 20b notebook asks its tuned model: to think in German about a question in Spanish.
GERMAN_THOUGHT = [
    {"role": "system", "content": "reasoning language: German"},
    {"role": "user", "content": "¿Cuál es el capital de Australia?"},
]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

GPT_OSS_20B_DDP_LORA = Recipe(
    id="gpt-oss-20b-ddp-lora",
    description="gpt-oss-20b on 8 GPUs, a whole model on each: LoRA on the attention, MXFP4 weights dequantized to bfloat16.",
    model="openai/gpt-oss-20b",
    spec={
        "model": {"dtype": "bfloat16", "attention": "eager"},
        "adapter": {"type": "lora", "r": 8, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"},
        "data": {"max_length": 2048, "on_long_rows": "truncate"},
        "training": {
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine_with_min_lr",
            "min_lr_rate": 0.1,
            "warmup_ratio": 0.03,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1.0,
            "activation_checkpointing": True,
        },
        "parallelism": {"strategy": "ddp", "nproc_per_node": 8},
        "evaluation": {"prompts": [GERMAN_THOUGHT], "max_new_tokens": 512},
    },
)

GPT_OSS_120B_FSDP2_LORA_EXPERTS = Recipe(
    id="gpt-oss-120b-fsdp2-lora-experts",
    description="gpt-oss-120b sharded over 8 GPUs (FSDP2): LoRA on the attention and on every expert.",
    model="openai/gpt-oss-120b",
    spec={
        "model": {"dtype": "bfloat16", "attention": "eager"},
        "adapter": {
            "type": "lora",
            "r": 32,
            "alpha": 32,
            "dropout": 0.0,
            "target_modules": "all-linear",
            "target_parameters": EXPERTS,
            "rank_pattern": dict.fromkeys(EXPERTS, 8),
        },
        "data": {"max_length": 2048, "on_long_rows": "truncate"},
        "training": {
            "learning_rate": 1.5e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.03,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 1.0,
            "activation_checkpointing": True,
        },
        "parallelism": {"strategy": "fsdp2", "nproc_per_node": 8},
    },
)

SFT_LORA = Recipe(
    id="sft-lora",
    description="Supervised fine-tuning of any chat model with a LoRA adapter on every linear layer, on one GPU.",
    model=None,
    spec={
        "method": "supervised",
        "adapter": {"type": "lora", "r": 16, "alpha": 32, "target_modules": "all-linear"},
        "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    },
)

SFT_FULL = Recipe(
    id="sft-full",
    description="Supervised fine-tuning of every weight. Over several GPUs, set parallelism.strategy to `fsdp2`.",
    model=None,
    spec={
        "method": "supervised",
        "adapter": {"type": "full"},
        "training": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": True,
        },
    },
)

DPO_LORA = Recipe(
    id="dpo-lora",
    description="Direct preference optimization with a LoRA adapter, on one GPU: rows with a preferred and another answer.",
    model=None,
    spec={
        "method": "dpo",
        "adapter": {"type": "lora", "r": 16, "alpha": 32, "target_modules": "all-linear"},
        "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_train_epochs": 1.0},
        "preference": {"beta": 0.1},
    },
)

RECIPES = {
    recipe.id: recipe for recipe in (GPT_OSS_20B_DDP_LORA, GPT_OSS_120B_FSDP2_LORA_EXPERTS, SFT_LORA, SFT_FULL, DPO_LORA)
}
