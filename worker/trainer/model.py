"""The base model as it is trained: loaded from safetensors, dequantized, adapted."""

import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils.quantization_config import BitsAndBytesConfig, Mxfp4Config

from app.jobs.spec import AdapterSection, ModelSection, TrainingSpec, longest_row
from worker.trainer import expert_lora, row_attention
from worker.trainer.dequantized import cached_copy
from worker.trainer.failures import TrainerError
from worker.workspace import Workspace

# Models whose masks keep the rows of one sequence apart by their position ids, proven by tests/trainer/test_packing.py.
EXACT_PACKING = {"llama", "mistral", "qwen2", "qwen3"}
FLASH_ATTENTION = {"flash_attention_2", "flash_attention_3"}


def load_tokenizer(spec: TrainingSpec) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, with the job's chat template where it has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(_source(spec.model), revision=spec.model.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_loadable(spec.model, error) from error
    if not tokenizer.is_fast:
        message = f"The tokenizer of {spec.model.name_or_path!r} cannot tell which characters a token stands for."
        raise TrainerError("model_not_supported", message, "model")
    if spec.data.chat_template is not None:
        tokenizer.chat_template = spec.data.chat_template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def initial_weights(spec: TrainingSpec, workspace: Workspace) -> Path | None:
    """The folder of another job's weights to go on from; None for a job that begins with the base."""
    return None if spec.training.from_ is None else workspace.initial


def load_model(spec: TrainingSpec, initial: Path | None = None) -> PreTrainedModel | PeftModel:
    """The model to train. The seed is set here, so that every rank starts from the same adapter weights."""
    base = load_start(spec, initial)
    base.config.use_cache = False
    if base.config.model_type == "gpt_oss" and base.config._attn_implementation == "eager":
        row_attention.install(base)
    set_seed(spec.seed)
    if spec.adapter.is_full:
        return base
    model = add_adapter(base, spec.adapter)
    if initial is not None:
        load_adapter(model, initial)
    if spec.adapter.low_rank_experts == "on" or (spec.adapter.low_rank_experts == "auto" and not torch.cuda.is_available()):
        expert_lora.install(model)
    return model


def load_start(spec: TrainingSpec, initial: Path | None) -> PreTrainedModel:
    """The model that training begins with, without an adapter: the base, or the full weights that the job goes on from."""
    if initial is None or not spec.adapter.is_full:
        return load_base(spec)
    if not (initial / "config.json").is_file():
        raise _mismatch(f"there are no full weights in {initial.name}")
    return _load(spec.model, str(initial), dtype=torch.float32)


def load_base(spec: TrainingSpec, *, device_map: str | None = None) -> PreTrainedModel:
    """The base model. Full weights are trained in float32: updates of bfloat16 weights are mostly rounded away."""
    dtype = torch.float32 if spec.adapter.is_full else getattr(torch, spec.model.dtype)
    config = load_config(spec.model)
    if spec.adapter.type == "qlora":
        return _load_in_4_bits(spec.model, config, device_map)
    if not is_mxfp4(config):
        return _load(spec.model, _source(spec.model), dtype=dtype, device_map=device_map)
    copy = cached_copy(spec.model, config, lambda: _load_mxfp4(spec.model, torch.bfloat16, None))
    if copy is None:
        return _load_mxfp4(spec.model, dtype, device_map)
    return _load(spec.model, str(copy), dtype=dtype, device_map=device_map)


def load_config(model: ModelSection) -> PreTrainedConfig:
    """The base model's configuration."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_source(model), revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_loadable(model, error) from error
    return config


def num_weights(model: ModelSection) -> int:
    """Of the whole model, tied ones once; none of them is read, and no memory is taken."""
    config = load_config(model)
    try:
        with torch.device("meta"):
            empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (ValueError, ImportError) as error:
        raise _not_loadable(model, error) from error
    return sum(weight.numel() for weight in empty.parameters())


def within_context(spec: TrainingSpec) -> TrainingSpec:
    """The spec, with no longer rows than the base model reads: a default or a recipe knows nothing of it."""
    context = longest_row(load_config(spec.model).to_dict())
    if context is None or spec.data.max_length <= context:
        return spec
    return spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": context})})


def is_mxfp4(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is in MXFP4, which cannot be trained: it is dequantized while it loads."""
    quantization = getattr(config, "quantization_config", None) or {}
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def packing_is_exact(config: PreTrainedConfig) -> bool:
    """Whether rows that share a sequence cannot see each other."""
    return config._attn_implementation in {*FLASH_ATTENTION, row_attention.NAME} or (
        config.model_type in EXACT_PACKING and config._attn_implementation in {"eager", "sdpa"}
    )


