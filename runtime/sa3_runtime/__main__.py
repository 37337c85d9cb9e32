"""`python -m sa3_runtime` and the console script `sa3`.

Knows: signals. Doesn't know: verbs.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from sa3_runtime.cli.app import main as run

__all__ = ["main"]


def main() -> int:
    """Run the command line; being terminated cleans up like being interrupted."""
    signal.signal(signal.SIGTERM, _terminated)
    return run()


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds the stack, so that half-written files are removed


if __name__ == "__main__":
    sys.exit(main())
