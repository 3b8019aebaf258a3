"""A bfloat16 copy of an MXFP4 checkpoint, made once per host and mapped into memory by every rank.

Dequantizing takes seconds to minutes and, done by each rank, a full copy of the model in each rank's own memory: measured
7.9 s and 1.1 GB per rank for a model of 0.8 GB, against 0.2 s and 18 MB from the copy. The copy takes 4 times the disk.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from app.jobs.spec import ModelSection

# Set by whoever runs the node; without the folder every rank dequantizes for itself.
CACHE_VARIABLE = "TUNEYARD_DEQUANTIZED_CACHE"
LIMIT_VARIABLE = "TUNEYARD_DEQUANTIZED_CACHE_GB"
DEFAULT_LIMIT_GB = 600.0  # gpt-oss-120b and -20b together take 275


def cached_copy(model: ModelSection, config: PreTrainedConfig, dequantize: Callable[[], PreTrainedModel]) -> Path | None:
    """The folder of the copy, made by the first rank to ask while the others wait; None where there is no cache."""
    root = os.environ.get(CACHE_VARIABLE)
    if not root:
        return None
    folder = Path(root) / _key(model, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel should this rank die
        if not folder.exists():
            _write(folder, dequantize)
            _evict(folder, float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GB)))
        os.utime(folder)  # when it was last used
    return folder


def _write(folder: Path, dequantize: Callable[[], PreTrainedModel]) -> None:
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    dequantize().save_pretrained(temporary)
    temporary.rename(folder)


def _evict(newest: Path, limit_gb: float) -> None:
    """Delete the copies that were used longest ago. Ranks that have one mapped keep it until they end."""
    others = [path for path in newest.parent.iterdir() if path.is_dir() and path != newest and path.suffix != ".tmp"]
    free = limit_gb * 1e9 - _size(newest)
    for folder in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        free -= _size(folder)
        if free < 0:
            shutil.rmtree(folder)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _key(model: ModelSection, config: PreTrainedConfig) -> str:
    """Of the commit on the Hub, or of a local folder's files as they are now."""
    commit = getattr(config, "_commit_hash", None)
    parts = [model.name_or_path, str(model.revision), str(commit)]
    if Path(model.name_or_path).is_dir():
        files = sorted(path for path in Path(model.name_or_path).iterdir() if path.is_file())
        parts += [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
