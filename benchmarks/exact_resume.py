"""What a resume changes: a run killed with -9 at a random step and gone on with, against the same run never stopped.

    python benchmarks/exact_resume.py [SEED]

For supervised and DPO x LoRA and full weights x DDP and FSDP2, on two CPU ranks in float32, with packing (supervised),
accumulation and dropout (LoRA). Prints the largest difference of any step's loss and of any exported weight.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from app.jobs.spec import TrainingSpec
from tests import tiny
from worker.workspace import Workspace, write_json

RANKS = 2
STEPS = 40  # enough that a run cannot end before it is killed
SAVE_STEPS = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m", "worker.trainer.train"]


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(1000)
    chance = random.Random(seed)
    print(f"seed {seed}")
    print(f"{'method':<12}{'adapter':<9}{'strategy':<10}{'killed after':>14}{'loss':>12}{'weights':>12}")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.build_llama(Path(folder) / "llama")
        for number, (method, adapter, strategy) in enumerate(
            product(("supervised", "dpo"), ("lora", "full"), ("ddp", "fsdp2"))
        ):
            spec = make_spec(model, method, adapter, strategy)
            whole, killed = (make_workspace(Path(folder) / f"{number}-{name}", spec, method) for name in ("whole", "killed"))
            train(whole)
            step = train_until_killed(killed, chance)
            train(killed)
            loss, weights = difference(losses(whole), losses(killed)), weight_difference(whole, killed)
            print(f"{method:<12}{adapter:<9}{strategy:<10}{f'step {step}':>14}{loss:>12g}{weights:>12g}", flush=True)


def make_spec(model: Path, method: str, adapter: str, strategy: str) -> dict[str, Any]:
    spec = {
        "method": method,
        "model": {"name_or_path": str(model), "dtype": "float32"},
        "adapter": {"type": adapter, "r": 4} | ({"dropout": 0.1} if adapter == "lora" else {}),
        "data": {"max_length": 512, "packing": "on" if method == "supervised" else "off", "template_date": "2026-01-01"},
        "training": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 0.005,
        },
        "parallelism": {"strategy": strategy, "nproc_per_node": RANKS},
        "checkpoints": {"save_steps": SAVE_STEPS, "keep": 3},
        "resources": {"accelerator": "cpu"},
    }
    return TrainingSpec.model_validate(spec).model_dump(mode="json")


def make_workspace(root: Path, spec: dict[str, Any], method: str) -> Workspace:
    workspace = Workspace(root)
    write_json(workspace.spec, spec)
    rows = tiny.chat_rows(24)
    tiny.write_rows(workspace.train_data, [as_preference(row) for row in rows] if method == "dpo" else rows)
    return workspace


def as_preference(row: dict[str, Any]) -> dict[str, Any]:
    """The row's answer preferred to another one."""
    *prompt, answer = row["messages"]
    return {"prompt": prompt, "chosen": [answer], "rejected": [answer | {"content": "I do not know."}]}


def train(workspace: Workspace) -> None:
    subprocess.run([*TORCHRUN, str(workspace.root)], check=True, env=environment(), capture_output=True)


def train_until_killed(workspace: Workspace, chance: random.Random) -> int:
    """Kill the agent, and with it its ranks, some time after a random checkpoint; the last step that was logged."""
    saves = chance.randint(1, STEPS // SAVE_STEPS // 2)
    delay_s = chance.uniform(0, 0.2)
    quiet = subprocess.DEVNULL
    with subprocess.Popen([*TORCHRUN, str(workspace.root)], env=environment(), stdout=quiet, stderr=quiet) as agent:
        while agent.poll() is None and len(lines(workspace.checkpoint_lines)) < saves:
            time.sleep(0.01)
        time.sleep(delay_s)
        if agent.poll() is not None:
            raise SystemExit("the run ended before it could be killed: raise STEPS")
        agent.send_signal(signal.SIGKILL)
    time.sleep(1)  # the ranks die with their agent
    if workspace.result.exists():
        raise SystemExit("the run finished before it could be killed: raise STEPS")
    return max(losses(workspace))


def losses(workspace: Workspace) -> dict[int, float]:
    return {line["step"]: line["values"]["loss"] for line in lines(workspace.metrics) if "loss" in line["values"]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def difference(left: dict[int, float], right: dict[int, float]) -> float:
    if left.keys() != right.keys():
        return float("nan")
    return max(abs(left[step] - right[step]) for step in left)


def weight_difference(left: Workspace, right: Workspace) -> float:
    names = sorted(path.relative_to(left.export) for path in left.export.rglob("*.safetensors"))
    pairs = [(load_file(left.export / name), load_file(right.export / name)) for name in names]
    return max(float((ours[key] - theirs[key]).abs().max()) for ours, theirs in pairs for key in ours)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    main()
