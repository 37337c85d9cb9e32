"""How much memory processes hold and could still take, as the system tells.

Knows: `/proc`, and what stands in for it elsewhere. Doesn't know: what is in the memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["available_memory", "peak_resident", "resident"]


def available_memory() -> int | None:
    """Bytes that programs can still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    return table.get("MemAvailable", 0) + table.get("SwapFree", 0)


def resident(pid: int | None) -> int:
    """Resident memory of a process in bytes, 0 where the system does not say."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not say.

    Not `ru_maxrss` where there is better: that one starts at the parent's size, because it survives
    exec.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
