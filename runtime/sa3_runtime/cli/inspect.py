"""`sa3 inspect`: what a file says of itself. Clips here, graphs and engines in the builder.

Knows: which files are sound. Doesn't know: graphs, engines (it hands those on, unseen).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from sa3_models.errors import UsageError
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.view import View, duration, program, size

__all__ = ["inspect"]

_MAGIC = (b"RIFF", b"RF64", b"BW64", b"fLaC", b"OggS", b"ID3\x03", b"ID3\x04", b"FORM", b"caff")
_SUFFIXES = (".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".au")


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    examples=(
        "sa3 inspect output/clip.wav",
        "sa3 inspect models/onnx/small-music/sa3-sm-music/dit_step_fp16.onnx",
        "sa3 inspect models/sm_90/same-s/dec_bf16_chunkable_limiter.trt",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="")
@option("--spectrogram", is_flag=True, section="Clips", help="Also write a picture beside a clip.")
@option("-f", "--force", is_flag=True, section="Clips", help="Overwrite the picture.")
@talkative
def inspect(file: Path, rest: tuple[str, ...], spectrogram: bool, force: bool, view: View) -> Any:
    """Show what FILE holds: the request in a clip, the ports of a graph or an engine."""
    if not file.exists():
        raise UsageError("there is no such file", found=str(file))
    if not file.is_dir() and _is_sound(file):
        if rest:
            raise UsageError(f"there is no option {rest[0]} for a clip", hint="sa3 inspect --help")
        return _clip(file, spectrogram, force, view)
    if spectrogram:
        raise UsageError("--spectrogram is for clips", found=str(file))
    from sa3_runtime.cli.app import Verb, load

    command = load("inspect", Verb("sa3_build.cli:inspect", ""))
    words = [str(file), *rest, *(["--json"] if view.json else [])]
    return command.main(args=words, prog_name="sa3 inspect", standalone_mode=False)


def _is_sound(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return head in _MAGIC or path.suffix.lower() in _SUFFIXES


def _clip(path: Path, spectrogram: bool, force: bool, view: View) -> int:
    from dataclasses import asdict

    import numpy as np

    from sa3_models.geometry import SAMPLE_RATE
    from sa3_runtime import audio
    from sa3_runtime.record import read_record

    sound = audio.read(path)
    samples = sound.samples
    tags = audio.read_tags(path)
    record = None
    with contextlib.suppress(UsageError):
        record = read_record(path)
    peak = float(np.abs(samples).max(initial=0.0))
    level = {
        "peak_dbfs": _decibels(peak),
        "rms_dbfs": _decibels(float(np.sqrt(np.mean(samples.astype(np.float64) ** 2))))
        if samples.size
        else None,
    }
    length = samples.shape[1] / SAMPLE_RATE
    picture = None
    if spectrogram:
        picture = path.with_suffix(".png")
        if picture.exists() and not force:
            raise UsageError("the picture exists already", found=str(picture), hint="--force")
        pcm = np.clip(np.round(samples.T * 32767), -32767, 32767).astype(np.int16)
        audio.save_spectrogram(picture, pcm, SAMPLE_RATE, title=tags.get("title", path.name))
    if view.json:
        view.object({
            "kind": "clip",
            "path": str(path),
            "bytes": path.stat().st_size,
            "seconds": length,
            **level,
            "tags": {key: text for key, text in tags.items() if key != "comment" or not record},
            "model": record.model if record else None,
            "device": record.device if record else None,
            "request": asdict(record.request) if record else None,
            "picture": str(picture) if picture else None,
        })  # fmt: skip
        return 0
    view.out(f"{path}: {duration(length)}, {size(path.stat().st_size)}")
    for note in sound.notes:
        view.out(f"  {note}")
    for name, value in level.items():
        view.out(
            f"  {name.replace('_dbfs', ''):<18} {'silence' if value is None else f'{value} dBFS'}"
        )
    if record is None:
        view.out("  not made by sa3: there is no request in its tags")
    else:
        view.out(f"  {'model':<18} {record.model_word}")
        if record.device:
            view.out(f"  {'device':<18} {record.device}")
        for name, value in asdict(record.request).items():
            if value is not None and value != () and value != []:
                view.out(f"  {name:<18} {value}")
        view.out(f'  repeat it: {program()} --from "{path}"')
    if picture:
        view.path(picture)
    return 0


def _decibels(amplitude: float) -> float | None:
    """Level relative to full scale, None for silence."""
    import math

    return round(20 * math.log10(amplitude), 2) if amplitude > 0 else None
