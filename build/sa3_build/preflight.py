"""Everything that would stop a build, found before its first minute is spent.

Knows: disk, memory, libraries, GPUs, operators, capabilities. Doesn't know: how to build.
Each check returns or raises; the first problem found is reported, cheapest checks first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence, Set

from sa3_build.architectures import ARCHITECTURES, Architecture
from sa3_build.engine import unsupported_operators
from sa3_build.flavours import Flavour
from sa3_build.order import Order
from sa3_models.errors import BuildFailed, UsageError
from sa3_models.files import nearest_folder
from sa3_models.memory import available_memory

__all__ = ["check_formats", "check_orders", "check_targets"]


def check_targets(flavour: Flavour, targets: Sequence[Architecture]) -> None:
    """Flavour against capability, then libraries and GPU.

    Raises:
        UsageError: the flavour has no code for a target; the message says which flavour has.
        BuildFailed: something is missing here; the message says what, and how to get it.
    """
    for target in targets:
        if flavour.name not in target.flavours:
            known = [row.name for row in ARCHITECTURES.values() if flavour.name in row.flavours]
            raise UsageError(
                f"{flavour.name} does not build for {target.name} ({target.cards})",
                found=f"it builds for {', '.join(known)}",
                hint=f"--flavour {target.flavours[0]} does, on a machine with such a GPU",
            )
    if problem := flavour.missing(targets):
        raise problem


def check_orders(orders: Sequence[Order], *, jobs: int = 1) -> None:
    """Graphs against flavour and targets, then disk and memory.

    Args:
        orders: What is left to build; all of one home.
        jobs: How many will run at once.

    Raises:
        UsageError: a number format that a target does not have.
        BuildFailed: an operator without an implementation, too little room or memory.
    """
    for order in orders:
        check_formats(order.name, order.source.dtypes, order.targets)
        if foreign := order.source.foreign_operators():
            raise BuildFailed(
                f"{order.source.path.name} needs operators that TensorRT has only with a plugin",
                found=", ".join(foreign),
                hint="export the stage from a checkpoint instead: our exports need none",
            )
        if unknown := unsupported_operators(order):
            raise BuildFailed(
                f"{order.flavour.name} has no implementation for operators of "
                f"{order.source.path.name}",
                found=", ".join(unknown),
            )
    if orders:
        _check_disk(orders)
        _check_memory(orders, jobs)


def check_formats(name: str, dtypes: Set[str], targets: Sequence[Architecture]) -> None:
    """BF16 needs sm_80, FP8 needs sm_89.

    Args:
        name: What the message calls the graph.
        dtypes: Element types in it: asked of the graph itself, once there is one.
        targets: Architectures it is to run on.

    Raises:
        UsageError: a target lacks a number format that the graph uses.
    """
    formats = {
        "BF16": ("bfloat16" in dtypes, [row for row in targets if not row.bf16], "sm_80"),
        "FP8": (
            any(dtype.startswith("float8") for dtype in dtypes),
            [row for row in targets if not row.fp8],
            "sm_89",
        ),
    }
    for label, (used, without, least) in formats.items():
        if used and without:
            raise UsageError(
                f"{name} is in {label}, which {', '.join(row.name for row in without)} "
                "does not have",
                found=f"{label} needs {least} or newer",
                hint="leave that target out, or give --precision fp16",
            )


def _check_disk(orders: Sequence[Order]) -> None:
    home = orders[0].home
    folder = nearest_folder(home)
    if not os.access(folder, os.W_OK):
        raise BuildFailed(f"nothing can be written to {folder}", hint="set SA3_HOME elsewhere")
    needed, free = sum(order.disk_bytes() for order in orders), shutil.disk_usage(folder).free
    if needed > free:
        raise BuildFailed(
            f"the engines need about {needed / 1e9:.1f} GB of disk",
            found=f"{free / 1e9:.1f} GB are free in {folder}",
            hint="make room, or set SA3_HOME to a larger disk",
        )


def _check_memory(orders: Sequence[Order], jobs: int) -> None:
    largest = sorted((order.estimate()[1] for order in orders), reverse=True)[:jobs]
    needed, free = sum(largest), available_memory()
    if free is not None and needed > free:
        raise BuildFailed(
            f"the build needs about {needed / 1e9:.1f} GB of memory",
            found=f"{free / 1e9:.1f} GB are available",
            hint="close other programs"
            + (f", or build one stage at a time (--jobs 1 instead of {jobs})" if jobs > 1 else ""),
        )
