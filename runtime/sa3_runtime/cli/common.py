"""What verbs share: options with hidden aliases, grouped help, the switches every verb has.

Knows: click. Doesn't know: a particular verb. Imports nothing heavy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from sa3_runtime.view import View

__all__ = ["Command", "Option", "model_names", "one_of", "option", "talkative"]

TALK = "Output for people and scripts"

F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """An option with a section for the help page, and aliases that work but are not shown."""

    def __init__(
        self,
        declarations: list[str],
        *,
        section: str = "",
        aliases: tuple[str, ...] = (),
        **kw: Any,
    ) -> None:
        self.section = section
        self.aliases = frozenset(word for alias in aliases for word in alias.split("/"))
        names = [word for word in declarations if not word.startswith("-")]
        if not names:  # click would take the longest of all spellings, aliases included
            longest = max(declarations, key=len).split("/")[0]
            names = [longest.strip("-").replace("-", "_")]
        spellings = [word for word in declarations if word.startswith("-")]
        super().__init__([*names, *spellings, *aliases], **kw)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The line of the help page, canonical names only."""
        opts, secondary = self.opts, self.secondary_opts
        self.opts = [word for word in opts if word not in self.aliases]
        self.secondary_opts = [word for word in secondary if word not in self.aliases]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts, self.secondary_opts = opts, secondary

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The canonical name alone."""
        return next(word for word in self.opts if word.startswith("--"))


def one_of(*choices: str) -> Callable[..., list[CompletionItem]]:
    """Completion from a list of words, for options that check their value themselves."""

    def complete(
        ctx: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in choices if word.startswith(incomplete)]

    return complete


def model_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completion with the catalogue's names, and with folders where it looks like a path."""
    from sa3_models.catalogue import names

    found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


option = functools.partial(click.option, cls=Option)


class Command(click.Command):
    """A command whose help page is grouped by section and ends with examples."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list per section, in order of first appearance."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                section = getattr(parameter, "section", "") or TALK
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are, one a line."""
        if self.examples:
            formatter.write_paragraph()
            formatter.write_heading("Examples")
            for line in self.examples:
                formatter.write(f"  {line}\n")


def talkative(function: F) -> F:
    """Add --json, --quiet, --verbose and --no-color; the function gets them as a `view`."""

    @functools.wraps(function)
    def wrapped(
        *args: Any, as_json: bool, quiet: bool, verbose: bool, no_color: bool, **kw: Any
    ) -> Any:
        view = View(quiet=quiet, verbose=verbose, json=as_json, colour=not no_color)
        return function(*args, view=view, **kw)

    decorators = (
        option("--json", "as_json", is_flag=True, section=TALK, help="One JSON object per result."),
        option("-q", "--quiet", is_flag=True, section=TALK, help="No notes, no progress."),
        option("-v", "--verbose", is_flag=True, section=TALK, help="Details, and tracebacks."),
        option("--no-color", is_flag=True, section=TALK, help="No colours (also NO_COLOR=1)."),
    )
    for decorate in reversed(decorators):
        wrapped = decorate(wrapped)
    return wrapped  # type: ignore[return-value]
