"""The flags of a request, in both published dialects, and what they mean as `Request`s.

Canonical names are shown; the spellings of the published TensorRT and PyTorch tools are accepted
beside them, so that a line pasted from either works. Flags of theirs that have no meaning here are
accepted with a note; those that contradict the request are refused. Doesn't know: files of sound,
sessions.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from sa3_models.errors import UsageError
from sa3_runtime.cli.common import model_names, one_of, option
from sa3_runtime.request import Request
from sa3_runtime.view import View

__all__ = [
    "EDIT",
    "RUN",
    "clean",
    "dialect_flags",
    "precision_of",
    "request_flags",
    "requests_of",
    "run_flags",
    "seeds_of",
    "translate_dialect",
]

F = TypeVar("F", bound=Callable[..., Any])

CLIPS_MAX = 10_000  # of one command
WHAT, HOW, EDIT = "What to make", "How to make it", "Editing a sound"
RUN = "Where it runs"
FIELDS = (  # flags that are fields of a Request, by the same name
    "negative_prompt", "steps", "cfg", "apg", "rescale", "sampler", "schedule", "headroom",
    "init_noise_level", "limiter_ceiling",
)  # fmt: skip


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
        help="What to stay away from; needs --cfg above 1.",
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


def clean(text: str) -> str:
    """Text of the command line as Unicode, whatever the locale made of its bytes.

    Bytes that are not UTF-8 become the replacement character: nothing further on fails on them.
    """
    return os.fsencode(text).decode("utf-8", "replace") if _has_surrogates(text) else text


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def prompts_of(words: Sequence[str], prompts: Sequence[str]) -> list[str] | None:
    """All prompts, from the words of the command line and `--prompt`; None without any.

    Raises:
        UsageError: several words that are no prompts of their own.
    """
    if words and not prompts and len(words) > 1:
        joined = " ".join(words)
        raise UsageError(
            "the prompt needs quotes",
            found=joined,
            hint=f'sa3 "{joined}", or --prompt before each of several prompts',
        )
    numbers = [word for word in words if prompts and _is_number(word)]
    if numbers:  # --duration 30 20 of the PyTorch tool
        raise UsageError(
            "a list of lengths, one per clip, is not understood",
            found=" ".join(numbers),
            hint="give one --seconds, or write the requests to a file for sa3 batch",
        )
    given = [clean(text) for text in (*prompts, *words)]
    if given.count("-") > 1:
        raise UsageError("only one prompt can be read from standard input")
    if "-" in given:
        text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
        given[given.index("-")] = text.replace("\0", " ")
    return given or None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def seeds_of(text: str) -> list[int]:
    """The seeds that "1-8,11" means.

    Raises:
        UsageError: not numbers and ranges, or too many.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError("seeds are numbers and ranges", found=text, hint="as in 1-8,11")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low >= CLIPS_MAX or len(seeds) >= CLIPS_MAX:
            raise UsageError("that range of seeds makes no sense", found=part.strip())
        seeds += range(low, high + 1)
    return seeds


def requests_of(flags: Mapping[str, Any], words: Sequence[str], base: Request) -> list[Request]:
    """The requests that the flags mean, one per clip, seeds chosen where clips share one.

    Args:
        flags: of `request_flags`, by parameter name; None or () where not given.
        words: prompts without a flag.
        base: what holds where no flag is given: an empty request, or that of `--from`.

    Raises:
        UsageError: a value out of range, or flags that contradict each other.
    """
    changes: dict[str, Any] = {key: flags[key] for key in FIELDS if flags[key] is not None}
    if "negative_prompt" in changes:
        changes["negative_prompt"] = clean(changes["negative_prompt"])
    if flags["seconds"] is not None:
        changes["seconds"] = flags["seconds"]
    if flags["chunking"] is not None:
        changes["chunking"] = "on" if flags["chunking"] else "off"
    if flags["init_audio"] is not None:
        changes["init_audio"] = flags["init_audio"]
    if flags["inpaint"]:
        changes["inpaint"] = tuple(_range_of(text) for text in flags["inpaint"])
    if flags["no_paste"]:
        changes["paste"] = False
    prompts = prompts_of(words, flags["prompts"]) or [base.prompt]
    if flags["seed"] is not None and flags["seeds"] is not None:
        raise UsageError("--seed and --seeds contradict each other")
    batch = 1 if flags["batch"] is None else flags["batch"]
    if batch < 1:
        raise UsageError("--batch must be at least 1", found=str(batch))
    seeds: list[int | None] = [base.seed if flags["seed"] is None else flags["seed"]]
    if flags["seeds"] is not None:
        seeds = [*seeds_of(flags["seeds"])]
    if len(prompts) * len(seeds) * batch > CLIPS_MAX:
        raise UsageError(f"more than {CLIPS_MAX:,} clips in one command", hint="sa3 batch")
    requests = []
    for prompt in prompts:
        for seed in seeds:
            if batch > 1 and seed in (None, -1):
                seed = secrets.randbits(32)
            for index in range(batch):
                clip = base.clip if flags["batch"] is None else index
                made = {**changes, "prompt": prompt, "seed": seed, "clip": clip}
                requests.append(replace(base, **made))
    return requests


