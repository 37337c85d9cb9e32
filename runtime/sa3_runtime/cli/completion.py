"""`sa3 completion`: print the completion script of a shell.

Knows: click's scripts. Doesn't know: verbs (the script asks the program itself).
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sa3_runtime.cli.common import Command

__all__ = ["completion"]

COMPLETE_VARIABLE = "_SA3_COMPLETE"


@click.command(
    cls=Command,
    examples=(
        "sa3 completion bash > ~/.local/share/bash-completion/completions/sa3",
        "sa3 completion zsh > ~/.zfunc/_sa3        (a folder of $fpath)",
        "sa3 completion fish > ~/.config/fish/completions/sa3.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes verbs, options and file names in SHELL."""
    from sa3_runtime.cli.app import sa3

    kind = get_completion_class(shell)
    if kind is None:  # click knows all three
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(sa3, {}, "sa3", COMPLETE_VARIABLE).source())
