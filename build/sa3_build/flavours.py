"""The two TensorRTs behind one small interface.

Knows: how each is found and loaded, what it needs from the machine, how targets are set.
Doesn't know: graphs, profiles, files. `sa3_build.engine` drives either through the part of the API
that both have (and that 10.15 and 11.4 have: tests/build/test_trt_api.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sa3_build.architectures import Architecture
from sa3_models import packages
from sa3_models.errors import BuildFailed, UsageError
from sa3_models.gpus import local_architectures
from sa3_models.sidecar import FlavourName

__all__ = ["FLAVOURS", "Flavour", "TensorRT", "TensorRTRTX", "default_flavour", "flavour_named"]


class Flavour(Protocol):
    """What a build asks of a TensorRT. Values: they travel to the build's own process."""

    @property
    def name(self) -> FlavourName:
        """As `--flavour` and the sidecar spell it."""
        ...

    def version(self) -> str | None:
        """Version of the installed package, without loading it; None when there is none."""
        ...

    def missing(self, targets: Sequence[Architecture]) -> BuildFailed | None:
        """What this machine lacks to build for `targets`: one sentence, or None."""
        ...

    def load(self) -> Any:
        """The API module.

        Raises:
            BuildFailed: the package or its libraries are missing.
        """
        ...

    def aim(self, trt: Any, config: Any, targets: Sequence[Architecture]) -> None:
        """Set the targets of a build."""
        ...

    def targets_of(self, plan_head: bytes) -> tuple[str, ...] | None:
        """Architectures a plan was compiled for, from its first 64 bytes; None if it can't say."""
        ...


_INSTALL = (  # 10.15.1.29, the version of the published engines; 11.4 builds too
    "pip install --extra-index-url https://pypi.nvidia.com -r requirements/tensorrt-cu13.txt"
)


@dataclass(frozen=True, slots=True)
class TensorRT:
    """TensorRT 10.15 (pinned) or 11: builds on the GPU that it builds for."""

    @property
    def name(self) -> FlavourName:
        """`tensorrt`."""
        return "tensorrt"

    def version(self) -> str | None:
        """Version of whichever of its packages is installed."""
        return packages.tensorrt_version("tensorrt")

    def missing(self, targets: Sequence[Architecture]) -> BuildFailed | None:
        """The package, its libraries, a GPU, or a GPU of the wanted architecture."""
        lacks = []
        if self.version() is None:
            lacks.append(f"its package ({_INSTALL})")
        else:
            try:
                self.load()
            except BuildFailed as error:
                lacks.append(f"its libraries ({error.found}; {_INSTALL})")
        here = local_architectures()
        if not here:
            lacks.append("an NVIDIA GPU with its driver")
        if lacks:
            return BuildFailed(
                f"TensorRT cannot build here, this machine lacks {' and '.join(lacks)}",
                hint="--flavour tensorrt-rtx builds without a GPU",
            )
        if elsewhere := [row.name for row in targets if row.name not in here]:
            return BuildFailed(
                f"TensorRT builds only for a GPU of this machine ({', '.join(here)}), "
                f"not for {', '.join(elsewhere)}",
                hint="build there, or ahead of time with --flavour tensorrt-rtx",
            )
        return None

    def load(self) -> Any:
        """The module `tensorrt`."""
        try:
            return packages.load_tensorrt("tensorrt")
        except ImportError as error:
            raise BuildFailed(
                "TensorRT cannot be loaded", found=str(error), hint=_INSTALL
            ) from error

    def aim(self, trt: Any, config: Any, targets: Sequence[Architecture]) -> None:
        """Nothing to set: the target is the current device."""

    def targets_of(self, plan_head: bytes) -> tuple[str, ...] | None:
        """A plan of this flavour doesn't say it in a place we know."""
        return None


_RTX_INSTALL = (  # .venv need not have a pip of its own
    "./install.sh --arch sm_86, or any RTX card's; in an environment of your own: "
    "pip install -r requirements/tensorrt-rtx.txt"
)


@dataclass(frozen=True, slots=True)
class TensorRTRTX:
    """TensorRT for RTX 1.7: builds for any listed target, on a machine without a GPU too."""

    @property
    def name(self) -> FlavourName:
        """`tensorrt-rtx`."""
        return "tensorrt-rtx"

    def version(self) -> str | None:
        """Version of the bindings."""
        return packages.tensorrt_version("tensorrt-rtx")

    def missing(self, targets: Sequence[Architecture]) -> BuildFailed | None:
        """The bindings, or the package that carries the libraries."""
        needed = (packages.RTX_BINDINGS, packages.RTX_CARRIER)
        lacks = [name for name in needed if packages.installed(name) is None]
        if lacks:
            return BuildFailed(
                f"TensorRT-RTX cannot build here, {' and '.join(lacks)} "
                f"{'are' if len(lacks) > 1 else 'is'} not installed",
                hint=_RTX_INSTALL,
            )
        return None

    def load(self) -> Any:
        """The module of its bindings."""
        if error := self.missing(()):
            raise error
        try:
            return packages.load_tensorrt("tensorrt-rtx")
        except (ImportError, OSError) as error:
            raise BuildFailed(
                "TensorRT-RTX cannot be loaded", found=str(error), hint=_RTX_INSTALL
            ) from error

    def aim(self, trt: Any, config: Any, targets: Sequence[Architecture]) -> None:
        """One plan for all targets."""
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(
                getattr(trt.ComputeCapability, f"SM{target.number}"), index
            )

    def targets_of(self, plan_head: bytes) -> tuple[str, ...] | None:
        """From the bit mask at byte 32 of the header (observed in 1.7; not documented)."""
        if plan_head[:4] != b"vtrt" or len(plan_head) < 36:
            return None
        mask = int.from_bytes(plan_head[32:36], "little")
        return tuple(name for bit, name in enumerate(_RTX_MASK) if mask >> bit & 1)


_RTX_MASK = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")  # bit 0, bit 1, …


FLAVOURS: dict[str, Flavour] = {row.name: row for row in (TensorRT(), TensorRTRTX())}


def flavour_named(name: str) -> Flavour:
    """The flavour of that name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    if name not in FLAVOURS:
        raise UsageError(f"there is no flavour '{name}'", hint=f"one of {', '.join(FLAVOURS)}")
    return FLAVOURS[name]


def default_flavour() -> Flavour:
    """TensorRT where it is installed beside a GPU, else TensorRT-RTX."""
    tensorrt = FLAVOURS["tensorrt"]
    return tensorrt if tensorrt.version() and local_architectures() else FLAVOURS["tensorrt-rtx"]
