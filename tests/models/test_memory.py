"""What the system says about memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sa3_models.memory import available_memory, peak_resident, resident

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
