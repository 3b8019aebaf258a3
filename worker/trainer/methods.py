"""The job's spec in TRL's words: the only place that knows both."""

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from peft import PeftModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.experimental.orpo import ORPOConfig
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_config import KTOConfig
from trl.trainer.sft_config import SFTConfig

from app.jobs.spec import TrainingSpec
from worker.trainer import row_attention
from worker.trainer.cpu_fsdp import allow_fsdp_on_cpu
from worker.trainer.data import Data
from worker.trainer.failures import TrainerError
from worker.trainer.model import FLASH_ATTENTION, initial_weights, load_start, packing_is_exact
from worker.trainer.trainers import DpoTrainer, KtoTrainer, OrpoTrainer, ShiftedCompletions, SupervisedTrainer, Trainer
from worker.workspace import Workspace

# Longest sequence that rows are packed into where attention holds a score for every pair of its tokens: packing longer batches
# would then cost more than the padding it saves.
MAX_PACKED_TOKENS = 8192
REFERENCE = "ref"  # what TRL names its copy of an adapter


def build_trainer(
    spec: TrainingSpec, workspace: Workspace, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, data: Data
) -> Trainer:
    """The trainer of the job's method, checked to run as the job asks."""
    if spec.resources.accelerator == "gpu" and not torch.cuda.is_available():
        raise TrainerError("gpu_not_available", "The job asks for GPUs and this node shows none.", "resources.accelerator")
    if spec.resources.accelerator == "cpu" and spec.parallelism.strategy == "fsdp2":
        allow_fsdp_on_cpu()
    limit_waiting(spec)
    build = {"dpo": _dpo_trainer, "kto": _kto_trainer, "orpo": _orpo_trainer}.get(spec.method, _supervised_trainer)
    trainer = build(spec, workspace, model, tokenizer, data)
    share_frozen_weights(trainer, model)
    check_parallelism(spec, trainer.accelerator.distributed_type, trainer.accelerator.num_processes)
    return trainer


def limit_waiting(spec: TrainingSpec) -> None:
    """Ranks on CPU meet here already: transformers gives its `ddp_timeout` to the process groups of GPUs only."""
    if spec.resources.accelerator == "cpu" and spec.world_size > 1 and not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=spec.resources.collective_timeout_s))


def share_frozen_weights(trainer: Trainer, model: nn.Module) -> None:
    """Keep DDP from broadcasting weights that nobody trains: every rank has read the same files, and writing them again would
    turn pages that the ranks of a host share into a copy of the model for each. On CPU accelerate's move to the device would
    do the same."""
    if trainer.accelerator.device.type == "cpu":
        trainer.accelerator.device_placement = False
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)  # type: ignore[no-untyped-call]


def _supervised_trainer(
    spec: TrainingSpec, workspace: Workspace, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, data: Data
) -> Trainer:
    return SupervisedTrainer(
        model=model,
        args=sft_config(spec, workspace, data, packing=decide_packing(spec, model, data)),
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=tokenizer,
    )


def _dpo_trainer(
    spec: TrainingSpec, workspace: Workspace, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, data: Data
) -> Trainer:
    config = DPOConfig(
        beta=spec.preference.beta,
        disable_dropout=spec.adapter.dropout == 0,
        router_aux_loss_coef=spec.training.router_aux_loss_coef,
        **preference_arguments(spec, workspace, data),
    )
    trainer = DpoTrainer(
        model=model,
        ref_model=_reference(spec, workspace),
        args=config,
        data_collator=DataCollatorForPreference(tokenizer.pad_token_id),
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=tokenizer,
    )
    _refer_to_the_base(spec, model)
    return trainer


