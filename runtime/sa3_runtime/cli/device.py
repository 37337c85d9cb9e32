"""Which device a run takes when nobody says so, and how people spell the ones they name.

Knows: names, and how to ask the CUDA driver how many GPUs it shows. Doesn't know: what runs there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sa3_models.packages import installed
from sa3_runtime.devices import parse_device

__all__ = ["device_name", "visible_gpus"]

# of the kernel driver; the last two are those of WSL and of integrated GPUs
_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvgpu")


def device_name(wanted: str | None) -> str:
    """The device as `sa3_runtime.load` spells it.

    Args:
        wanted: "cpu", "cuda", "cuda:N", "N", "gpu", or None for CUDA if there is a GPU.

    Raises:
        UsageError: none of these.
    """
    if wanted is None:
        return "cuda" if visible_gpus() else "cpu"
    word = wanted.lower()
    if word.isdecimal():
        return f"cuda:{word}"
    word = {"gpu": "cuda"}.get(word, word)
    parse_device(word)
    return word


def visible_gpus() -> int:
    """How many GPUs the CUDA driver shows this process; 0 without driver or bindings.

    `CUDA_VISIBLE_DEVICES` is the driver's own business: an empty one gives 0.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or not installed("cuda-bindings"):
        return 0
    if sys.platform == "linux" and not any(Path(node).exists() for node in _NODES):
        return 0  # spares a machine without a GPU the import
    from cuda.bindings import driver

    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return 0
        status, count = driver.cuDeviceGetCount()
    except RuntimeError:  # the bindings are there, the driver's library is not
        return 0
    return int(count) if status == driver.CUresult.CUDA_SUCCESS else 0
