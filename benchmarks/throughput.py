"""Tokens per second of a run of ours against the gpt-oss-20b notebook run as it stands, on the same model, rows and CPU.

    python -m benchmarks.throughput [--rounds 3] [--steps 24]

Two pairs of notebook and Tuneyard: the notebook as it stands, and with the experts adapted too. Ours has the same adapter,
learning rate and rows per optimizer step, and spends no time on what a notebook cannot know: rows share a sequence without
padding, activations are recomputed only where memory is short, adapted experts need no copy of their weights. The runs take
turns, so that a slow minute of the machine meets both; the best of each counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.jobs.spec import TrainingSpec
from benchmarks._models import build_gpt_oss, write_chats

ROWS_PER_STEP = 2  # the notebook: one row, accumulated twice
WARM_UP_STEPS = 4  # of each run; not counted
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def main() -> None:
    arguments = _arguments()
    if arguments.notebook:
        notebook(Path(arguments.notebook), experts=arguments.experts)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_gpt_oss(folder / "model", layers=6, hidden=384, experts=8)
        write_chats(folder / "train.jsonl", folder / "model", ROWS_PER_STEP * arguments.steps)
        for experts in (False, True):
            compare(folder, arguments.rounds, experts=experts)


def compare(folder: Path, rounds: int, *, experts: bool) -> None:
    """Let the two take turns, and print the best of each and their ratio."""
    notebooks, ours = [], []
    for number in range(rounds):
        notebooks.append(_run_notebook(folder, experts=experts))
        ours.append(_run_ours(folder, f"{number}-{experts}", experts=experts))
    what = "attention and experts adapted" if experts else "attention adapted, as the notebook has it"
    print(f"{what}: tokens/s, best of {rounds}")
    print(f"  notebook  {max(notebooks):7.0f}   {', '.join(f'{rate:.0f}' for rate in notebooks)}")
    print(f"  Tuneyard  {max(ours):7.0f}   {', '.join(f'{rate:.0f}' for rate in ours)}")
    print(f"  ratio     {max(ours) / max(notebooks):7.2f}", flush=True)


def notebook(folder: Path, *, experts: bool) -> None:
    """The notebook's training function with its own settings; only names that no longer exist are today's. Prints tokens/s."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils.quantization_config import Mxfp4Config
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "loss" in logs:
                marks.append((time.monotonic(), logs["num_tokens"]))

    dataset = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        attn_implementation="eager",
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
        use_cache=False,
    )
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules="all-linear",
        target_parameters=EXPERTS if experts else None,
        lora_dropout=0.0 if experts else 0.05,
        bias="none",
        task_type="CAUSAL_LM",
    )
    trainer = SFTTrainer(
        model=get_peft_model(model, lora),
        args=SFTConfig(
            learning_rate=2e-4,
            num_train_epochs=1,
            logging_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            max_length=2048,
            warmup_steps=0.03,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            output_dir=str(folder / "notebook"),
            report_to="none",
            save_strategy="no",
            router_aux_loss_coef=0.0,
            use_cpu=True,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    (began, before), (ended, after) = marks[WARM_UP_STEPS - 1], marks[-1]
    print(f"RATE {(after - before) / (ended - began)}", flush=True)
    os._exit(0)


def _run_notebook(folder: Path, *, experts: bool) -> float:
    command = [sys.executable, "-m", "benchmarks.throughput", "--notebook", str(folder), *(["--experts"] if experts else [])]
    printed = _run(command)
    return float(next(line for line in printed.splitlines() if line.startswith("RATE")).split()[1])


def _run_ours(folder: Path, name: str, *, experts: bool) -> float:
    workspace = folder / f"ours-{name}"
    spec = {
        "model": {"name_or_path": str(folder / "model"), "dtype": "bfloat16"},
        "adapter": {"r": 8, "alpha": 16, "dropout": 0.0 if experts else 0.05, "target_parameters": EXPERTS if experts else []},
        "training": {
            "learning_rate": 2e-4,
            "num_train_epochs": 1,
            "per_device_train_batch_size": ROWS_PER_STEP,
            "lr_scheduler_type": "cosine_with_min_lr",
        },
        "resources": {"accelerator": "cpu"},
    }
    (workspace / "data").mkdir(parents=True)
    (workspace / "data" / "train.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    (workspace / "spec.json").write_text(TrainingSpec.model_validate(spec).model_dump_json())
    _run([sys.executable, "-m", "worker.trainer.train", str(workspace)])
    steps = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    counted = list(zip(steps[WARM_UP_STEPS - 1 :], steps[WARM_UP_STEPS:], strict=False))
    tokens = sum((after["at"] - before["at"]) * after["tokens_per_second"] for before, after in counted)
    return float(tokens / (steps[-1]["at"] - steps[WARM_UP_STEPS - 1]["at"]))


def _run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--notebook", help=argparse.SUPPRESS)
    parser.add_argument("--experts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
