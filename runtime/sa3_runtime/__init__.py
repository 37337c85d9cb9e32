"""From a request to sound: plan, devices, sampling, audio files, command line.

`load`, `Request` and `Clip` are the three names to learn. They are resolved on first use, so that
importing the package (for `sa3 --help`) loads neither NumPy nor any runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sa3_runtime.clip import Clip
    from sa3_runtime.request import Request
    from sa3_runtime.session import Session, load

__all__ = ["Clip", "Request", "Session", "load"]

_HOME = {"Clip": "clip", "Request": "request", "Session": "session", "load": "session"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sa3_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sa3_runtime.{_HOME[name]}"), name)
