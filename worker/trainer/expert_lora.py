"""LoRA on MoE experts without the delta: `y = x W_e + (x A_e) B_e s + b_e` over grouped matmuls.

PEFT adds `A_e B_e` to every expert's weights on each call: a second copy of the whole expert stack, folded twice per forward
and with a dense gradient in between. Measured on CPU: 1.2 to 2.1 x slower, and one expert stack more in memory per layer.
Parameters and files stay PEFT's; whatever is not the plain case goes through PEFT's own forward.
"""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear, _grouped_mm

ALIGNMENT = 8  # elements: CUDA's grouped matmul wants strides of 16 bytes, also of bfloat16
WEIGHTS = {"gate_up_proj", "down_proj"}

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Per adapted weight: A as [experts, in, r], and B scaled as [experts, r, out]."""


def install(model: nn.Module) -> int:
    """Route every expert stack that can be through the low-rank forward; how many there are."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    outermost = [wrapper for wrapper in wrappers if id(wrapper) not in inner and _is_supported(wrapper)]
    for wrapper in outermost:
        experts: Any = wrapper.get_base_layer()
        experts.low_rank_factors = None
        experts.forward = partial(_experts_forward, experts, experts.forward)
        vars(wrapper)["forward"] = partial(_wrapper_forward, wrapper)
    return len(outermost)


def _is_supported(wrapper: ParamWrapper) -> bool:
    """gpt-oss's layout: weights [experts, in, out], a gate, no expert parallelism."""
    experts: Any = wrapper.get_base_layer()
    return (
        getattr(experts, "is_transposed", False)
        and experts.has_gate
        and not experts.has_post_expert_norm
        and not experts._is_expert_parallel
        and {one.parameter_name for one in _chain(wrapper)} <= WEIGHTS
    )


def _chain(wrapper: nn.Module) -> list[ParamWrapper]:
    """The wrappers around one expert stack, from the outermost in: PEFT has one per weight."""
    chain = []
    while isinstance(wrapper, ParamWrapper):
        chain.append(wrapper)
        wrapper = wrapper.base_layer
    return chain


def _wrapper_forward(wrapper: ParamWrapper, *args: Any, **kwargs: Any) -> Any:
    """Hand the factors to the experts for this call; calling them as a module keeps FSDP's hooks."""
    chain = _chain(wrapper)
    if kwargs or not all(_is_plain(one) for one in chain):
        return ParamWrapper.forward(wrapper, *args, **kwargs)
    experts: Any = wrapper.get_base_layer()
    experts.low_rank_factors = {one.parameter_name: _factors(one) for one in chain}
    try:
        return experts(*args)
    finally:
        experts.low_rank_factors = None  # never kept: under FSDP they are only gathered for this call


def _is_plain(wrapper: ParamWrapper) -> bool:
    active = wrapper.active_adapters
    return not wrapper.disable_adapters and not wrapper.merged and len(active) == 1 and active[0] in wrapper.lora_A


def _factors(wrapper: ParamWrapper) -> tuple[torch.Tensor, torch.Tensor]:
    (name,) = wrapper.active_adapters
    weight: torch.Tensor = wrapper.get_param()  # type: ignore[no-untyped-call]
    a: torch.Tensor = wrapper.lora_A[name].get_parameter("weight")
    b: torch.Tensor = wrapper.lora_B[name].get_parameter("weight")
    rank = len(a) // wrapper.num_experts
    down = a.reshape(wrapper.num_experts, rank, -1).to(weight.dtype)
    up = (b.reshape(len(b), rank, -1).permute(2, 1, 0) * wrapper.scaling[name]).to(weight.dtype)
    if weight.is_cuda and rank % ALIGNMENT:
        missing = ALIGNMENT - rank % ALIGNMENT
        down, up = functional.pad(down, (0, 0, 0, missing)), functional.pad(up, (0, 0, 0, missing))
    return down.transpose(1, 2), up.contiguous()


def _experts_forward(experts: Any, original: Any, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    if experts.low_rank_factors is None:
        result: torch.Tensor = original(hidden, *routing)
        return result
    return low_rank_forward(experts, experts.low_rank_factors, hidden, *routing)


def low_rank_forward(
    experts: Any, factors: Factors, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped forward, with the low-rank part beside each of its two matmuls."""
    num_choices = top_k_index.shape[-1]
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    counts = torch.bincount(expert_ids, minlength=experts.num_experts)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        weight, biases = getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None
        values = values.to(weight.dtype)
        bias = None if biases is None else biases[expert_ids]
        result = _grouped_linear(values, weight, offsets, bias=bias, is_transposed=True)
        if name not in factors:
            return result
        down, up = factors[name]
        return result + _grouped_mm(_grouped_mm(values, down, offsets), up, offsets)

    gated = experts._apply_gate(linear(hidden[order // num_choices], "gate_up_proj"))
    chosen = linear(gated, "down_proj") * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return chosen[back].view(len(hidden), num_choices, -1).sum(dim=1).to(hidden.dtype)
