"""`python -m sa3_runtime` and the console script `sa3`.

Knows: signals. Doesn't know: verbs.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run the command line; being terminated cleans up like being interrupted.

    While the command line is being imported there is nothing to clean up yet: an interruption then
    ends the process without a word.
    """
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _gone)
    from sa3_runtime.cli.app import main as run

    signal.signal(signal.SIGTERM, _terminated)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    return run()


def _gone(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds the stack, so that half-written files are removed


if __name__ == "__main__":
    sys.exit(main())
