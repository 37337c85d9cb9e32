"""Every mode on a GPU against the CPU device: latents, PCM, replays, nodes of the graph.

    export PYTHONPATH=models:onnx:runtime
    python bench/cuda_modes.py tests/data/tiny-music tests/data/tiny-medium

Knows: the modes of a request. Doesn't know: devices' insides, beyond counting graph nodes. Exports
are made in a scratch folder, in fp32 for both devices, so that differences are the devices' own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sa3_models.geometry import SAMPLE_RATE, SAMPLES_PER_LATENT
from sa3_runtime.bundle import find_bundle
from sa3_runtime.devices import DeviceOptions, open_device
from sa3_runtime.devices.null import null_device
from sa3_runtime.request import Request
from sa3_runtime.session import Session

LENGTHS = (1, 7, 97, 324, 513)
LATENT_TOLERANCE, PCM_TOLERANCE = 1e-3, 2
HALF_TOLERANCE = 0.05  # of the latents' RMS: roundings to 11 bits, handed on from step to step
EDIT = {"init_audio": "<array>"}


def modes(seconds: float) -> dict[str, dict[str, Any]]:
    """Options of every mode for a clip of that length."""
    middle = ((seconds * 0.3, seconds * 0.6),)
    return {
        "text": {},
        "text, euler": {"sampler": "euler"},
        "text, dpmpp": {"sampler": "dpmpp"},
        "text, windows": {"chunking": "on"},
        "text, headroom": {"headroom": 6.0},
        "guidance, null": {"cfg": 3.0},
        "guidance, negative": {"cfg": 3.0, "negative_prompt": "hiss and hum"},
        "guidance, rescale": {"cfg": 3.0, "apg": 0.5, "rescale": 0.7},
        "audio to audio": {**EDIT, "init_noise_level": 0.6},
        "inpainting": {**EDIT, "inpaint": middle},
        "inpainting, guidance": {**EDIT, "inpaint": middle, "cfg": 3.0},
    }


def open_session(directory: Path, device: str, precision: str) -> Session:
    """A session of a directory that holds its stage files, without a limit of length."""
    bundle = find_bundle(directory, allow_export=False)
    bundle = replace(bundle, model=replace(bundle.model, max_seconds=400))
    if device == "null":
        return Session(bundle, null_device(bundle.onnx_files("fp32")))
    options = DeviceOptions(precision=precision)
    return Session(bundle, open_device(device, bundle, options))


def prepare(checkpoint: Path, scratch: Path, precision: str) -> Path:
    """A copy of a checkpoint with its fp32 stage files beside it, and those in half precision."""
    from sa3_onnx.export import export

    target = scratch / checkpoint.name
    shutil.copytree(checkpoint, target)
    for kind in {"fp32", precision}:
        export(target, target / "onnx", precision=kind, lowering="operators")
    return target


def compare(directory: Path, device: str, lengths: Iterable[int], only: str, precision: str) -> int:
    """Print one line per mode and length; returns how many missed a tolerance."""
    missed = 0
    rng = np.random.default_rng(5)
    with (
        open_session(directory, "cpu", "fp32") as cpu,
        open_session(directory, device, precision) as gpu,
    ):
        print(
            f"\n### {directory.name}: {gpu.device.description} in {precision} against "
            f"{cpu.device.description} in fp32\n"
        )
        print(
            "| mode | L | latents, max diff | RMS diff / RMS | PCM, max diff | replays | nodes "
            "| record s | ms |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for length in lengths:
            seconds = (length * SAMPLES_PER_LATENT - 100) / SAMPLE_RATE
            source = rng.uniform(-0.4, 0.4, (2, int(seconds * SAMPLE_RATE))).astype(np.float32)
            for name, options in modes(seconds).items():
                if only not in name:
                    continue
                request = Request(
                    "warm analog pads", seconds=seconds, seed=length, **{"steps": 4, **options}
                )
                audio = source if "init_audio" in options else None
                expected = cpu.render(request, source=audio)
                spent, clips = [], []
                for _ in range(3):
                    begin = time.perf_counter()
                    clips.append(gpu.render(request, source=audio))
                    spent.append(time.perf_counter() - begin)
                difference = clips[0].latents - expected.latents
                latents = float(np.abs(difference).max())
                part = float(np.sqrt(np.square(difference).mean()))
                part /= float(np.sqrt(np.square(expected.latents).mean()))
                pcm = int(np.abs(clips[0].pcm.astype(int) - expected.pcm.astype(int)).max())
                same = all(
                    np.array_equal(clip.pcm, clips[0].pcm)
                    and np.array_equal(clip.latents, clips[0].latents)
                    for clip in clips
                )
                nodes = gpu.device.recordings[-1].nodes
                close = latents <= LATENT_TOLERANCE and pcm <= PCM_TOLERANCE
                good = same and (close if precision == "fp32" else part <= HALF_TOLERANCE)
                missed += not good
                print(
                    f"| {name} | {length} | {latents:.1e} | {part:.1e} | {pcm} | "
                    f"{'identical' if same else 'DIFFER'} | {sum(nodes.values())} | "
                    f"{spent[0]:.2f} | {spent[2] * 1e3:.1f} |{'' if good else ' MISSED'}",
                    flush=True,
                )
        print(f"\nkinds of nodes in the last graph: {dict(nodes)}")
    return missed


def main() -> int:
    """Compare the checkpoints named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or null to try the script")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--precision", default="fp32", help="of the files on the GPU")
    parser.add_argument("--only", default="", help="modes whose name holds this")
    options = parser.parse_args()
    precision, total = options.precision, 0
    for path in options.checkpoint:
        with tempfile.TemporaryDirectory() as scratch:
            model = prepare(path, Path(scratch), precision)
            total += compare(model, options.device, options.lengths, options.only, precision)
    bars = f"{LATENT_TOLERANCE:g} in latents, {PCM_TOLERANCE} LSB"
    print(f"\n{total} lines missed {bars if precision == 'fp32' else f'{HALF_TOLERANCE:g} of RMS'}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
