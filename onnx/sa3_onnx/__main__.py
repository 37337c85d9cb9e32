"""`python -m sa3_onnx export …`: the exporter without the rest of the command line.

The runtime starts it in a process of its own, because it never imports exporters.
"""

from __future__ import annotations

import sys

import click

from sa3_models.errors import Sa3Error
from sa3_onnx import cli

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Checkpoints to ONNX."""


main.add_command(cli.export)
main.add_command(cli.compare)


if __name__ == "__main__":
    try:
        sys.exit(main.main(standalone_mode=False) or 0)
    except Sa3Error as error:
        click.echo(f"sa3: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("sa3: interrupted", err=True)
        sys.exit(INTERRUPTED)
