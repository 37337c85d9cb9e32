"""Which GPUs are here, and whether the driver is new enough: a driver that is only a stub."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from sa3_models import gpus
from sa3_models.gpus import CUDA_LEAST, driver_too_old


@pytest.mark.parametrize(
    ("status", "version", "too_old"),
    [(0, 12080, True), (0, CUDA_LEAST, False), (0, 13010, False), (3, 0, False)],
)
def test_a_driver_is_too_old_by_the_cuda_it_brings(status, version, too_old, monkeypatch):
    def answer(pointer) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = version
        return status

    stub = SimpleNamespace(cuDriverGetVersion=answer)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: stub)
    assert driver_too_old() == too_old


def test_no_driver_is_not_too_old(monkeypatch):
    def absent(name: str):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", absent)
    assert not driver_too_old()
