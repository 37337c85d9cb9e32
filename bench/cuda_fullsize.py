"""GPU times of a full-size model: stages, whole replay, eager against graph, memory, jitter.

    export PYTHONPATH=models:onnx:runtime
    python bench/fullsize_checkpoint.py small-music /big/disk/small
    python bench/cuda_fullsize.py /big/disk/small --lengths 33 324 1292 4096

Knows: which figures are wanted. Doesn't know: how a model sounds (its weights are random). Stage
files are written without their check, which would run a 9 GB model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sa3_models.geometry import SAMPLE_RATE, SAMPLES_PER_LATENT
from sa3_models.stages import Stage, stage_file
from sa3_runtime.bundle import find_bundle
from sa3_runtime.devices import DeviceOptions, open_device
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.request import Request
from sa3_runtime.session import Session

STAGES = (Stage.TEXT, Stage.DIT_PREPARE, Stage.DIT_STEP, Stage.ENCODER, Stage.DECODER)
MEGABYTE = 1 << 20

FIRST_CALL = """
import sys, time
begin = time.perf_counter()
from bench.cuda_fullsize import open_session
from sa3_runtime.request import Request
session = open_session(sys.argv[1], sys.argv[2])
opened = time.perf_counter()
clip = session.render(Request("a", seconds=30.0, seed=1))
first = time.perf_counter()
session.render(Request("b", seconds=30.0, seed=2))
second = time.perf_counter() - first
print(f"opened {opened - begin:.2f} s, first {first - begin:.2f} s, second {second:.3f} s;",
      " ".join(f"{name} {seconds:.3f}" for name, seconds in clip.timing.items()))
