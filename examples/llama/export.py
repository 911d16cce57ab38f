"""Write a model folder from a checkpoint of `train.py`: no devices and no engine, a layer in memory at a time.

    python examples/llama/export.py --model FOLDER --checkpoints OUT/checkpoints --out FOLDER2 --dtype bfloat16

FOLDER is the one that training started from: its config.json and its tokenizer go along. Adapters are merged; their
rank is read from the checkpoint, and `--lora_alpha` must be that of the training.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples.llama import weights
from examples.llama.config import read_config
from examples.llama.model import param_shapes


@dataclass(frozen=True)
class Args:
    """Write a model folder from a checkpoint."""

    model: Path
    """Folder that training started from."""
    checkpoints: Path
    """Folder of checkpoints."""
    out: Path
    """Folder to write."""
    step: int | None = None
    """Which checkpoint; the latest if absent."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the tensors."""
    lora_alpha: float = 16.0
    """Of the training, where it was of adapters."""


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=args.out
    ) as scratch:  # once the parameters' size, as they are stored
        exported = Path(scratch) / "params.safetensors"
        zero2jax.export_checkpoint(args.checkpoints, exported, step=args.step)
        tensors = zero2jax.load_exported(exported)
        config = read_config(args.model)
        adapters = [x.shape[-1] for name, x in tensors.items() if name.endswith("lora_a")]
        if adapters:
            config = dataclasses.replace(config, lora_rank=adapters[0], lora_alpha=args.lora_alpha)
        params = zero2jax.load_exported(exported, param_shapes(config))
        weights.save_folder(args.out, config, params, args.dtype)
    weights.copy_tokenizer(args.model, args.out)
    print(f"wrote the model to {args.out}, in {args.dtype}")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
