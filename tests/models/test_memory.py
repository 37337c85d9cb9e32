"""What the system says about memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sa3_models.memory import available_memory, peak_resident, resident, total_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


SLACK = 8_000_000  # the kernel counts pages in batches


def test_a_peak_stays_when_memory_is_given_back():
    size = peak_resident() - resident(os.getpid()) + 64_000_000
    before = peak_resident()
    held = bytearray(b"x") * size
    grown = peak_resident()
    assert grown > before + 64_000_000 - SLACK
    assert resident(os.getpid()) > before - SLACK
    del held
    assert peak_resident() > grown - SLACK
    assert resident(os.getpid()) < grown - 32_000_000


def test_a_small_child_of_a_large_process_is_small():
    held = bytearray(b"x") * 200_000_000
    code = "from sa3_models.memory import peak_resident; print(peak_resident())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 1_000_000 < int(done.stdout) < 100_000_000 < len(held)


def test_what_is_not_known_is_nothing_and_what_is_free_is_something():
    assert resident(None) == 0
    assert available_memory() > 1_000_000


MEMINFO = "MemTotal:  16000 kB\nMemAvailable:  8000 kB\nSwapFree:  1000 kB\nHugePages_Total: 0\n"
V1, V2 = "4:memory:{0}\n3:cpu,cpuacct:/\n0::/\n", "0::{0}\n"


def _machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root with 9,000 kB free and what its control groups say."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _v1(folder: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {cached}\n",
    }


def _v2(folder: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup{folder}"
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


FREE = 9000 * 1024


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("", {}, FREE),
        (V2.format("/"), {}, FREE),  # no memory controller
        (V2.format("/"), _v2("", "max", 5_000_000), FREE),
        (V2.format("/"), _v2("", 6_000_000, 5_000_000), 1_000_000),
        (V2.format("/"), _v2("", 6_000_000, 5_000_000, cached=400_000), 1_400_000),
        (V2.format("/"), _v2("", 6_000_000, 7_000_000), 0),
        (V2.format("/"), _v2("", 10**12, 5), FREE),  # more than the machine has
        # the tightest of the groups around it, and the host's name for a container's own group
        (V2.format("/a/b"), _v2("/a", 3_000_000, 1_000_000) | _v2("/a/b", "max", 1), 2_000_000),
        (V2.format("/docker/1f"), _v2("", 6_000_000, 5_000_000), 1_000_000),
        (V1.format("/"), _v1("", 9223372036854771712, 5), FREE),
        (V1.format("/box"), _v1("/box", 6_000_000, 5_000_000, cached=300_000), 1_300_000),
        (V1.format("/docker/1f"), _v1("", 6_000_000, 5_000_000), 1_000_000),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path, groups, files, wanted):
    assert available_memory(_machine(tmp_path, groups, files)) == wanted


def test_the_whole_is_that_of_the_container_and_swap_is_counted_on_request(tmp_path):
    assert total_memory(_machine(tmp_path / "bare", "", {})) == 16000 * 1024
    assert available_memory(tmp_path / "bare", swap=False) == 8000 * 1024
    boxed = _machine(tmp_path / "boxed", V2.format("/"), _v2("", 6_000_000, 5_000_000))
    assert total_memory(boxed) == 6_000_000


def test_without_proc_nothing_is_known(tmp_path):
    assert available_memory(tmp_path) is None
    assert total_memory(tmp_path) is None
