"""The CUDA device: a plan recorded once into one CUDA graph, replayed for every request.

Knows: its own entry point. Doesn't know: anything else, so that importing it costs nothing.

    device.py    one run at a time, the recordings that are kept
    loader.py    stages and kernels: loaded side by side, ahead, unloaded
    freeing.py   a plan run once, each stage in memory only while it is used
    stage.py     what a stage on a GPU is asked for
    select.py    which file of a stage runs here
    recording.py a plan on a stream: buffers, stage calls, launches; captured or run as it is
    launches.py  steps that are no stage, as kernel launches on addresses
    layout.py    where each buffer lies in one allocation
    memory.py    what a plan needs, before anything is allocated
    driver.py    CUDA driver calls behind one gate
    compiler.py  kernels.cu to machine code, cached on disk
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sa3_runtime.bundle import Bundle
    from sa3_runtime.devices import DeviceOptions
    from sa3_runtime.devices.cuda.device import CudaDevice

__all__ = ["open_device"]


def open_device(bundle: Bundle, index: int, options: DeviceOptions) -> CudaDevice:
    """Open GPU number `index` of the visible ones for a bundle.

    Raises:
        MachineMismatch: no driver, too old a driver, no such GPU.
    """
    from sa3_runtime.devices.cuda.device import open_cuda

    return open_cuda(bundle, index, options)
