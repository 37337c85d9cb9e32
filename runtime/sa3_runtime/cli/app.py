"""The command `sa3`: its verbs by name, each imported when it is used.

Knows: which module holds which verb. Doesn't know: what a verb does, how its errors are told
(sa3_runtime.cli.ending). Imports click and nothing heavy: `sa3 --help` must be instant.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from sa3_models import __version__
from sa3_models.errors import RunFailed, UsageError
from sa3_runtime.cli.ending import ended
from sa3_runtime.settings import apply_environment
from sa3_runtime.view import View, prepare_streams

__all__ = ["main", "sa3"]


class Verb(NamedTuple):
    """Where a verb lives ("module:function"), and its line in the overview."""

    home: str
    summary: str


SECTIONS: dict[str, dict[str, Verb]] = {
    "Make sound": {
        "generate": Verb("sa3_runtime.cli.generate:generate", "make a clip, also without the verb"),
        "batch": Verb("sa3_runtime.cli.batch:batch", "make many clips from a file of requests"),
        "play": Verb("sa3_runtime.cli.play:play", "play a sound file"),
        "inspect": Verb("sa3_runtime.cli.inspect:inspect", "what a clip, graph or engine holds"),
    },
    "Models": {
        "list": Verb(
            "sa3_runtime.cli.shelf:list_models", "models there are, and what of them is here"
        ),
        "show": Verb("sa3_runtime.cli.shelf:show", "all about one model"),
        "pull": Verb("sa3_runtime.cli.fetch:pull", "download a model"),
        "verify": Verb("sa3_runtime.cli.shelf:verify", "check downloaded files"),
        "rm": Verb("sa3_runtime.cli.shelf:rm", "delete what was downloaded or made"),
    },
    "Graphs and engines": {
        "export": Verb("sa3_onnx.cli:export", "checkpoint to ONNX"),
        "build": Verb("sa3_build.cli:build", "ONNX to engines for a graphics card"),
        "compare": Verb("sa3_onnx.cli:compare", "two versions of a model, output by output"),
    },
    "This machine": {
        "bench": Verb("sa3_runtime.cli.bench:bench", "time and memory per clip length"),
        "doctor": Verb("sa3_runtime.cli.doctor:doctor", "what works here, how to repair the rest"),
        "config": Verb("sa3_runtime.cli.config:config", "settings and where they come from"),
        "completion": Verb("sa3_runtime.cli.completion:completion", "script for bash, zsh, fish"),
    },
}
VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}
_EXTRAS = {  # what to install when a verb's module asks for a package that is not there
    "sa3_onnx": "pip install 'sa3-trt[export]'",
    "sa3_build": "pip install 'sa3-trt[export]'",
    "sa3_runtime": "pip install 'sa3-trt[audio]'",
}
_GROUP_FLAGS = ("--help", "-h", "--version")
# what other tools call a verb of ours
_ELSEWHERE = {
    "run": "generate", "download": "pull", "get": "pull", "ls": "list", "models": "list",
    "info": "show", "remove": "rm", "delete": "rm", "convert": "export", "benchmark": "bench",
    "check": "doctor", "env": "doctor", "settings": "config",
}  # fmt: skip


class Verbs(click.Group):
    """The verbs of `VERBS`; anything else on the command line is a request for `generate`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of the overview."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb."""
        verb = VERBS.get(cmd_name)
        return load(cmd_name, verb) if verb else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; settings that are read from the environment are put there first."""
        name, command, rest = super().resolve_command(ctx, args)
        if name != "config":  # which shows where a setting really comes from
            apply_environment()
        return name, command, rest

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `generate` in front unless there is a verb or a flag of the group itself."""
        args = _spelt_out(args)
        known = bool(args) and (args[0] in VERBS or args[0] in _GROUP_FLAGS)
        if not known and (args or not ctx.resilient_parsing):
            if not ctx.resilient_parsing:
                _refuse_misspelt_verb(args)
            args.insert(0, "generate")
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs from the table; flags of the group and of `generate`, which needs no verb."""
        if not incomplete.startswith("-"):
            return [
                CompletionItem(name, help=verb.summary)
                for name, verb in VERBS.items()
                if name.startswith(incomplete)
            ]
        generate = load("generate", VERBS["generate"])
        inner = click.Context(generate, ctx, "generate", resilient_parsing=True)
        return [
            *super().shell_complete(ctx, incomplete),
            *generate.shell_complete(inner, incomplete),
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview by section, from the table alone: no verb is imported."""
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.summary) for name, verb in verbs.items()])
        formatter.write_paragraph()
        formatter.write_text(
            "sa3 VERB --help explains a verb; results go to stdout, talk to stderr. "
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 model or file missing or damaged, "
            "4 wrong machine for that engine, 5 export or build failed, "
            "6 some of a batch failed, 130 interrupted."
        )


