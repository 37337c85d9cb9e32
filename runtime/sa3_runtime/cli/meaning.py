"""What the flags of a request mean, as `Request`s.

Flags of the published tools that have no meaning here are accepted with a note; those that
contradict the request, or ask for what the model's decoder can't do, are refused. Knows: parameter
names of sa3_runtime.cli.flags. Doesn't know: files of sound, sessions.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sa3_models.errors import UsageError
from sa3_runtime.request import Request
from sa3_runtime.view import View

if TYPE_CHECKING:
    from sa3_models.catalogue import Model

__all__ = [
    "check_ceiling",
    "check_names",
    "clean",
    "precision_of",
    "requests_of",
    "seeds_of",
    "translate_dialect",
]

CLIPS_MAX = 10_000  # of one command
FIELDS = (  # flags that are fields of a Request, by the same name
    "negative_prompt", "steps", "cfg", "apg", "rescale", "sampler", "schedule", "headroom",
    "init_noise_level", "limiter_ceiling",
)  # fmt: skip


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


def check_names(request: Request) -> None:
    """Refuse samplers and schedules there are not."""
    from sa3_runtime.samplers import SAMPLERS
    from sa3_runtime.schedules import SCHEDULES

    for what, name, known in (
        ("sampler", request.sampler, SAMPLERS),
        ("schedule", request.schedule, SCHEDULES),
    ):
        if name is not None and name not in known:
            raise UsageError(f"unknown {what}", found=name, hint=", ".join(known))


def check_ceiling(request: Request, model: Model, device: str) -> None:
    """Refuse a ceiling that the decoder's limiter does not take.

    Only the CPU's decoder is known before it is loaded, and only if it is here already.

    Raises:
        UsageError: its ceiling is fixed.
        ArtefactMissing: its file is damaged.
    """
    if request.limiter_ceiling is None or device != "cpu" or not model.checkpoint.is_dir():
        return
    from sa3_models.onnx_file import read_onnx
    from sa3_models.stages import Stage
    from sa3_runtime.bundle import find_bundle
    from sa3_runtime.record import word_of

    decoder = find_bundle(word_of(model)).onnx_file(Stage.DECODER, "fp32")
    if decoder is None:
        return
    io = read_onnx(decoder).io
    if io.output("pcm") is not None and io.input("limiter_ceiling") is None:
        raise UsageError(
            "this decoder's limiter has a fixed ceiling",
            hint="export it with --ceiling-input, or leave --limiter-ceiling out",
        )
