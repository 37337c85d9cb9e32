"""GPU time and memory of one stage file through ONNX Runtime, replayed in a CUDA graph.

    export PYTHONPATH=models:onnx:runtime:.
    python bench/cuda_stage.py /big/disk/small dec --lengths 33 324 1292 4096 --kernels

Knows: one stage at a time, to see what a change of its lowering gains. Doesn't know: whole renders
(bench/cuda_fullsize.py). Inputs are random. `--kernels` needs torch, for its profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.cuda_fullsize import MEGABYTE, export_stages

from sa3_models.stages import Port, Stage, stage_file
from sa3_runtime.devices.cuda.bindings import CudaDriver
from sa3_runtime.devices.cuda.driver import Allocation
from sa3_runtime.devices.cuda.stage import Tensor
from sa3_runtime.stages.ort_cuda import OrtCudaStage


def filled(driver: CudaDriver, port: Port, latent_len: int) -> tuple[Allocation, Tensor]:
    """A port's buffer with values that its stage can take, on the GPU."""
    shape = port.resolve(latent_len)
    bfloat16 = port.dtype == "bfloat16"
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    if port.dtype.startswith("int"):
        values = np.ones(shape, np.float32)
    elif port.name in ("t", "cond_gate", "t5_mask", "padding_mask"):
        values = np.full(shape, 0.5 if port.name == "t" else 1.0, np.float32)
    elif port.name == "seconds_total":
        values = np.full(shape, 30.0, np.float32)
    dtype = np.dtype("float16") if bfloat16 else np.dtype(port.dtype)
    host = np.ascontiguousarray(values.astype(dtype))
    memory = Allocation(driver, host.nbytes)
    driver.copy(memory.address, host.ctypes.data, host.nbytes)
    driver.synchronize()
    return memory, Tensor(memory.address, shape, port.dtype)


def kernels(run: Callable[[], None]) -> list[tuple[float, int, str]]:
    """(ms, calls, name) of every kernel that `run` enqueues and waits for, longest first."""
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type.name == "CUDA":
            spent[event.name].append(event.time_range.elapsed_us() / 1e3)
    return sorted(((sum(t), len(t), name) for name, t in spent.items()), reverse=True)


def measure(
    driver: CudaDriver, stage: Stage, path: Path, latent_len: int, replays: int, listed: int
) -> dict[str, Any]:
    """Time a stage at one length: ms per replay, memory of a run, kernels if any are to be listed.

    The memory is what the GPU has less afterwards, beyond weights, ports and the libraries' own.
    """
    opened = OrtCudaStage(stage, path, driver)
    opened.prepare(1)  # libraries take what they take once
    free = driver.free_bytes()
    call = opened.prepare(latent_len)
    held = []
    tensors: list[dict[str, Tensor]] = [{}, {}]
    for side, ports in zip(tensors, (opened.io.inputs, opened.io.outputs), strict=True):
        for port in ports:
            memory, side[port.name] = filled(driver, port, latent_len)
            held.append(memory)

    def enqueue() -> None:
        call.enqueue(tensors[0], tensors[1], scratch=0)

    for _ in range(2):
        enqueue()
    driver.synchronize()
    scratch = free - driver.free_bytes() - sum(memory.size for memory in held) - call.held_bytes
    driver.begin_capture()
    enqueue()
    graph = driver.end_capture()
    times = []
    for _ in range(replays + 3):
        start = driver.mark()
        graph.launch()
        end = driver.mark()
        driver.synchronize()
        times.append(driver.seconds_between(start, end))
    row: dict[str, Any] = {
        "L": latent_len,
        "ms": statistics.median(times[3:]) * 1e3,
        "nodes": sum(graph.nodes.values()),
        "MiB": scratch / MEGABYTE,
    }
    graph.close()
    if listed:

        def run() -> None:
            enqueue()
            driver.synchronize()

        row["kernels"] = kernels(run)[:listed]
    for memory in held:
        memory.close()
    return row


def main() -> None:
    """Measure the stage named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("stage", type=Stage)
    parser.add_argument("--lengths", type=int, nargs="+", default=(33, 324, 1292, 4096))
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--file", type=Path, help="another file of that stage")
    parser.add_argument("--kernels", type=int, nargs="?", const=40, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = f"{stage_file(options.stage, options.precision, 'operators')}.onnx"
    path = options.file or options.checkpoint / "onnx" / name
    if not path.is_file():
        export_stages(options.checkpoint, options.precision, [options.stage])
    driver = CudaDriver(0)
    rows = []
    for length in options.lengths:
        row = measure(driver, options.stage, path, length, options.replays, options.kernels)
        rows.append(row)
        facts = f"{row['ms']:.3f} ms, {row['nodes']} nodes, {row['MiB']:.0f} MiB for a run"
        print(f"{options.stage} L={length}: {facts}", flush=True)
        for spent, count, kernel in row.get("kernels", ()):
            print(f"  {spent:8.3f} ms {count:5} × {kernel[:150]}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
