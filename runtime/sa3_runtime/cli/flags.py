"""The flags of a request, in both published dialects.

Canonical names are shown; the spellings of the published TensorRT and PyTorch tools are accepted
beside them, so that a line pasted from either works. Knows: names, help, completion. Doesn't know:
what they mean (sa3_runtime.cli.meaning).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sa3_runtime.cli.common import model_names, one_of, option

__all__ = ["EDIT", "RUN", "dialect_flags", "request_flags", "run_flags"]

F = TypeVar("F", bound=Callable[..., Any])

WHAT, HOW, EDIT = "What to make", "How to make it", "Editing a sound"
RUN = "Where it runs"


def request_flags(function: F) -> F:
    """Add every flag that describes a clip."""
    for decorate in reversed(_REQUEST):
        function = decorate(function)
    return function


def run_flags(function: F) -> F:
    """Add the flags that say where a request runs."""
    for decorate in reversed(_RUN):
        function = decorate(function)
    return function


def dialect_flags(function: F) -> F:
    """Add the flags of the published tools that have no counterpart of their own here."""
    for decorate in reversed(_DIALECT):
        function = decorate(function)
    return function


_REQUEST = (
    option(
        "-m", "--model", aliases=("--dit",), metavar="NAME", section=WHAT,
        shell_complete=model_names,
        help="A name of `sa3 list`, or a checkpoint directory.  [default: demo]",
    ),
    option(
        "-p", "--prompt", "prompts", multiple=True, metavar="TEXT", section=WHAT,
        help="What to play; - reads it from standard input. Repeat for more clips.",
    ),
    option(
        "-n", "--negative-prompt", metavar="TEXT", section=WHAT,
        help="What to stay away from; needs --cfg other than 1.",
    ),
    option(
        "--seconds", aliases=("--duration", "-d"), metavar="S", section=WHAT,
        help="Length of the clip.  [default: the model's, or that of the init audio]",
    ),
    option(
        "--seed", aliases=("-s",), type=int, metavar="N", section=WHAT,
        help="0 to 2^64-1; the same seed gives the same sound.  [default: random, reported]",
    ),
    option("--seeds", metavar="1-8", section=WHAT, help="One clip per seed, as in 1-8,11."),
    option(
        "--batch", aliases=("--batch-size",), type=int, metavar="N", section=WHAT,
        help="N variations of each seed.",
    ),
    option(
        "--steps", aliases=("--num-inference-steps",), type=int, metavar="N", section=HOW,
        help="Sampling steps.  [default: the model's, 8 or 50]",
    ),
    option(
        "--cfg", aliases=("--cfg-scale",), type=float, metavar="X", section=HOW,
        help="Guidance: how closely to follow the prompt, 1 = off.  [default: the model's]",
    ),
    option(
        "--apg", type=float, metavar="X", section=HOW,
        help="Share of guidance across the present sound, 0 to 1; with --cfg.",
    ),
    option(
        "--rescale", type=float, metavar="X", section=HOW,
        help="Bring guided steps back to the level of unguided ones, 0 to 1; with --cfg.",
    ),
    option(
        "--sampler", metavar="NAME", section=HOW,
        shell_complete=one_of("pingpong", "euler", "rk4", "dpmpp"),
        help="pingpong, euler, rk4 or dpmpp.  [default: the model's]",
    ),
    option(
        "--schedule", metavar="NAME", section=HOW,
        shell_complete=one_of("logsnr", "full", "full_sine", "flux", "none"),
        help="logsnr, full, full_sine, flux or none.  [default: the model's]",
    ),
    option(
        "--headroom", type=float, metavar="S", section=HOW,
        help="Seconds rendered beyond the end and cut off; the reference takes 6.",
    ),
    option(
        "--limiter-ceiling", type=float, metavar="X", section=HOW,
        help="Peak of the output, up to 1; for decoders built with that input.",
    ),
    option(
        "--chunking/--no-chunking", aliases=("--chunked-decode/--no-chunked-decode",),
        default=None, section=HOW,
        help="Decode in windows, or in one piece.  [default: what the device finds best]",
    ),
    option(
        "--init-audio", type=click.Path(), metavar="FILE", section=EDIT,
        help="Start from this sound: WAV, FLAC, OGG, MP3, any rate and channel count.",
    ),
    option(
        "--init-noise-level", type=float, metavar="X", section=EDIT,
        help="How far to go from it: 0.01 (stay) to 1.  [default: 0.7]",
    ),
    option(
        "--inpaint", "inpaint", aliases=("--inpaint-range",), multiple=True, metavar="START:END",
        section=EDIT,
        help="Seconds to make anew, keeping the rest; repeatable. Behind the end: continue.",
    ),
    option(
        "--no-paste", is_flag=True, section=EDIT,
        help="Let the kept parts drift, as the reference does.",
    ),
)  # fmt: skip

_RUN = (
    option(
        "--device", metavar="NAME", section=RUN, shell_complete=one_of("cpu", "cuda"),
        help="cpu, cuda or cuda:N, among the visible ones.  [default: cuda if there is one]",
    ),
    option(
        "--precision", metavar="NAME", section=RUN, shell_complete=one_of("fp16", "fp8", "fp32"),
        help="fp16, fp8 or fp32.  [default: by device]",
    ),
    option(
        "--threads", type=click.IntRange(1, 1024), metavar="N", section=RUN,
        help="CPU threads.  [default: the cores this process may use]",
    ),
)  # fmt: skip

_DIALECT = (
    option("--decoder", hidden=True),
    option("--dec-precision", hidden=True),
    option("--pinned-copy/--no-pinned-copy", default=None, hidden=True),
    option("--mega-graph/--no-mega-graph", default=None, hidden=True),
    option("--models-dir", hidden=True),
    option("--inpaint-audio", hidden=True),
    option("--inpaint-start", type=float, multiple=True, hidden=True),
    option("--inpaint-end", type=float, multiple=True, hidden=True),
    option("--no-half", is_flag=True, hidden=True),
    option("--peak-ceiling-dbfs", type=float, hidden=True),
    option("--lora", "lora", aliases=("--lora-ckpt-path",), multiple=True, hidden=True),
    option("--lora-strength", "lora_strength", type=float, hidden=True),
    option("--lora-index", "lora_index", type=int, hidden=True),
)
