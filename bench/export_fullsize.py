"""Measure the export of a full-size model: time, peak memory, sizes.

    PYTHONPATH=models:onnx python bench/export_fullsize.py small-music /big/disk [--precision fp16]

Writes a random checkpoint of the published sizes (bench/fullsize_checkpoint.py) unless it is there,
exports every stage in a process of its own, and prints one JSON object per file and one for all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from fullsize_checkpoint import present


def main() -> None:
    """Measure the model named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=("small-music", "medium", "same-s", "same-l"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    checkpoint = present(options.folder, options.model)
    out = options.folder / f"{options.model}-{options.precision}"
    command = [sys.executable, "-m", "sa3_onnx", "export", str(checkpoint), "--json", "--force"]
    command += ["--precision", options.precision, "--out", str(out)]
    # the first child's memory is not to be mixed with the exporter's
    before = os.times()
    began = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - began
    after = os.times()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        print(json.dumps(row))
    print(
        json.dumps({
            "model": options.model,
            "precision": options.precision,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(
                after.children_user + after.children_system
                - before.children_user - before.children_system, 1,
            ),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
            "weight_mb": round(sum(row["weight_bytes"] for row in rows) / 1e6),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
