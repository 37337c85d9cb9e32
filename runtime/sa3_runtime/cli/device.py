"""Which device a run takes when nobody says so, and how people spell the ones they name.

Knows: names, what a GPU needs to render. Doesn't know: what runs there.
"""

from __future__ import annotations

from sa3_models.gpus import DRIVER_LEAST, driver_too_old, local_architectures
from sa3_models.packages import installed
from sa3_runtime.devices import parse_device
from sa3_runtime.view import View

__all__ = ["device_name"]


def device_name(wanted: str | None) -> str:
    """The device as `sa3_runtime.load` spells it.

    Args:
        wanted: "cpu", "cuda", "cuda:N", "N", "gpu", or None for CUDA if the driver shows
            a GPU (`CUDA_VISIBLE_DEVICES` is its business) and the bindings are installed. A driver
            that is too old for it is told, and the CPU taken.

    Raises:
        UsageError: none of these.
    """
    if wanted is None:
        if not (installed("cuda-bindings") and local_architectures()):
            return "cpu"
        if driver_too_old():
            View(colour=False).remark(
                f"the NVIDIA driver is too old for the GPU, {DRIVER_LEAST} or newer is needed: "
                "rendering on the CPU"
            )
            return "cpu"
        return "cuda"
    word = wanted.lower()
    if word.isdecimal():
        return f"cuda:{word}"
    word = {"gpu": "cuda"}.get(word, word)
    parse_device(word)
    return word
