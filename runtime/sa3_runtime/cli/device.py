"""Which device a run takes when nobody says so, and how people spell the ones they name.

Knows: names, what a GPU needs beside a driver. Doesn't know: what runs there.
"""

from __future__ import annotations

from sa3_models.gpus import local_architectures
from sa3_models.packages import installed
from sa3_runtime.devices import parse_device

__all__ = ["device_name"]


def device_name(wanted: str | None) -> str:
    """The device as `sa3_runtime.load` spells it.

    Args:
        wanted: "cpu", "cuda", "cuda:N", "N", "gpu", or None for CUDA if the driver shows
            a GPU (`CUDA_VISIBLE_DEVICES` is its business) and the bindings are installed.

    Raises:
        UsageError: none of these.
    """
    if wanted is None:
        return "cuda" if installed("cuda-bindings") and local_architectures() else "cpu"
    word = wanted.lower()
    if word.isdecimal():
        return f"cuda:{word}"
    word = {"gpu": "cuda"}.get(word, word)
    parse_device(word)
    return word
