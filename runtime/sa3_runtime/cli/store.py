"""The verbs of the artefact store under the names the command line loads them by.

Knows: names. Doesn't know: anything else.
"""

from sa3_runtime.cli.fetch import pull
from sa3_runtime.cli.shelf import list_models as list  # noqa: A004 - the verb's name
from sa3_runtime.cli.shelf import rm, show, verify

__all__ = ["list", "pull", "rm", "show", "verify"]