_HELP = """Text to 44.1 kHz stereo sound: Stable Audio 3 without torch, on NVIDIA cards and CPUs.

\b
  sa3 "a warm pad, slow chords"
  sa3 "rain on a tin roof" --seconds 10 -o rain.flac
"""


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    options_metavar="",
    subcommand_metavar='"PROMPT" | VERB [OPTIONS]',
    help=_HELP,
)
@click.version_option(__version__, prog_name="sa3", message="%(prog)s %(version)s")
def sa3() -> None:
    """The group itself does nothing; `Verbs` runs what is asked for."""


def _spelt_out(args: Sequence[str]) -> list[str]:
    """`help`, `help VERB` and `version` as the flags they mean."""
    if list(args) in (["help"], ["version"]):
        return [f"--{args[0]}"]
    if len(args) == 2 and args[0] == "help" and args[1] in VERBS:
        return [args[1], "--help"]
    return list(args)


def load(name: str, verb: Verb) -> click.Command:
    """Import a verb's command.

    Raises:
        Sa3Error: the module, or a package it needs, is not installed.
    """
    module, _, attribute = verb.home.partition(":")
    package = module.split(".")[0]
    try:
        command = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module or module.startswith(f"{missing}."):
            raise RunFailed(f"the verb {name} is not part of this installation") from error
        if missing.split(".")[0] in _EXTRAS:
            raise
        raise RunFailed(
            f"the verb {name} needs a package that is not installed",
            found=missing,
            hint=_EXTRAS[package],
        ) from error
    except AttributeError as error:
        raise RunFailed(f"the verb {name} is not part of this installation") from error
    if not isinstance(command, click.Command):
        raise RunFailed(f"the verb {name} is not part of this installation")
    return command


def _refuse_misspelt_verb(args: Sequence[str]) -> None:
    """A single word close to a verb is more likely a slip than a prompt.

    Raises:
        UsageError: with both readings in the hint.
    """
    word = args[0] if args else ""
    if not word.isalpha() or not word.islower():
        return
    near = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.8)
    near = [verb for verb in near if verb[0] == word[0] and abs(len(verb) - len(word)) < 2]
    meant = _ELSEWHERE.get(word) or (near[0] if near else None)
    if meant:
        raise UsageError(
            f"there is no verb {word}",
            hint=f'did you mean {meant}? To make a clip of it: sa3 generate "{word}"',
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises for a foreseen reason."""
    prepare_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    view = _view_of(args)
    try:
        result = sa3.main(args=args, prog_name="sa3", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return ended(view, error)
    return result if isinstance(result, int) else 0


def _view_of(args: Sequence[str]) -> View:
    """How to talk before a verb has read its flags: needed for errors while reading them."""
    words = args[: args.index("--")] if "--" in args else args
    short = [word for word in words if word.startswith("-") and not word.startswith("--")]
    return View(
        json="--json" in words,
        verbose="--verbose" in words or "-v" in short,
        colour="--no-color" not in words,
    )
