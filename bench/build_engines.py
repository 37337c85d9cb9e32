"""Measure the engines of a full-size model: time, peak memory and scratch per stage.

    PYTHONPATH=models:onnx:build python bench/build_engines.py small-music /big/disk
    PYTHONPATH=models:onnx:build python bench/build_engines.py medium /big/disk --stage dit_step

Writes a random checkpoint of the published sizes (bench/fullsize_checkpoint.py) unless it is there,
exports what is missing, and builds for sm_86, sm_89 and sm_120 with TensorRT-RTX: no GPU is needed.
Prints one JSON object per stage and one for all; for small-music it ends with exit code 1 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from fullsize_checkpoint import present

from sa3_build.build import build_all
from sa3_build.sources import graph_of
from sa3_build.wish import Wish, plan

ARCHITECTURES = ("sm_86", "sm_89", "sm_120")
SET_SECONDS, RSS_MB = 360, 5_000  # all engines of small-music, one after the other
SCRATCH_MB = {("dit_step", -1): 450, ("dit_prepare", -1): 450, ("enc", 0): 110, ("dec", 0): 110}


def say(line: str) -> None:
    """Talk goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measure the model named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=("small-music", "medium", "same-s", "same-l"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", action="append", default=[], help="only this one")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES))
    parser.add_argument("--precision", help="instead of each stage's own")
    parser.add_argument("--keep", action="store_true", help="keep graphs and engines")
    options = parser.parse_args()
    checkpoint = present(options.folder, options.model)
    home = options.folder / f"{options.model}-home"
    os.environ["SA3_HOME"] = str(home)
    words = (str(checkpoint), *options.stage)
    chosen = plan(
        Wish(words, (options.arch,), "tensorrt-rtx", precision=options.precision), say=say
    )
    rows, export_seconds, began = [], 0.0, time.monotonic()
    for piece in chosen.pieces:  # one after the other: a full disk holds one stage at a time
        exporting = time.monotonic()
        order = chosen.order(piece, graph_of(piece, say=say))
        exporting = time.monotonic() - exporting
        export_seconds += exporting
        [(_, record)] = build_all([order], say=say)
        if record is None:
            say(f"{order.name}: up to date, not measured (remove {home})")
            continue
        rows.append({
            "stage": record.stage,
            "precision": record.precision,
            "nodes": order.source.nodes,
            "weight_mb": round(order.source.weight_bytes / 1e6),
            "export_seconds": round(exporting, 1),
            "seconds": record.seconds,
            "peak_rss_mb": round(record.peak_rss_bytes / 1e6),
            "engine_mb": round(record.engine_bytes / 1e6),
            "scratch_mb": [round((row.scratch_bytes or 0) / 1e6, 1) for row in record.profiles],
            "estimate": [round(order.estimate()[0]), round(order.estimate()[1] / 1e6)],
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        if not options.keep:
            for path in (order.source.path, *order.source.data):
                path.unlink()
            for target in order.targets:
                order.engine(target).unlink()
    wall = time.monotonic() - began - export_seconds
    print(
        json.dumps({"model": options.model, "targets": options.arch, "set_seconds": round(wall, 1)})
    )
    if not options.keep:
        shutil.rmtree(home)
    missed = bars_missed(rows, wall) if options.model == "small-music" else []
    for line in missed:
        say(f"BAR MISSED: {line}")
    return 1 if missed else 0


def bars_missed(rows: list[dict[str, Any]], wall: float) -> list[str]:
    """Which of the bars for small-music do not hold."""
    missed = []
    if wall > SET_SECONDS:
        missed.append(f"the whole set took {wall:.0f} s, the bar is {SET_SECONDS} s")
    for row in rows:
        if row["peak_rss_mb"] > RSS_MB:
            missed.append(f"{row['stage']}: {row['peak_rss_mb']} MB of memory, the bar is {RSS_MB}")
        for (stage, profile), bar in SCRATCH_MB.items():
            if row["stage"] == stage and row["scratch_mb"][profile] > bar:
                missed.append(f"{stage}: {row['scratch_mb'][profile]} MB scratch, the bar is {bar}")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
