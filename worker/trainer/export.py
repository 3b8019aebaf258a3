"""The artifact: an adapter in PEFT's layout or full weights in transformers', and a probe of the model that made it.

Everything here runs on every rank: under FSDP2 each rank holds a part of every weight, and gathering is a collective.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.jobs.spec import TrainingSpec
from worker.trainer.callbacks import is_first_rank
from worker.trainer.data import Data
from worker.trainer.methods import device
from worker.trainer.model import load_base
from worker.trainer.provenance import record_facts
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace

MAX_PROBE_TOKENS = 128
READABLE = 0o644  # safetensors writes 0600, and another user serves the files
ADAPTER = "default"  # the name that PEFT gives the only adapter; its files leave it out
WRAPPER = "_checkpoint_wrapped_module."  # what activation checkpointing puts into parameter names


def export(trainer: Trainer, workspace: Workspace, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Write the artifact and the probe."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_lora = not spec.adapter.is_full
    if not is_lora:
        _round_to_exported_type(model, spec)
    weights = full_weights(model, only_trained=is_lora)
    target = workspace.export / ("adapter" if is_lora else "model")
    if is_first_rank():
        shutil.rmtree(workspace.export, ignore_errors=True)
        _save(model, weights, target, spec)
        _finish_folder(target, spec, tokenizer)
    del weights
    _write_probe(trainer, model, workspace, data)
    if is_first_rank():
        if is_lora and spec.export.merged:
            _save_merged(target, workspace.export / "merged", spec, tokenizer)
        if workspace.tensorboard.exists():
            shutil.copytree(workspace.tensorboard, workspace.export / workspace.tensorboard.name)
        record_facts(workspace, spec, tokenizer)


def full_weights(model: nn.Module, *, only_trained: bool) -> dict[str, torch.Tensor]:
    """Whole tensors by name on the first rank, nothing on the others. Tied weights are there once."""
    frozen = {name for name, parameter in model.named_parameters() if only_trained and not parameter.requires_grad}
    named = [*model.named_parameters(), *([] if only_trained else _saved_buffers(model))]
    weights = {}
    for name, tensor in named:
        if name in frozen:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_first_rank():
            weights[name.replace(WRAPPER, "")] = whole.detach().cpu()
    return weights


def _saved_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name.replace(WRAPPER, "") in saved]


def _round_to_exported_type(model: nn.Module, spec: TrainingSpec) -> None:
    """Full weights are trained in float32 and handed over in the job's type: the probe must show what is handed over."""
    dtype = getattr(torch, spec.model.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _save(model: nn.Module, weights: dict[str, torch.Tensor], target: Path, spec: TrainingSpec) -> None:
    if isinstance(model, PeftModel):
        _save_adapter(model, weights, target)
        return
    assert isinstance(model, PreTrainedModel)
    dtype = getattr(torch, spec.model.dtype)
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    model.config.dtype = dtype
    model.config.use_cache = True  # off for training only
    model.save_pretrained(target, state_dict=weights, max_shard_size=f"{spec.export.max_shard_size_gb}GB")


def _save_adapter(model: PeftModel, weights: dict[str, torch.Tensor], target: Path) -> None:
    """As PEFT's own save would: it keeps nothing at all of a model whose layers are wrapped for activation checkpointing."""
    target.mkdir(parents=True)
    config = model.peft_config[ADAPTER]
    config.inference_mode = True
    config.save_pretrained(str(target))
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    assert base.generation_config is not None
    base.generation_config.save_pretrained(target)
    named = {name.replace(f".{ADAPTER}.", "."): value.contiguous() for name, value in weights.items()}
    save_file(named, target / "adapter_model.safetensors", metadata={"format": "pt"})


def _save_merged(adapter: Path, target: Path, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Base and adapter in one: from a fresh base, as the live one may be sharded."""
    model = merge(PeftModel.from_pretrained(load_base(spec), str(adapter)))
    model.save_pretrained(target, max_shard_size=f"{spec.export.max_shard_size_gb}GB")
    _finish_folder(target, spec, tokenizer)


def merge(model: PeftModel) -> PreTrainedModel:
    """The base with the adapter in its weights. Each weight is added up in float32 and rounded once, and only one is in
    float32 at a time: PEFT adds in the weights' own type, which rounds twice."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            weight: Any = module.get_param() if isinstance(module, ParamWrapper) else module.get_base_layer().weight
            dtype = weight.dtype
            weight.data = weight.data.float()
            module.merge()
            weight.data = weight.data.to(dtype)
    merged: PreTrainedModel = model.unload()
    return merged


def _finish_folder(folder: Path, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """What makes the weights usable by whoever downloads only this folder."""
    tokenizer.save_pretrained(folder)
    config = folder / "adapter_config.json"
    if config.exists():
        public = {"base_model_name_or_path": spec.model.name_or_path, "revision": spec.model.revision}
        config.write_text(json.dumps(json.loads(config.read_text()) | public, indent=2, sort_keys=True))
    (folder / "README.md").write_text(model_card(spec, is_adapter=config.exists()), encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(READABLE)


def model_card(spec: TrainingSpec, *, is_adapter: bool) -> str:
    """The README of an artifact. Its header is the Hub's metadata, which knows no paths and no secrets' names."""
    name = spec.model.name_or_path
    header = [
        *([] if Path(name).is_absolute() else [f"base_model: {name}"]),
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [{spec.method}, {spec.adapter.type}, tuneyard]",
    ]
    kind = "Full weights" if spec.adapter.is_full else f"LoRA adapter (r {spec.adapter.r})"
    merged = "" if spec.adapter.is_full or is_adapter else ", merged into its base"
    settings = spec.model_dump_json(indent=2, exclude={"secrets"})
    return (
        "---\n" + "\n".join(header) + f"\n---\n\n# A fine-tuned {name}\n\n{kind}{merged}, trained with Tuneyard "
        f"({spec.method}).\n\nSettings:\n\n```json\n{settings}\n```\n"
    )


def _write_probe(trainer: Trainer, model: nn.Module, workspace: Workspace, data: Data) -> None:
    """A real row and what the live model says to it, in float32: bfloat16 differs by more than any fault worth finding."""
    if not is_first_rank() and not any(isinstance(module, FSDPModule) for module in model.modules()):
        return  # a whole model needs no help
    row = torch.tensor([data.example()[:MAX_PROBE_TOKENS]])
    logits = live_logits(model, row.to(device(trainer)))
    if is_first_rank():
        tensors = {"input_ids": row, "logits": logits.float().cpu().contiguous()}
        temporary = workspace.probe.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.replace(workspace.probe)


def live_logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits of the trained model in float32. Changes the model's type: only for when training is over."""
    if "_original_forward" in model.__dict__:
        vars(model)["forward"] = vars(model)["_original_forward"]  # without accelerate's autocast
    _compute_in_float32(model)
    model.eval()
    with torch.no_grad():
        outputs: Any = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False)
    logits: torch.Tensor = outputs.logits
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _compute_in_float32(model: nn.Module) -> None:
    """A sharded model casts each layer as it gathers it, so that no rank ever holds the whole in float32."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True)
    for module in sharded:
        module.reshard()
        state = module._get_fsdp_state()
        state._mp_policy = policy
        for group in state._fsdp_param_groups:
            group.mp_policy = policy
            for parameter in group.fsdp_params:
                parameter.init_dtype_attrs(policy)
                # The buffers of the last gather have the old type; without them new ones are made.
                parameter.all_gather_outputs = []
                vars(parameter).pop("_unsharded_param", None)