"""


def export_stages(checkpoint: Path, precision: str, stages: Sequence[Stage]) -> float:
    """Write the stage files of a checkpoint beside it; returns seconds."""
    from sa3_models.checkpoint import Checkpoint
    from sa3_onnx.dit import author_dit
    from sa3_onnx.same import author_decoder, author_encoder
    from sa3_onnx.text_encoder import author_text_encoder

    begin = time.perf_counter()
    kind: dict[str, Any] = {"precision": precision, "lowering": "operators"}
    folder = checkpoint / "onnx"
    folder.mkdir(exist_ok=True)

    def write(stage: Stage) -> None:
        path = folder / f"{stage_file(stage, precision, 'operators')}.onnx"
        if path.is_file():
            return
        opened = Checkpoint(checkpoint)
        if stage is Stage.TEXT:
            graph = author_text_encoder(opened, **kind)
        elif stage is Stage.ENCODER:
            graph = author_encoder(opened, **kind)
        elif stage is Stage.DECODER:
            graph = author_decoder(opened, **kind)
        else:
            graph = author_dit(opened, stage, **kind)
        graph.save(path)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, stages))
    return time.perf_counter() - begin


def open_session(checkpoint: str | Path, precision: str, device: str = "cuda") -> Session:
    """A session without a limit of length."""
    bundle = find_bundle(Path(checkpoint), allow_export=False)
    bundle = replace(bundle, model=replace(bundle.model, max_seconds=400))
    opened = open_device(device, bundle, DeviceOptions(precision=precision))
    return Session(bundle, opened)


def measure(session: Session, request: Request, replays: int) -> dict[str, Any]:
    """Figures of one request, in seconds and bytes."""
    device = session.device
    assert isinstance(device, CudaDevice)
    planned = session.plan(request)[1]
    driver = device._driver
    begin = time.perf_counter()
    device.run(planned.plan, planned.inputs)
    first = time.perf_counter() - begin
    recording = device.recordings[-1]
    totals: list[float] = []
    stages: dict[str, list[float]] = {}
    for _ in range(replays + 3):
        recording.write(planned.inputs)
        start = driver.mark()
        recording.launch()
        end = driver.mark()
        driver.synchronize()
        totals.append(driver.seconds_between(start, end))
        for name, seconds in recording.seconds().items():
            stages.setdefault(name, []).append(seconds)
    totals = totals[3:]
    figures: dict[str, Any] = {
        name: statistics.median(values[3:]) for name, values in stages.items()
    }
    figures["replay"] = statistics.median(totals)
    figures["jitter"] = max(totals) / min(totals)
    walls = []
    for _ in range(5):
        begin = time.perf_counter()
        device.run(planned.plan, planned.inputs)
        walls.append(time.perf_counter() - begin)
    figures["wall"] = statistics.median(walls)
    marks = recording._marks
    eager = []
    for _ in range(3):
        recording.write(planned.inputs)
        begin = time.perf_counter()
        recording.enqueue(recording._known_call)
        driver.synchronize()
        eager.append(time.perf_counter() - begin)
    recording._marks = marks
    figures["eager"] = statistics.median(eager)
    figures["first"] = first
    figures["nodes"] = sum(recording.nodes.values())
    figures["buffers"] = recording.bytes
    figures["used"] = driver.total_bytes - driver.free_bytes()
    figures["steps"] = recording.stage_runs.count("dit_step")
    return figures


def report(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Print Markdown tables."""
    print(
        "\n| mode | L | text ms | prepare ms | DiT step ms | sampling ms | decode ms | copy ms "
        "| replay ms | wall ms | eager ms | jitter | nodes | buffers MiB | GPU MiB |"
    )
    print("|---" * 15 + "|")
    for (mode, length), f in rows.items():
        print(
            f"| {mode} | {length} "
            f"| {f['t5gemma'] * 1e3:.2f} | {f['dit_prepare'] * 1e3:.2f} "
            f"| {f['dit_step'] * 1e3 / f['steps']:.3f} | {f['dit_step'] * 1e3:.2f} "
            f"| {f['dec'] * 1e3:.2f} | {f['copy'] * 1e3:.2f} | {f['replay'] * 1e3:.2f} "
            f"| {f['wall'] * 1e3:.2f} | {f['eager'] * 1e3:.1f} | {f['jitter']:.3f} | {f['nodes']} "
            f"| {f['buffers'] / MEGABYTE:.0f} | {f['used'] / MEGABYTE:.0f} |"
        )
    for (mode, length), f in rows.items():
        plain = rows.get(("text", length))
        if mode == "guidance" and plain:
            print(
                f"guidance at L={length}: {f['dit_step'] / plain['dit_step']:.3f}× plain sampling"
            )


def main() -> None:
    """Measure the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=(33, 324, 1292, 4096))
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--no-guidance", action="store_true")
    parser.add_argument("--first-call", action="store_true", help="time it in fresh processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spent = export_stages(options.checkpoint, options.precision, STAGES)
    print(f"stage files in {spent:.1f} s", file=sys.stderr)
    begin = time.perf_counter()
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    with open_session(options.checkpoint, options.precision) as session:
        print(f"{options.checkpoint.name}: {session.device.description}")
        modes: dict[str, dict[str, Any]] = {"text": {}, "guidance": {"cfg": 3.0}}
        for mode in ("text",) if options.no_guidance else modes:
            for length in options.lengths:
                seconds = (length * SAMPLES_PER_LATENT - 100) / SAMPLE_RATE
                request = Request(
                    "warm analog pads",
                    seconds=seconds,
                    seed=1,
                    steps=8,
                    chunking="off",
                    **modes[mode],
                )
                replays = options.replays if mode == "text" else 10
                rows[mode, length] = measure(session, request, replays)
                print(f"{mode} L={length}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    report(rows)
    if options.first_call:
        for turn in (1, 2):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL, str(options.checkpoint), options.precision],
                capture_output=True,
                text=True,
                check=False,
            )
            print(
                f"first call of process {turn}: {done.stdout} "
                f"{done.stderr[-500:] if done.returncode else ''}"
            )
    if options.json:
        table = [{"mode": m, "L": n, **f} for (m, n), f in rows.items()]
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
