"""A plan run once, with each stage in memory only between its first and its last use.

Knows: when a stage is loaded and unloaded (`--free-models`). Doesn't know: graphs, which would need
all weights at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.devices import OnProgress
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.loader import StageLoader
    from sa3_runtime.devices.cuda.recording import Recording
    from sa3_runtime.devices.cuda.stage import Call

__all__ = ["run_freeing"]


def run_freeing(
    recording: Recording,
    inputs: Mapping[str, NDArray[Any]],
    *,
    driver: Driver,
    loader: StageLoader,
    progress: OnProgress | None,
) -> None:
    """Run a recording's plan as it is, without a graph; the kernels are loaded.

    After a failure the recording is closed and no stage is loaded.
    """
    last = {stage: index for index, stage in enumerate(recording.stage_runs)}

    def call_for(stage: str, latent_len: int) -> Call:
        if stage not in loader.loaded:
            loader.load(stage, (latent_len,))
        return loader.call(stage, latent_len)

    def after(index: int) -> None:
        stage = recording.stage_runs[index]
        if last[stage] == index:
            driver.synchronize()
            recording.forget(stage)
            loader.unload(stage)
            recording.tell(progress, 0.0)

    try:
        recording.write(inputs)
        recording.enqueue(call_for, after)
        recording.wait(progress)
    except BaseException:
        recording.close()
        loader.unload_all()
        raise
