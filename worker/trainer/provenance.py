"""What a run stood on: the base's very files, the libraries, the hardware, the chat template. Goes into the manifest."""

import hashlib
import importlib.metadata
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import PreTrainedTokenizerBase

from app.jobs.spec import ModelSection, TrainingSpec
from worker.trainer.model import load_config
from worker.workspace import Workspace, write_json

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
# What a model is made of; a Hub snapshot or a folder may hold much else.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
SHA256_HEX = 64


def record_facts(workspace: Workspace, spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write facts.json; on the first rank only."""
    facts = {
        "base": describe_base(spec.model),
        "chat_template_sha256": template_hash(tokenizer),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "hardware": describe_hardware(spec),
    }
    write_json(workspace.facts, facts)


def describe_base(model: ModelSection) -> dict[str, Any]:
    """The base's name, the commit its name stood for, and the SHA-256 of each of its files."""
    revision = getattr(load_config(model), "_commit_hash", None)
    paths = _base_files(model, revision)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run: as fast as the disk
        hashes = dict(zip((path.name for path in paths), pool.map(_file_hash, paths), strict=True))
    return {"name_or_path": model.name_or_path, "revision": revision, "files": hashes}


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The SHA-256 of the chat template's text; None where there is none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()


def describe_hardware(spec: TrainingSpec) -> dict[str, Any]:
    """What ran: the same again gives the same figures, another kind only nearly."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "accelerator": spec.resources.accelerator,
        "gpus": gpus if spec.resources.accelerator == "gpu" else [],
        "cuda": torch.version.cuda if spec.resources.accelerator == "gpu" else None,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }


def _base_files(model: ModelSection, revision: str | None) -> list[Path]:
    folder = Path(model.name_or_path)
    if not folder.is_dir():
        config = huggingface_hub.try_to_load_from_cache(model.name_or_path, "config.json", revision=revision)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return sorted(path for pattern in MODEL_FILES for path in folder.glob(pattern))


def _file_hash(path: Path) -> str:
    """The Hub's cache names a large file's content by its SHA-256: then nothing needs to be read."""
    content = path.resolve()
    if path.is_symlink() and len(content.name) == SHA256_HEX:
        return content.name
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
