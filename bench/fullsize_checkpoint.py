"""Write a random checkpoint of full size from a manifest of the published ones.

    PYTHONPATH=models python bench/fullsize_checkpoint.py small-music /big/disk/small
    PYTHONPATH=models python bench/fullsize_checkpoint.py medium /big/disk/medium --depth 4

Knows: manifests, the safetensors format. Values come from one seeded pool of normal numbers, read
from another place for each tensor, with the scales of `sa3_models.tiny`: activations stay near one.
The text decoder, which no stage reads, is a hole in its file. What such a model renders is noise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import TEXT_SUBFOLDER
from sa3_models.tiny import random_tensor, tokenizer_config

MANIFESTS = Path(__file__).resolve().parents[1] / "tests/data/manifests"
POOL = (1 << 24) + 3  # normal numbers; odd, so that rows of a matrix never line up


class Pool:
    """Stands in for a NumPy generator: slices of one pool, at a place that follows from a name."""

    def __init__(self, seed: int) -> None:
        self.values = np.random.default_rng(seed).standard_normal(POOL, np.float32)
        self.at = 0

    def standard_normal(self, size: Sequence[int], _: type = np.float32) -> NDArray[np.float32]:
        """Normal numbers of a shape."""
        count = int(np.prod(size, dtype=np.int64))
        turns = -(-(self.at + count) // POOL)
        run = self.values if turns == 1 else np.tile(self.values, turns)
        return run[self.at : self.at + count].reshape(size)

    def tensor(self, name: str, shape: Sequence[int]) -> NDArray[np.float32]:
        """The tensor of that name."""
        self.at = zlib.crc32(name.encode()) % POOL
        return random_tensor(name, tuple(shape), self)  # type: ignore[arg-type]


def write(path: Path, shapes: Mapping[str, Sequence[int]], pool: Pool, *, half: bool) -> int:
    """Write one safetensors file: F32, or with `half` BF16 and decoder tensors as holes."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16) if half else np.dtype(np.float32)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {
            "dtype": "BF16" if half else "F32",
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        for name, shape in shapes.items():
            if 0 in shape or name.startswith("model.decoder."):
                continue
            file.seek(base + header[name]["data_offsets"][0])
            rows = max(1, POOL // max(1, int(np.prod(shape[1:], dtype=np.int64))))
            # large tables in parts, each with a place of its own
            for start in range(0, shape[0], rows):
                part = (min(rows, shape[0] - start), *shape[1:])
                label = f"{start}:{name}" if start else name
                file.write(pool.tensor(label, part).astype(dtype).tobytes())
        file.truncate(base + end)
    return base + end


def present(folder: Path, model: str) -> Path:
    """`<folder>/<model>-checkpoint`, written by a process of its own unless it is there."""
    checkpoint = folder / f"{model}-checkpoint"
    if not (checkpoint / "model.safetensors").is_file():
        subprocess.run([sys.executable, __file__, model, str(checkpoint)], check=True)
    return checkpoint


def main() -> None:
    """Write the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=("small-music", "medium", "same-s", "same-l"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, help="blocks of the DiT, if fewer than published")
    options = parser.parse_args()
    began = time.monotonic()
    shapes = json.loads((MANIFESTS / f"{options.model}.json").read_text())
    config = json.loads((MANIFESTS / f"{options.model}.model_config.json").read_text())
    if options.depth:
        layer = re.compile(r"model\.model\.transformer\.layers\.(\d+)\.")
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not (found := layer.match(name)) or int(found[1]) < options.depth
        }
        config["model"]["diffusion"]["config"]["depth"] = options.depth
    pool = Pool(options.seed)
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / "model_config.json").write_text(json.dumps(config, indent=2))
    total = write(options.directory / "model.safetensors", shapes, pool, half=False)
    if config["model_type"] != "autoencoder":
        text = options.directory / TEXT_SUBFOLDER
        text.mkdir(exist_ok=True)
        text_config = json.loads((MANIFESTS / "t5gemma-encoder.model_config.json").read_text())
        (text / "config.json").write_text(json.dumps(text_config, indent=2))
        (text / "tokenizer.json").write_text(json.dumps(tokenizer_config()))
        (text / "tokenizer_config.json").write_text(json.dumps({"padding_side": "right"}))
        full = json.loads((MANIFESTS / "t5gemma-full.json").read_text())
        total += write(text / "model.safetensors", full, pool, half=True)
    print(f"{total / 1e9:.2f} GB in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