def _kto_trainer(
    spec: TrainingSpec, workspace: Workspace, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, data: Data
) -> Trainer:
    config = KTOConfig(
        beta=spec.preference.beta,
        desirable_weight=spec.preference.desirable_weight,
        undesirable_weight=spec.preference.undesirable_weight,
        disable_dropout=spec.adapter.dropout == 0,
        router_aux_loss_coef=spec.training.router_aux_loss_coef,
        train_sampling_strategy="sequential",
        **preference_arguments(spec, workspace, data),
    )
    trainer = KtoTrainer(
        model=model,
        ref_model=_reference(spec, workspace),
        args=config,
        data_collator=ShiftedCompletions(tokenizer.pad_token_id),
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=tokenizer,
    )
    trainer.args.train_sampling_strategy = "random"  # TRL insists on the file's order only for its own pairing
    _refer_to_the_base(spec, model)
    return trainer


def _orpo_trainer(
    spec: TrainingSpec, workspace: Workspace, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, data: Data
) -> Trainer:
    config = ORPOConfig(
        beta=spec.preference.beta,
        disable_dropout=spec.adapter.dropout == 0,
        **preference_arguments(spec, workspace, data),
    )
    trainer = OrpoTrainer(
        model=model,
        args=config,
        data_collator=DataCollatorForPreference(tokenizer.pad_token_id),
        # What it gets here it would copy three times: first a row of each, then all.
        train_dataset=data.train.select([0]),
        eval_dataset=data.validation.select([0]) if data.validation is not None else None,
        processing_class=tokenizer,
    )
    trainer.train_dataset, trainer.eval_dataset = data.train, data.validation
    trainer.use_dpo_data_collator = True  # or it would say at every evaluation batch that it is not its own
    return trainer


def _reference(spec: TrainingSpec, workspace: Workspace) -> PreTrainedModel | None:
    """What the model is held to. An adapter needs no second model: without it the base answers."""
    return load_start(spec, initial_weights(spec, workspace)) if spec.adapter.is_full else None


def _refer_to_the_base(spec: TrainingSpec, model: PreTrainedModel | PeftModel) -> None:
    """TRL copies an adapter to refer to where it began. A fresh one begins as nothing: the base without it is the same."""
    if spec.training.from_ is not None:
        return
    if isinstance(model, PeftModel) and REFERENCE in model.peft_config:
        model.delete_adapter(REFERENCE)


def sft_config(spec: TrainingSpec, workspace: Workspace, data: Data, *, packing: bool) -> SFTConfig:
    """The spec as TRL's arguments of a supervised run."""
    return SFTConfig(
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,  # rows are cut already
        padding_free=packing,
        router_aux_loss_coef=spec.training.router_aux_loss_coef,
        **shared_arguments(spec, workspace, data),
    )


def preference_arguments(spec: TrainingSpec, workspace: Workspace, data: Data) -> dict[str, Any]:
    """What the preference methods share. ORPO reads max_length although its rows are cut already."""
    return shared_arguments(spec, workspace, data) | {"max_length": spec.data.max_length, "remove_unused_columns": False}


def shared_arguments(spec: TrainingSpec, workspace: Workspace, data: Data) -> dict[str, Any]:
    """What every method has, in the words of transformers."""
    training, on_cpu = spec.training, spec.resources.accelerator == "cpu"
    return {
        "output_dir": str(workspace.checkpoints),
        "seed": spec.seed,
        "data_seed": spec.seed,
        "use_cpu": on_cpu,
        "bf16": spec.model.dtype == "bfloat16",
        "dataloader_pin_memory": not on_cpu,
        # optimization
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "lr_scheduler_kwargs": _scheduler_kwargs(spec),
        "warmup_steps": num_warmup_steps(spec, len(data.train)),
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps or -1,
        # evaluation and checkpoints; old ones are deleted by callbacks.py, once a newer one is known to be whole
        "per_device_eval_batch_size": spec.evaluation.per_device_eval_batch_size,
        "prediction_loss_only": True,
        "eval_strategy": _strategy(spec.evaluation.eval_steps) if data.validation is not None else "no",
        "eval_steps": spec.evaluation.eval_steps,
        "save_strategy": _strategy(spec.checkpoints.save_steps),
        "save_steps": spec.checkpoints.save_steps or 500,
        "save_total_limit": None,
        # logging: every step, and a loss that is not finite as it is
        "logging_steps": 1,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        # parallelism
        "ddp_timeout": spec.resources.collective_timeout_s,
        # With it DDP keeps the order in which it adds gradients up. Without, it changes that after its first step, also after
        # the first step of a resumed run: of more than two ranks the sums then differ in their last digit.
        "ddp_find_unused_parameters": on_cpu and spec.world_size > 2,
        **_memory_options(spec),
    }


