"""What `sa3 doctor` looks at of GPUs and models: driver, libraries, engines and their match.

Knows: which package is which library, what an engine must fit (sidecar). Doesn't know: CUDA.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from ctypes import CDLL
from importlib.metadata import distributions
from pathlib import Path

from sa3_models import catalogue, checking, inventory
from sa3_models.errors import Sa3Error
from sa3_models.gpus import DRIVER_LEAST
from sa3_models.packages import installed
from sa3_models.paths import sa3_home
from sa3_models.sidecar import Machine, check_engine
from sa3_runtime.cli.checks import Check
from sa3_runtime.cli.machine import Gpus
from sa3_runtime.view import size

__all__ = ["cuda", "driver", "models", "onnxruntime", "tensorrt"]

_CUDA = (
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)
_FLAVOURS = {  # package whose version is that of the library: flavour
    "tensorrt-cu13": "tensorrt",
    "tensorrt-cu12": "tensorrt",
    "tensorrt": "tensorrt",
    "tensorrt-rtx-cu13-bindings": "tensorrt-rtx",
    "tensorrt-rtx": "tensorrt-rtx",
}


def driver(gpus: Gpus) -> Iterator[Check]:
    """The driver against what is needed; each card."""
    if not gpus.cards:
        yield Check("gpu", "OK", f"none: everything runs on the CPU ({gpus.trouble})")
        return
    if gpus.too_old:
        side = " on the Windows side" if "microsoft" in platform.release().lower() else ""
        said = f"{gpus.driver} is too old for the GPU, {DRIVER_LEAST} is needed: "
        update = f"update the driver{side}: https://www.nvidia.com/drivers"
        yield Check("driver", "WARN", f"{said}everything runs on the CPU", update)
    else:
        yield Check("driver", "OK", gpus.driver)
    for index, card in enumerate(gpus.cards):
        said = f"{card.name}, {card.architecture or 'capability unknown'}"
        if card.total:
            said += f", {size(card.free)} of {size(card.total)} free"
        said += ", MIG is on" if card.mig else ""
        yield Check(f"gpu {index}", "OK", said)
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and not gpus.visible:
        said = f"CUDA_VISIBLE_DEVICES='{chosen}' hides every GPU"
        yield Check("gpu", "WARN", said, "unset it")


def cuda(gpus: Gpus) -> Iterator[Check]:
    """The driver's library and the packages around it."""
    here = [f"{name} {found}" for name in _CUDA if (found := installed(name))]
    if not gpus.cards:
        if here:
            yield Check("cuda", "OK", f"{', '.join(here)}; no GPU to use them")
        return
    try:
        CDLL("libcuda.so.1")
    except OSError:
        said = "the driver's libcuda.so.1 is not found"
        yield Check("cuda", "FAIL", said, "in a container, start it with --gpus all")
        return
    if not gpus.usable:
        if here:
            yield Check("cuda", "OK", f"{', '.join(here)}; no GPU that may be used")
        return
    needed = ("cuda-bindings", "cuda-core")
    if all(installed(name) for name in needed) and any("nvrtc" in entry for entry in here):
        yield Check("cuda", "OK", ", ".join(here))
    else:
        said = f"packages of the GPU are missing (here: {', '.join(here) or 'none'})"
        yield Check("cuda", "WARN", said, "./install.sh")


def tensorrt(gpus: Gpus) -> Iterator[Check]:
    """Flavours of TensorRT, and whether published engines load."""
    found = _tensorrt_here()
    for flavour, version in found.items():
        said = f"{flavour} {version}"
        built_for = catalogue.catalogue().tensorrt
        if flavour == "tensorrt" and _minor(version) != _minor(built_for):
            said += f"; published engines are for {built_for} and do not load in it"
        yield Check("tensorrt", "OK", said)
    if not found and gpus.usable:
        yield Check(
            "tensorrt", "WARN", "none: models run through ONNX Runtime, more slowly", "./install.sh"
        )


def _tensorrt_here() -> dict[str, str]:
    found: dict[str, str] = {}
    for package, flavour in _FLAVOURS.items():
        if (version := installed(package)) and flavour not in found:
            found[flavour] = version
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def onnxruntime(gpus: Gpus) -> Iterator[Check]:
    """ONNX Runtime and its providers."""
    names = ("onnxruntime", "onnxruntime-gpu")
    packages = [dist.name for dist in distributions() if dist.name in names]
    if not packages:
        yield Check("onnxruntime", "FAIL", "not installed", "./install.sh")
        return
    if len(packages) > 1:
        said = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other"
        yield Check("onnxruntime", "WARN", said, "rm -rf .venv && ./install.sh")
    import onnxruntime as runtime

    providers = [name.removesuffix("ExecutionProvider") for name in _providers(runtime)]
    said = f"{runtime.__version__}: {', '.join(providers)}"
    if gpus.usable and "CUDA" not in providers:
        yield Check(
            "onnxruntime", "WARN", f"{said}; no CUDA, though there is a GPU", "./install.sh"
        )
    else:
        yield Check("onnxruntime", "OK", said)


def _providers(runtime: object) -> list[str]:
    ask: Callable[[], list[str]] = runtime.get_available_providers  # type: ignore[attr-defined]
    return ask()


def models(gpus: Gpus) -> Iterator[Check]:
    """Each model that is here, and whether its engines load on the cards that may be used."""
    found = [holding for holding in inventory.holdings() if not holding.empty]
    if not found:
        yield Check("models", "WARN", f"none in {sa3_home()}", "sa3 pull small-music")
    machines = [
        Machine(flavour, version, architecture)
        for architecture in gpus.visible
        for flavour, version in _tensorrt_here().items()
    ]
    for holding in found:
        model = holding.model
        problems = checking.glance(model)
        damaged = [entry for entry in problems if entry.path not in holding.exports]
        state = "damaged" if damaged else holding.checkpoint
        parts = [f"checkpoint {state}", f"{len(holding.exports)} exports"]
        parts += [f"{len(files)} engines for {arch}" for arch, files in holding.engines.items()]
        partial = holding.checkpoint == "partial" and not holding.engines
        yield Check(
            model.name,
            "WARN" if partial else "OK",
            f"{', '.join(parts)}, {size(holding.bytes)}",
            f"sa3 pull {model.name}" if partial else "",
        )
        for entry in problems:
            if entry not in damaged:
                yield Check(model.name, "WARN", entry.what, f"sa3 export {model.name} --force")
            elif model.embedded:
                again = f"git checkout -- {model.checkpoint}, or another copy of the project"
                yield Check(model.name, "FAIL", entry.what, again)
            else:
                yield Check(model.name, "FAIL", entry.what, f"sa3 verify {model.name} --repair")
        for arch in gpus.visible:
            if machines and gpus.usable and arch not in holding.engines:
                said = f"no engines for {arch}: it runs through ONNX Runtime"
                yield Check(model.name, "WARN", said, f"sa3 build {model.name}")
            for engine in holding.engines.get(arch, ()):
                if problem := _refusals(engine, machines):
                    yield Check(model.name, "WARN", problem, f"sa3 build {model.name}")


def _refusals(engine: Path, machines: list[Machine]) -> str | None:
    """Why no TensorRT here loads an engine; None if one does, or if there is none to ask."""
    last = None
    for machine in machines:
        try:
            check_engine(engine, machine)
        except Sa3Error as error:
            last = f"{engine.name}: {error.what}" + (f" ({error.found})" if error.found else "")
        else:
            return None
    return last
