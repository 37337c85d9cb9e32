"""`sa3 doctor`: what works on this machine, what does not, and the repair of each.

Knows: which checks there are, how they are shown. Doesn't know: what they look at; it repairs and
changes nothing. Every check survives a machine where nothing is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click

from sa3_models import __version__
from sa3_runtime.cli import checks, checks_gpu
from sa3_runtime.cli.checks import Check
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.cli.machine import Gpus, find_gpus
from sa3_runtime.view import View

__all__ = ["doctor", "examine"]

_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
_CHECKS: dict[str, Callable[[Gpus], Iterator[Check]]] = {
    "system": checks.system,
    "python": checks.python,
    "packages": checks.packages,
    "disk": checks.disk,
    "caches": checks.caches,
    "gpu": checks_gpu.driver,
    "cuda": checks_gpu.cuda,
    "tensorrt": checks_gpu.tensorrt,
    "onnxruntime": checks_gpu.onnxruntime,
    "models": checks_gpu.models,
}


@click.command(cls=Command, examples=("sa3 doctor", "sa3 doctor --json > report.json"))
@option("--offline", is_flag=True, section="How", help="Leave the network out.")
@talkative
def doctor(offline: bool, view: View) -> int:
    """Look at this machine: each line is OK, WARN or FAIL, with its repair.

    Made to be put into a bug report: it shows no token, no password and no user of an address.
    """
    seen = []
    for check in examine(offline=offline):
        seen.append(check)
        if not view.json:
            _show(check, view)
    failed = sum(check.status == "FAIL" for check in seen)
    if view.json:
        view.object({"sa3": __version__, "checks": [asdict(check) for check in seen]})
    else:
        warned = sum(check.status == "WARN" for check in seen)
        view.note(
            f"{len(seen)} checks, {warned} warning{'s' * (warned != 1)}, "
            f"{failed} failure{'s' * (failed != 1)}"
        )
    return 1 if failed else 0


def _show(check: Check, view: View) -> None:
    status = view.paint(f"{check.status:<4}", _COLOURS[check.status], sys.stdout)
    view.out(f"{status}  {check.name:<12} {check.said}")
    if check.repair:
        view.out(f"{'':<6}{'':<12} → {check.repair}")


def examine(*, offline: bool = False) -> Iterator[Check]:
    """All checks, in order; one that breaks becomes a warning of its own."""
    gpus = find_gpus()
    for name, look in _CHECKS.items():
        try:
            yield from look(gpus)
        except Exception as error:  # a diagnosis must not end at the first oddity
            yield Check(name, "WARN", f"could not be looked at: {type(error).__name__} {error}")
    if not offline:
        yield from checks.network()
    yield from checks.environment()