def decide_packing(spec: TrainingSpec, model: PreTrainedModel | PeftModel, data: Data) -> bool:
    """Whether the rows of a batch share one sequence without padding. A step has the same rows either way."""
    exact = packing_is_exact(model.config)
    if spec.data.packing == "on" and not exact:
        raise TrainerError(
            "packing_not_exact",
            f"Rows packed into one sequence would see each other with {model.config.model_type} and "
            f"{model.config._attn_implementation} attention: set data.packing to `off`.",
            "data.packing",
        )
    longest = data.counts["train"].longest_row * spec.training.per_device_train_batch_size
    cheap = model.config._attn_implementation in {*FLASH_ATTENTION, row_attention.NAME} or longest <= MAX_PACKED_TOKENS
    return spec.data.packing == "on" or (spec.data.packing == "auto" and exact and cheap)


def check_parallelism(spec: TrainingSpec, actual: DistributedType, num_processes: int) -> None:
    """What was asked is what runs: accelerate falls back to another strategy without an error."""
    if num_processes != spec.world_size:
        raise TrainerError(
            "parallelism_mismatch",
            f"The job asks for {spec.world_size} ranks, {num_processes} run.",
            "parallelism",
        )
    expected = {DistributedType.FSDP}
    if spec.parallelism.strategy == "ddp":
        several = {"cpu": DistributedType.MULTI_CPU, "gpu": DistributedType.MULTI_GPU}[spec.resources.accelerator]
        expected = {several} if spec.world_size > 1 else {several, DistributedType.NO}
    if actual not in expected:
        raise TrainerError(
            "parallelism_mismatch",
            f"The job asks for {spec.parallelism.strategy} over {spec.world_size} ranks, but {actual.value} would run.",
            "parallelism.strategy",
        )


def num_warmup_steps(spec: TrainingSpec, num_rows: int) -> int:
    """Rounded down, so that a job of a few steps does not spend one of them at a learning rate of 0."""
    return math.floor(num_steps(spec, num_rows) * spec.training.warmup_ratio)


def num_steps(spec: TrainingSpec, num_rows: int) -> int:
    """Optimizer steps of the whole job, counted as the Trainer counts them."""
    if spec.training.max_steps is not None:
        return spec.training.max_steps
    batches = math.ceil(num_rows / (spec.training.per_device_train_batch_size * spec.world_size))
    steps_per_epoch = max(1, math.ceil(batches / spec.training.gradient_accumulation_steps))
    return math.ceil(steps_per_epoch * spec.training.num_train_epochs)


def _strategy(steps: int | None) -> str:
    return "epoch" if steps is None else "steps"


def _scheduler_kwargs(spec: TrainingSpec) -> dict[str, Any]:
    if spec.training.lr_scheduler_type != "cosine_with_min_lr":
        return {}
    return {"min_lr_rate": 0.1 if spec.training.min_lr_rate is None else spec.training.min_lr_rate}


def _memory_options(spec: TrainingSpec) -> dict[str, Any]:
    """TRL recomputes activations unless told not to; FSDP2 has a recomputation of its own that gathers less."""
    recompute = spec.training.activation_checkpointing
    if spec.parallelism.strategy == "ddp":
        return {"activation_checkpointing": recompute}
    return {
        "activation_checkpointing": False,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "activation_checkpointing": recompute,
            "state_dict_type": "FULL_STATE_DICT",  # the sharded kind writes no adapter at all
            "cpu_ram_efficient_loading": False,
        },
    }


def device(trainer: Trainer) -> torch.device:
    """Where this rank computes."""
    return torch.device(trainer.accelerator.device)
