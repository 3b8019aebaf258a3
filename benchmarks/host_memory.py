"""Host memory of 1, 2 and 4 ranks against the model's size, with and without the dequantized copy that ranks share.

    python -m benchmarks.host_memory [--ranks 1 2 4]

Counts the most that the ranks hold while they load, and until they begin to export (LoRA, one step, DDP on CPU; on a GPU host
a step takes GPU memory instead): the sum of their proportional shares (Pss), in which a page that several ranks map counts
once. What the libraries take is measured with a tiny model and taken off.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from app.jobs.spec import TrainingSpec
from benchmarks._models import build_gpt_oss

POLL_S = 0.1
VARIABLE = "TUNEYARD_DEQUANTIZED_CACHE"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    ranks: list[int] = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_gpt_oss(folder / "tiny", layers=2, hidden=64, experts=4)
        size = build_gpt_oss(folder / "mid", layers=8, hidden=768, experts=16)
        (folder / "train.jsonl").write_text('{"text": "Short rows, so that activations take nothing."}\n' * 8)
        print(f"model: {size / 1e6:.0f} MB in bfloat16")
        print("           without copy, x model     with copy, x model")
        print("ranks      loading   and a step    loading   and a step")
        for number in ranks:
            peak(folder, "mid", 1, cached=True)  # writes the copy, which is no part of any run after the first
            libraries = peak(folder, "tiny", number, cached=False)
            plain, cached = (peak(folder, "mid", number, cached=cached) for cached in (False, True))
            held = [(most - taken) / size for peaks in (plain, cached) for most, taken in zip(peaks, libraries, strict=True)]
            print(f"{number:5d}   " + "  ".join(f"{figure:10.2f}" for figure in held), flush=True)


def peak(folder: Path, model: str, ranks: int, *, cached: bool) -> tuple[int, int]:
    """The most that all ranks together held before they began to train, and before they began to export, in bytes."""
    workspace = Path(tempfile.mkdtemp(dir=folder))
    spec = {
        "model": {"name_or_path": str(folder / model), "dtype": "bfloat16"},
        "training": {"max_steps": 1, "per_device_train_batch_size": 1},
        "parallelism": {"nproc_per_node": ranks},
        "resources": {"accelerator": "cpu"},
    }
    (workspace / "data").mkdir()
    (workspace / "data" / "train.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    (workspace / "spec.json").write_text(TrainingSpec.model_validate(spec).model_dump_json())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if cached:
        environment[VARIABLE] = str(folder / "copies")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "worker.trainer.train"]
    with (workspace / "out").open("w") as out:
        agent = subprocess.Popen([*command, str(workspace)], env=environment, stdout=out, stderr=out)
        loading = highest = 0
        while agent.poll() is None:
            if not (workspace / "export").exists():
                held = sum(_pss(child) for child in psutil.Process(agent.pid).children())
                highest = max(highest, held)
                loading = loading if (workspace / "log.jsonl").exists() else highest
            time.sleep(POLL_S)
    if agent.returncode != 0:
        raise SystemExit((workspace / "out").read_text()[-4000:])
    return loading, highest


def _pss(process: psutil.Process) -> int:
    """A process's proportional share of memory, 0 once it is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
