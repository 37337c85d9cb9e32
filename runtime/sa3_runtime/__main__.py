"""`python -m sa3_runtime` and the console script `sa3`.

Knows: nothing but where the command line is.
"""

from __future__ import annotations

import sys

from sa3_runtime.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
