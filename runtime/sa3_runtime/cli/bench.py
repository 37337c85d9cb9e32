"""`sa3 bench`: how long clips of several lengths take on this machine.

Knows: clocks. Doesn't know: what is fast and why.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import click

from sa3_models.errors import UsageError
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.cli.flags import run_flags
from sa3_runtime.settings import gather
from sa3_runtime.view import View

__all__ = ["bench"]

WHAT = "What to measure"


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=("sa3 bench -m small-music", "sa3 bench -m demo --seconds 3,10 --repeat 1 --json"),
)
@option("-m", "--model", metavar="NAME", section=WHAT, help="Model to measure.")
@option("--seconds", metavar="3,30", default="3,10,30", section=WHAT, help="Lengths of clips.")
@option("--steps", type=int, metavar="N", section=WHAT, help="Sampling steps.")
@option("--cfg", type=float, metavar="X", section=WHAT, help="Guidance scale.")
@option(
    "--repeat", type=click.IntRange(1, 100), default=3, show_default=True, section=WHAT,
    help="Timed runs per length, after one that is not counted.",
)  # fmt: skip
@run_flags
@talkative
def bench(view: View, seconds: str, repeat: int, **given: Any) -> None:
    """Time clips of several lengths: load, first clip, and the median of the next ones."""
    from sa3_models.catalogue import resolve
    from sa3_models.memory import peak_resident
    from sa3_runtime.cli.device import device_name
    from sa3_runtime.cli.meaning import precision_of
    from sa3_runtime.record import word_of
    from sa3_runtime.request import Request
    from sa3_runtime.session import load

    settings = gather(given)
    try:
        lengths = [float(word) for word in seconds.split(",")]
    except ValueError:
        raise UsageError("--seconds is a list of lengths", found=seconds, hint="3,30") from None
    model = resolve(settings["model"].value)
    base = Request("a steady tone", seed=0, steps=given["steps"], cfg=given["cfg"])
    requests = [replace(base, seconds=length) for length in lengths]
    began = time.perf_counter()
    device = device_name(settings["device"].value)
    session = load(
        word_of(model),
        device=device,
        threads=settings["threads"].value,
        precision=precision_of(settings["precision"].value, device, settings["device"].value, view),
    )
    rows = []
    with session:
        for request in requests:
            request.resolve(session.limits)
        loaded = time.perf_counter() - began
        view.note(f"{model.name} on {session.device.description}, loaded in {loaded:.2f} s")
        if not view.json:
            view.out(f"{'seconds':>8} {'first s':>9} {'median s':>9} {'x real time':>12}")
        for request in requests:
            times = []
            for _ in range(repeat + 1):
                start = time.perf_counter()
                clip = session.render(request)
                times.append(time.perf_counter() - start)
            median = statistics.median(times[1:])
            row = {
                "seconds": clip.duration, "first": round(times[0], 4), "median": round(median, 4),
                "realtime": round(clip.duration / median, 2),
                "stages": {name: round(spent, 4) for name, spent in clip.timing.items()},
            }  # fmt: skip
            rows.append(row)
            if not view.json:
                view.out(
                    f"{clip.duration:>8.4g} {times[0]:>9.3f} {median:>9.3f} {row['realtime']:>12}"
                )
        peak = peak_resident()
        if view.json:
            view.object({
                "model": model.name, "device": session.device.description,
                "load_seconds": round(loaded, 3), "peak_rss_bytes": peak, "rows": rows,
            })  # fmt: skip
        elif peak:
            view.out(f"peak memory of this process: {peak / 1e9:.2f} GB")
