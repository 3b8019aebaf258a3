"""Check an artifact in a fresh process: load it on a fresh base, compare with the model that made it, answer the prompts.

    python -m worker.trainer.verify DIR EXPORT_DIR

DIR is the workspace with its probe; EXPORT_DIR holds `adapter/` (and `merged/`) or `model/` as they came back from storage.
Writes DIR/verification.json; the exit status is 0 whether the artifact is good or not.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from app.jobs.spec import TrainingSpec
from worker.trainer.export import merge
from worker.trainer.model import load_base
from worker.trainer.provenance import template_hash
from worker.workspace import Verification, Workspace, read_json, write_json

# Share of the largest logit by which two float32 runs of the same weights may differ: other kernels add in another order.
# Measured between 4e-7 and 3e-6; a lost or stale weight shows as 1e-2 and more.
RELATIVE_TOLERANCE = 1e-4

# Beside the weights, whatever their kind.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md")

Answers = list[str]


class Merged(NamedTuple):
    """Logits of a stored merge and of one made afresh, rounded to the same types; and what else is wrong with it."""

    stored: torch.Tensor
    expected: torch.Tensor
    problems: list[str]


def verify(workspace: Workspace, folder: Path) -> Verification:
    """What the reload of `folder` shows."""
    spec = TrainingSpec.model_validate(read_json(workspace.spec))
    probe = load_file(workspace.probe)
    is_lora = not spec.adapter.is_full
    artifact, has_merged = folder / ("adapter" if is_lora else "model"), is_lora and spec.export.merged
    if missing := [*missing_files(artifact), *(missing_files(folder / "merged") if has_merged else [])]:
        return Verification(False, "; ".join(missing), None, None, RELATIVE_TOLERANCE, 0)
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    device_map = "auto" if spec.resources.accelerator == "gpu" and torch.cuda.is_available() else None

    problems = check_files(artifact, is_lora=is_lora) + check_template(artifact, workspace)
    base = _for_comparison(load_base(spec, device_map=device_map))
    base_logits = _logits(base, probe["input_ids"])
    base_answers = _answers(base, tokenizer, spec)
    tuned: PreTrainedModel | PeftModel
    if is_lora:
        tuned, more_problems = _with_adapter(base, artifact)
    else:
        del base  # two models in float32 may not fit
        tuned, more_problems = _full_model(artifact, device_map)
    logits = _logits(tuned, probe["input_ids"])
    answers = _answers(tuned, tokenizer, spec)
    merged = None
    if isinstance(tuned, PeftModel) and has_merged:
        merged = _check_merged(tuned, folder / "merged", workspace, probe, device_map)
    return judge(
        live=probe["logits"],
        reloaded=logits,
        base=base_logits,
        problems=problems + more_problems,
        merged=merged,
        num_tensors=sum(1 for _ in _tensors(artifact)),
        answers=[
            {"messages": messages, "base": before, "tuned": after}
            for messages, before, after in zip(spec.evaluation.prompts, base_answers, answers, strict=True)
        ],
    )


def check_files(artifact: Path, *, is_lora: bool) -> list[str]:
    """What is wrong with the tensors themselves."""
    problems = []
    for name, tensor in _tensors(artifact):
        if not torch.isfinite(tensor).all():
            problems.append(f"{name} holds values that are not finite")
        if is_lora and "lora_B" in name and not tensor.any():
            problems.append(f"{name} is zero: it learned nothing")
    return problems


def missing_files(artifact: Path) -> list[str]:
    """Which files are not there: weights, or what lets them talk."""
    missing = [f"{artifact.name}/{name} is missing" for name in COMPANIONS if not (artifact / name).is_file()]
    return missing if any(artifact.glob("*.safetensors")) else [*missing, f"{artifact.name} holds no weights"]


def check_template(artifact: Path, workspace: Workspace) -> list[str]:
    """Whether a chat is rendered as it was trained."""
    if template_hash(AutoTokenizer.from_pretrained(artifact)) == read_json(workspace.facts)["chat_template_sha256"]:
        return []
    return [f"the chat template of {artifact.name} is not the one that was trained with"]


def judge(
    *,
    live: torch.Tensor,
    reloaded: torch.Tensor,
    base: torch.Tensor,
    problems: list[str],
    num_tensors: int,
    answers: list[dict[str, Any]],
    merged: Merged | None = None,
) -> Verification:
    """Good means: whole, as the live model, and not as the base. A merge may differ by the rounding of its weights only."""
    from_live, from_base = _difference(reloaded, live), _difference(reloaded, base)
    tolerance = RELATIVE_TOLERANCE * max(1.0, float(live.abs().max()))
    if not from_live <= tolerance:  # so is nan
        problems = [*problems, f"logits differ from the live model by {from_live:.3g}, more than {tolerance:.3g}"]
    elif not from_base > from_live:
        problems = [*problems, f"logits differ from the base by only {from_base:.3g}"]
    if merged is not None:
        problems = [*problems, *merged.problems]
        if not (apart := _difference(merged.stored, merged.expected)) <= tolerance:
            problems.append(f"logits of the merge differ from base and adapter by {apart:.3g}, more than {tolerance:.3g}")
    message = "; ".join(problems) or f"reloaded: {from_live:.3g} from the live model, {from_base:.3g} from the base"
    return Verification(
        ok=not problems,
        message=message,
        max_difference_from_live=_finite(from_live),
        max_difference_from_base=_finite(from_base),
        tolerance=tolerance,
        num_tensors=num_tensors,
        merged_difference_from_live=_finite(_difference(merged.stored, live)) if merged else None,
        merged_rounding=_finite(_difference(merged.expected, live)) if merged else None,
        answers=answers,
    )


def _check_merged(
    tuned: PeftModel, artifact: Path, workspace: Workspace, probe: dict[str, torch.Tensor], device_map: str | None
) -> Merged:
    """The stored merge beside one made afresh of base and adapter. The adapter is used up."""
    problems = check_files(artifact, is_lora=False) + check_template(artifact, workspace)
    dtypes = {name: tensor.dtype for name, tensor in _tensors(artifact)}
    fresh = merge(tuned)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(parameter.to(dtypes.get(name, parameter.dtype)))
    expected = _logits(fresh, probe["input_ids"])
    del fresh, tuned
    stored, missing = _full_model(artifact, device_map)
    return Merged(_logits(stored, probe["input_ids"]), expected, problems + missing)


def _with_adapter(base: PreTrainedModel, artifact: Path) -> tuple[PeftModel, list[str]]:
    """The base with the adapter on it, and which tensors are missing or too many."""
    tuned: PeftModel = _for_comparison(PeftModel.from_pretrained(base, str(artifact)))
    expected, found = set(get_peft_model_state_dict(tuned)), {name for name, _ in _tensors(artifact)}
    missing = [f"{name} is missing" for name in sorted(expected - found)]
    return tuned, missing + [f"{name} is not part of the adapter" for name in sorted(found - expected)]


def _full_model(artifact: Path, device_map: str | None) -> tuple[PreTrainedModel, list[str]]:
    """Full weights, and which tensors are missing or too many: a missing one would be random, not an error."""
    options: dict[str, Any] = {"dtype": torch.float32, "device_map": device_map, "output_loading_info": True}
    loaded_with_info: Any = AutoModelForCausalLM.from_pretrained(artifact, **options)
    model, loaded = loaded_with_info
    missing = [f"{name} is missing" for name in sorted(loaded["missing_keys"])]
    return _for_comparison(model), missing + [f"{name} is not part of the model" for name in sorted(loaded["unexpected_keys"])]


def _for_comparison(model: Any) -> Any:
    """bfloat16 differs by more than any fault worth finding. Of a base in 4 bits the rest becomes float32, as when live."""
    return nn.Module.float(model).eval()


def _logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    ids = input_ids.to(model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits.float().cpu()


def _answers(model: Any, tokenizer: PreTrainedTokenizerBase, spec: TrainingSpec) -> Answers:
    return [_answer(model, tokenizer, messages, spec.evaluation.max_new_tokens) for messages in spec.evaluation.prompts]


def _answer(model: Any, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], max_new_tokens: int) -> str:
    inputs = _prompt(tokenizer, messages).to(model.device)
    with torch.no_grad():
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, use_cache=True
        )
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(answer).strip()


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(str(message["content"]) for message in messages), return_tensors="pt")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _tensors(artifact: Path) -> Any:
    """Every tensor of the artifact's safetensors files, one at a time."""
    for path in sorted(artifact.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    workspace, folder = Workspace(Path(sys.argv[1]).resolve()), Path(sys.argv[2]).resolve()
    write_json(workspace.verification, verify(workspace, folder))


if __name__ == "__main__":
    main()
