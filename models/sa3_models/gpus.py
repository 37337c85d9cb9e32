"""Which GPUs are here, asked of the driver itself.

Knows: compute capabilities of the visible devices, the driver's CUDA. Doesn't know: CUDA beyond
that: no context is made, and a machine without a driver simply has no GPU.
"""

from __future__ import annotations

import ctypes

__all__ = ["CUDA_LEAST", "DRIVER_LEAST", "driver_too_old", "local_architectures"]

CUDA_LEAST = 13000  # what `cuDriverGetVersion` must say for a render: CUDA 13.0 …
DRIVER_LEAST = 580  # … which this driver brings
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def local_architectures() -> tuple[str, ...]:
    """Architectures of the visible GPUs in device order ("sm_86", …), each once.

    `CUDA_VISIBLE_DEVICES` is honoured, as the driver does it.
    """
    driver = _driver()
    if driver is None:
        return ()
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found: dict[str, None] = {}
    for index in range(count.value):
        parts = []
        for attribute in (_MAJOR, _MINOR):
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index):
                return ()
            parts.append(value.value)
        found[f"sm_{parts[0]}{parts[1]}"] = None
    return tuple(found)


def driver_too_old() -> bool:
    """Whether there is a driver whose CUDA is older than a render on a GPU needs."""
    driver = _driver()
    if driver is None:
        return False
    version = ctypes.c_int()
    return not driver.cuDriverGetVersion(ctypes.byref(version)) and version.value < CUDA_LEAST


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