def add_adapter(base: PreTrainedModel, adapter: AdapterSection) -> PeftModel:
    """The base with a LoRA adapter on it; TrainerError where a target of the job is not in the model."""
    check_targets(base, adapter)
    config = LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules or None,
        target_parameters=adapter.target_parameters or None,
        rank_pattern=dict(adapter.rank_pattern),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # A false alarm about target_parameters: PEFT looks for them among modules, and applies the pattern all the same.
        warnings.filterwarnings("ignore", message="The following rank_pattern keys did not match")
        model: PeftModel = get_peft_model(base, config)
    return model


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Another job's adapter in place of a fresh one; TrainerError(adapter_mismatch) where it is of another shape."""
    try:
        loaded: Any = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    except (OSError, RuntimeError) as error:
        raise _mismatch(str(error).strip().splitlines()[-1]) from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        raise _mismatch(", ".join([*missing, *loaded.unexpected_keys][:3]))


def check_targets(base: PreTrainedModel, adapter: AdapterSection) -> None:
    """Every target must name something: PEFT only objects when all of them miss."""
    modules = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    parameters = [name for name, _ in base.named_parameters()]
    named = [] if adapter.target_modules == "all-linear" else adapter.target_modules
    checks = [
        ("adapter.target_modules", named, modules),
        ("adapter.target_parameters", adapter.target_parameters, parameters),
        ("adapter.rank_pattern", list(adapter.rank_pattern), modules + parameters),
    ]
    for param, targets, names in checks:
        for target in targets:
            if not any(_ends_with(name, target) for name in names):
                raise _unmatched(param, target, names)


def adapted_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights of each kind carry an adapter: a model whose experts were missed looks normal otherwise."""
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.lora_A:
            kinds[_kind(name, module)] += 1
    return dict(kinds)


def _load_mxfp4(model: ModelSection, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    quantization = Mxfp4Config(dequantize=True)
    return _load(model, _source(model), dtype=dtype, device_map=device_map, quantization_config=quantization)


def _load_in_4_bits(model: ModelSection, config: PreTrainedConfig, device_map: str | None) -> PreTrainedModel:
    """The base in NF4 with quantized constants, computing in bfloat16 (Dettmers et al. 2023, arXiv:2305.14314)."""
    if is_mxfp4(config):
        message = "An MXFP4 base has 4-bit experts of its own that QLoRA cannot take: set adapter.type to lora."
        raise TrainerError("model_not_supported", message, "adapter.type")
    quantization = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    place = device_map or {"": int(os.environ.get("LOCAL_RANK", "0"))}
    return _load(model, _source(model), dtype=torch.bfloat16, device_map=place, quantization_config=quantization)


def _load(model: ModelSection, source: str, **options: Any) -> PreTrainedModel:
    attention = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, revision=model.revision, trust_remote_code=False, use_safetensors=True, **options, **attention
        )
    except (OSError, ValueError, ImportError) as error:
        raise _not_loadable(model, error) from error
    return loaded


def _source(model: ModelSection) -> str:
    """A path must exist before the Hub's client takes it for a badly spelt id."""
    if model.name_or_path.startswith(("/", ".")) and not Path(model.name_or_path).is_dir():
        raise TrainerError("model_not_found", f"There is no model folder {model.name_or_path!r}.", "model")
    return model.name_or_path


def _not_loadable(model: ModelSection, error: Exception) -> TrainerError:
    text = (str(error).splitlines() or [""])[0]
    if "trust_remote_code" in str(error):
        message = f"{model.name_or_path!r} needs code of its own, which is not run here."
        return TrainerError("remote_code_not_allowed", message, "model")
    if isinstance(error.__cause__ or error, GatedRepoError) or "gated repo" in str(error):
        message = f"{model.name_or_path!r} is gated: accept its terms on the Hub, and give the node a token of that account."
        return TrainerError("model_gated", message, "model")
    if isinstance(error, OSError):
        return TrainerError("model_not_found", f"The base model {model.name_or_path!r} cannot be loaded: {text}", "model")
    return TrainerError("model_not_supported", f"The base model {model.name_or_path!r} cannot be used: {text}", "model")


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target) or re.fullmatch(rf"(.*\.)?({target})", name) is not None


def _mismatch(detail: str) -> TrainerError:
    message = f"The adapter to go on from does not fit this job's: {detail}."
    return TrainerError("adapter_mismatch", message, "training.from")


def _unmatched(param: str, target: str, names: list[str]) -> TrainerError:
    endings = sorted({name.rsplit(".", 1)[-1] for name in names})
    message = f"{target!r} of {param} is not in the model. Its names end in: {', '.join(endings)}."
    return TrainerError("adapter_target_unmatched", message, param)


def _kind(name: str, module: LoraLayer) -> str:
    if isinstance(module, ParamWrapper):
        return "experts" if "experts" in name or "experts" in module.parameter_name else "parameters"
    if "attn" in name or "attention" in name:
        return "attention"
    return "mlp" if "mlp" in name or "feed_forward" in name else "other"
