"""Reading an upload through against `datasets.load_dataset("json")` on the same file: megabytes a second, and peak memory.

    python -m benchmarks.validation [--megabytes 1000] [--folder /tmp]

Each reader has a process of its own, one after the other, on a file that is made first and lies in the page cache; megabytes
per second of CPU time say the same on a busy machine. The baseline turns rows into Arrow on disk and checks nothing; ours
parses every value exactly (duplicate keys, NaN, broken text), checks every message, and counts turns, duplicates and types.
Prints a table and one line of JSON.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEED = 7
MB = 1_000_000
SENTENCE = "the capital of a country is not always its largest city and nobody knows why that should be so"
READERS = ("tuneyard", "datasets")


def main() -> None:
    """Make the file, read it with both, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--read", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(measure(arguments.read, arguments.path)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "train.jsonl"
        make(path, arguments.megabytes * MB)
        found = {reader: in_a_process(reader, path) for reader in READERS}
    for reader, figures in found.items():
        speed = f"{figures['mb_per_s']:7.1f} MB/s {figures['mb_per_cpu_s']:7.1f} MB per CPU second"
        print(f"{reader:>10}: {speed} {figures['peak_mb']:6.0f} MB peak  {figures['rows']} rows")
    print(json.dumps({"megabytes": arguments.megabytes, **found}))


def make(path: Path, size: int) -> None:
    """Chats of one to four exchanges, of very unequal lengths, about 1.5 kB a row."""
    random_ = random.Random(SEED)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            written += file.write(json.dumps({"messages": chat(random_), "source": "benchmark"}, ensure_ascii=False) + "\n")


def chat(random_: random.Random) -> list[dict[str, str]]:
    """One row's messages."""
    turns = [{"role": "system", "content": "You are a helpful assistant. Antworte höflich."}]
    for _ in range(random_.randint(1, 4)):
        turns.append({"role": "user", "content": text(random_, 40)})
        turns.append({"role": "assistant", "content": text(random_, 200)})
    return turns


def text(random_: random.Random, most: int) -> str:
    """Up to `most` words, with line breaks and quotes in between."""
    words = random_.choices(SENTENCE.split(), k=random_.randint(1, most))
    return " ".join(words).replace("city and", 'city"\nand')


def in_a_process(reader: str, path: Path) -> dict[str, Any]:
    """What one reader took, in a process that did nothing before."""
    command = [sys.executable, "-m", "benchmarks.validation", "--read", reader, "--path", str(path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(reader: str, path: Path) -> dict[str, Any]:
    """Read the file; the reader's own libraries are imported before the clock starts, and count as memory."""
    read = {"tuneyard": with_tuneyard, "datasets": with_datasets}[reader](path)
    started, cpu_started = time.perf_counter(), time.process_time()
    rows = read()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    size_mb = path.stat().st_size / MB
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000  # Linux counts in kB
    return {"mb_per_s": size_mb / seconds, "mb_per_cpu_s": size_mb / cpu_seconds, "peak_mb": peak_mb, "rows": rows}


def with_tuneyard(path: Path) -> Any:
    """What a control worker does with an upload."""
    from app.files import dataset

    return lambda: dataset.check(path, path.name).rows_used


def with_datasets(path: Path) -> Any:
    """The reader that most training code uses, with nothing in its cache."""
    import datasets

    datasets.disable_progress_bars()
    cache = str(path.parent / "cache")
    return lambda: len(datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache))


if __name__ == "__main__":
    main()
