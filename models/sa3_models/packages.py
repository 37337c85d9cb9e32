"""Which packages are installed, and how either TensorRT is found and loaded.

Knows: names of packages, the wheel that carries TensorRT-RTX's libraries. Doesn't know: what is
done with them. Nothing is imported to find out: the folders `onnx/` and `build/` of a checkout
import as empty packages.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sa3_models.sidecar import FlavourName

__all__ = ["RTX_BINDINGS", "RTX_CARRIER", "installed", "load_tensorrt", "tensorrt_version"]

RTX_BINDINGS = "tensorrt_rtx_cu13_bindings"
RTX_CARRIER = "onnxruntime-ep-nv-tensorrt-rtx-cu13"  # the wheel with libtensorrt_rtx, its parser
_PACKAGES: dict[FlavourName, tuple[str, ...]] = {
    "tensorrt": (
        "tensorrt",
        "tensorrt_cu13_bindings",
        "tensorrt_cu12_bindings",
        "tensorrt_bindings",
    ),
    "tensorrt-rtx": (RTX_BINDINGS, "tensorrt_rtx"),
}
# in loading order; the bindings are linked against the parser, also where it is never called
_RTX_LIBRARIES = ("libcudart.so", "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so")


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tensorrt_version(flavour: FlavourName) -> str | None:
    """Version of a TensorRT by whichever of its packages is installed, or None."""
    return next((found for name in _PACKAGES[flavour] if (found := installed(name))), None)


def load_tensorrt(flavour: FlavourName) -> Any:
    """The module of a TensorRT, its libraries loaded before it.

    Raises:
        ImportError, OSError: the module or a library is missing or does not load.
    """
    if flavour == "tensorrt":
        return importlib.import_module("tensorrt")
    for library in _carried_libraries():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    try:
        return importlib.import_module("tensorrt_rtx")
    except ModuleNotFoundError:
        return importlib.import_module("tensorrt_rtx_bindings")


def _carried_libraries() -> Iterator[str]:
    """Libraries of TensorRT-RTX by their path; none if the whole system has them."""
    if not installed(RTX_CARRIER):
        return
    carried = {file.name: str(file.locate()) for file in files(RTX_CARRIER) or ()}
    for stem in _RTX_LIBRARIES:
        name = next((name for name in sorted(carried) if name.startswith(stem)), None)
        if name is None:
            raise OSError(f"{RTX_CARRIER} carries no {stem}")
        yield carried[name]
