"""Measure a full-size model on the CPU: seconds per DiT step, decoding, peak memory.

    PYTHONPATH=models:onnx:runtime python bench/cpu_fullsize.py small-music /big/disk

Writes a random checkpoint of the published sizes (bench/fullsize_checkpoint.py) unless it is there,
exports it on the first run, then renders each length in a process of its own, once with every
stage kept and once with --free-models. Prints one JSON object per run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
from pathlib import Path
from statistics import median
from typing import Any

from fullsize_checkpoint import present


def measure(directory: str, seconds: float, repeat: int, free: bool) -> dict[str, Any]:
    """Render `repeat` clips in this process; medians of the stages' seconds, peak RSS in MB."""
    import sa3_runtime as sa3

    with sa3.load(directory, device="cpu", free_models=free) as model:
        clips = [model.generate("x", seconds=seconds, seed=i) for i in range(repeat)]
    steps = clips[0].request.steps or 1
    stages = {
        name: median(clip.timing.get(name, 0.0) for clip in clips) for name in clips[0].timing
    }
    return {
        "seconds": seconds,
        "latents": clips[0].latents.shape[-1],
        "free_models": free,
        "dit_step_s": round(stages["dit_step"] / steps, 3),
        "stages_s": {name: round(value, 2) for name, value in stages.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure the model named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=("small-music", "medium"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, nargs="+", default=[10.0, 30.0])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    checkpoint = present(options.folder, options.model)
    os.environ.setdefault("SA3_HOME", str(options.folder / "home"))
    context = multiprocessing.get_context("spawn")
    for seconds in options.seconds:
        for free in (False, True):
            # a process each: the peak of one must not hide that of another
            with context.Pool(1) as pool:
                row = pool.apply(measure, (str(checkpoint), seconds, options.repeat, free))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