def _range_of(text: str) -> tuple[float, float]:
    """A pair of seconds from 2:5, 2,5 or 2-5."""
    for sign in (":", ",", "-"):
        first, found, last = text.partition(sign)
        if found:
            try:
                return float(first or 0), float(last)
            except ValueError:
                break
    raise UsageError("an inpaint range is START:END in seconds", found=text, hint="as in 2.5:4")


def translate_dialect(given: Mapping[str, Any], autoencoder: str, view: View) -> dict[str, Any]:
    """Fold the flags of the published tools into ours.

    Args:
        given: of `request_flags` and `dialect_flags`; a changed copy is returned.
        autoencoder: catalogue name of the model's own autoencoder.
        view: for the notes.

    Raises:
        UsageError: a flag that contradicts the request or asks for what there is not.
    """
    flags = dict(given)
    decoder = flags["decoder"]
    if decoder is not None and decoder.lower() != autoencoder:
        raise UsageError(
            "that decoder does not belong to the model",
            found=f"{decoder}, the model's is {autoencoder}",
            hint="leave --decoder away: it follows from --model",
        )
    if flags["lora"] or flags["lora_strength"] is not None or flags["lora_index"] is not None:
        raise UsageError("adapters (LoRA) are not supported")
    source = flags["inpaint_audio"]
    if source is not None:
        if flags["init_audio"] not in (None, source):
            raise UsageError("--init-audio and --inpaint-audio name two files")
        flags["init_audio"] = source
    starts, ends = flags["inpaint_start"], flags["inpaint_end"]
    if len(starts) != len(ends):
        raise UsageError(
            "--inpaint-start and --inpaint-end belong together",
            found=f"{len(starts)} and {len(ends)} of them",
        )
    pairs = tuple(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))
    flags["inpaint"] = (*flags["inpaint"], *pairs)
    if flags["peak_ceiling_dbfs"] is not None:
        decibels = flags["peak_ceiling_dbfs"]
        if decibels > 0:
            raise UsageError("--peak-ceiling-dbfs must be at most 0", found=f"{decibels:g}")
        if decibels > -0.2:
            view.note("note: --peak-ceiling-dbfs has no effect: the limiter stays at -0.2 dBFS")
        else:
            flags["limiter_ceiling"] = 10 ** (decibels / 20)
    for name, why in (
        ("pinned_copy", "the copy to pinned memory is part of every graph"),
        ("mega_graph", "every mode is one graph"),
        ("dec_precision", "the decoder's precision follows from the model's files"),
    ):
        if flags[name] is not None:
            view.note(f"note: --{name.replace('_', '-')} has no effect here: {why}")
    return flags


def precision_of(text: str | None, device: str, wanted: str | None, view: View) -> str | None:
    """The precision that is meant; retired names of the published tool mean fp16.

    Args:
        text: as given; None leaves it to the device.
        device: that was chosen.
        wanted: device that was asked for, None if nobody did.
        view: for the notes.

    Raises:
        UsageError: an unknown one.
    """
    if text is None:
        return None
    word = text.lower()
    if word in ("bf16", "fp16mixed"):
        view.note(f"note: --precision {word} is retired, fp16 is used")
        word = "fp16"
    if word not in ("fp32", "fp16", "fp8"):
        raise UsageError("unknown precision", found=text, hint="fp16, fp8 or fp32")
    if device == "cpu" and wanted is None and word != "fp32":
        # a line that was written for a GPU; asking for both is the device's to refuse
        view.note(f"note: --precision {word} is for GPUs, this machine's CPU computes in fp32")
        return None
    return word
