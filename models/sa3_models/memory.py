"""How much memory processes hold and could still take, as the system tells.

Knows: `/proc`, control groups, and what stands in for them elsewhere. Doesn't know: what is in the
memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory", "peak_resident", "resident", "total_memory"]

_ROOT = Path("/")


def available_memory(root: Path = _ROOT, *, swap: bool = True) -> int | None:
    """Bytes that this process can still take; None where the system does not say.

    What the machine has free, or what the control groups around this process leave of it: a
    container sees the machine's memory and is killed at its own limit.

    Args:
        root: where `proc` and `sys` are.
        swap: count the machine's free swap too.
    """
    table = _machine(root)
    free = table.get("MemAvailable", 0) + (table.get("SwapFree", 0) if swap else 0)
    return min([free, *(left for _, left in _limits(root))]) if table else None


def total_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process could take at most, without swap; None as above."""
    table = _machine(root)
    return min([table["MemTotal"], *(limit for limit, _ in _limits(root))]) if table else None


def _machine(root: Path) -> dict[str, int]:
    """The kernel's figures for the whole machine, in bytes; none where there is no such kernel."""
    try:
        return _table(root / "proc/meminfo", unit=1024)
    except OSError:
        return {}


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of every control group around this process, versions 1 and 2.

    Cached file content that the kernel drops first counts as left.
    """
    try:
        rows = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for row in rows:
        _, controllers, name = row.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # inside a container the name may be one of the host's, of which only the mount is visible
        group = mount / name.lstrip("/")
        for place in (group, *group.parents[: len(group.parts) - len(mount.parts)]):
            try:
                limit, used = ((place / file).read_text(encoding="ascii") for file in files[:2])
                cached = _table(place / "memory.stat").get(files[2], 0)
                if limit.strip() != "max":
                    yield int(limit), max(0, int(limit) - int(used) + cached)
            except (OSError, ValueError):
                continue


def _table(path: Path, unit: int = 1) -> dict[str, int]:
    """The numbers of lines like `MemTotal:  123 kB` and `inactive_file 123`, times `unit`."""
    rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) * unit for row in rows if len(row) > 1}


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
