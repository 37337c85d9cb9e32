"""`sa3 generate`, and what a command line without a verb means: its flags and its help page.

Knows: flags. Doesn't know: what is done with them (run).
"""

from __future__ import annotations

import sys
from typing import Any

import click

from sa3_runtime.audio.formats import FORMAT_NAMES
from sa3_runtime.cli.common import Command, one_of, option, talkative
from sa3_runtime.cli.flags import EDIT, RUN, dialect_flags, request_flags, run_flags
from sa3_runtime.settings import gather
from sa3_runtime.view import View

__all__ = ["generate"]

OUT = "Where it goes"


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=(
        'sa3 "a warm pad, slow chords" --seconds 10',
        'sa3 generate "techno loop, 128 BPM" --seeds 1-4 -o loops/',
        'sa3 "with strings" --init-audio piano.wav --init-noise-level 0.6',
        'sa3 "a drum fill" --init-audio beat.wav --inpaint 4:6 -o fill.flac',
        "sa3 --from output/clip.wav --seed 8",
        'sa3 "rain" -o - | ffplay -',
    ),
)
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@request_flags
@option(
    "--from", "source_clip", type=click.Path(), metavar="CLIP", section=EDIT,
    help="Repeat a clip made by sa3, exactly; other flags change it.",
)  # fmt: skip
@option(
    "-o", "--out", aliases=("--output",), type=click.Path(), metavar="FILE", section=OUT,
    help="File (a bare name lands in output/), folder, or - for standard output."
    "  [default: output/MODEL-SEED-PROMPT.wav]",
)  # fmt: skip
@option(
    "--format", "form", metavar="NAME", section=OUT, shell_complete=one_of(*FORMAT_NAMES),
    help="wav, wav24, wavfloat, flac, ogg, opus or mp3.  [default: by the file name, else wav]",
)  # fmt: skip
@option("-f", "--force", is_flag=True, section=OUT, help="Overwrite what is there.")
@option("--spectrogram", is_flag=True, section=OUT, help="Also write a picture, as PNG beside it.")
@option("--play", "play_it", is_flag=True, section=OUT, help="Play each clip when it is done.")
@run_flags
@option(
    "--free-models/--no-free-models", default=False, section=RUN,
    help="Give memory back stage by stage: less memory, more loading.",
)  # fmt: skip
@option("--offline", is_flag=True, default=None, section=RUN, help="Never ask the network.")
@option("--dry-run", is_flag=True, section=RUN, help="Check everything, render nothing.")
@option("--no-input", is_flag=True, section=RUN, help="Never ask.")
@option("--yes", is_flag=True, hidden=True)
@dialect_flags
@talkative
def generate(view: View, words: tuple[str, ...], **given: Any) -> int:
    """Make a clip from a PROMPT.

    The path of the finished file is printed on standard output, everything else on standard
    error. The request is kept in the file's tags, so that --from can repeat it.
    """
    if _nothing_given() and not given["no_input"]:
        given["model"], prompt = _ask()
        words = (prompt,)
    from sa3_runtime.cli.run import Run

    return Run(view, words, given).run()


def _nothing_given() -> bool:
    """Whether the command line is empty and a person sits before it."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    names = [parameter.name for parameter in context.command.params]
    if any(context.get_parameter_source(name) is source for name in names if name):
        return False
    return _sits_there()


def _sits_there() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask() -> tuple[str, str]:
    """Let a person choose model and prompt."""
    from sa3_models.catalogue import catalogue

    models = [model for model in catalogue().models.values() if model.kind == "generator"]
    default = gather()["model"].value
    for number, model in enumerate(models, 1):
        click.echo(f"{number}  {model.name:<18} {model.summary}", err=True)
    names = [model.name for model in models]
    number = click.prompt(
        "Model",
        type=click.IntRange(1, len(models)),
        default=names.index(default) + 1 if default in names else 1,
        err=True,
    )
    prompt = click.prompt("Prompt", err=True)
    return names[number - 1], str(prompt)
