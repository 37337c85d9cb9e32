"""Which stages are loaded on a GPU: side by side, ahead of the first request, until unloaded.

Knows: the threads that load, the kernels, what loaded stages hold. Doesn't know: plans, recordings,
what a stage computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sa3_models.errors import RunFailed, Sa3Error

if TYPE_CHECKING:
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import Call, CudaStage

__all__ = ["StageLoader"]

LOADED_AHEAD = ("t5gemma", "dit_prepare", "dit_step", "dit")


class StageLoader:
    """The stages and kernels of one device, each loaded on first use.

    loaded: names of the stages that are loaded.
    """

    def __init__(
        self,
        driver: Driver,
        stages: Mapping[str, CudaStage],
        kernels: Callable[[str], bytes] | None,
    ) -> None:
        """Take stages by name, none of them loaded.

        Args:
            driver: the GPU.
            stages: by name.
            kernels: architecture → machine code; None compiles them (compiled_kernels).
        """
        self.loaded: set[str] = set()
        self._driver, self._stages = driver, stages
        self._compile = kernels
        self._ready = False  # whether the kernels are loaded
        self._longest: dict[str, int] = {}  # latents that loaded stages have been prepared for
        self._ahead: threading.Thread | None = None

    def load_ahead(self) -> None:
        """Begin to load what every render needs, in a thread that `wait` waits for.

        Does nothing where memory is too tight to load before the plan is known. A failure is left
        to the first run, which meets it again and reports it.
        """
        wanted = [name for name in LOADED_AHEAD if name in self._stages]
        weights = sum(self._stages[name].weight_bytes for name in wanted)
        if weights > self._driver.free_bytes() // 2:
            return

        def load() -> None:
            with contextlib.suppress(Sa3Error), self._driver.alone:
                self.load_all({name: set() for name in wanted})

        self._ahead = threading.Thread(target=load, name="sa3-load", daemon=True)
        self._ahead.start()

    def wait(self) -> bool:
        """Wait for what is loaded ahead; whether there was anything to wait for."""
        if self._ahead is None:
            return False
        self._ahead.join()
        self._ahead = None
        return True

    def load_all(self, lengths: Mapping[str, set[int]]) -> None:
        """Load the kernels and some stages, side by side.

        Args:
            lengths: the latent lengths that a stage will run at, by its name.

        Raises:
            Sa3Error: what the first one that failed raised, once all have ended.
        """
        with ThreadPoolExecutor(initializer=self._driver.make_current) as pool:
            jobs = [pool.submit(self.load, name, lengths[name]) for name in sorted(lengths)]
            jobs.append(pool.submit(self.load_kernels))
            errors = [error for job in jobs if (error := job.exception())]
        if errors:
            raise errors[0]

    def load_kernels(self) -> None:
        """Load the kernels, if they aren't."""
        if self._ready:
            return
        if self._compile is None:
            from sa3_runtime.devices.cuda.compiler import compiled_kernels

            self._compile = compiled_kernels
        self._driver.load(self._compile(self._driver.architecture))
        self._ready = True

    def load(self, name: str, latent_lens: Iterable[int]) -> None:
        """Load a stage, with what runs at these lengths will need."""
        self._stages[name].load(latent_lens)
        self.loaded.add(name)

    def unload(self, name: str) -> None:
        """Give a stage's memory back; its calls must be dropped before."""
        self.loaded.discard(name)
        self._longest.pop(name, None)
        self._stages[name].unload()

    def unload_all(self) -> None:
        """Unload every stage."""
        for name in tuple(self.loaded):
            self.unload(name)

    def call(self, stage: str, latent_len: int) -> Call:
        """A call of a loaded stage for one length.

        Raises:
            RunFailed: the stage isn't made for that length.
        """
        low, high = self._stages[stage].latent_range
        if not low <= latent_len <= high:
            raise RunFailed(
                f"{stage} is made for {low} to {high} latents", found=f"{latent_len} latents"
            )
        call = self._stages[stage].prepare(latent_len)
        self._longest[stage] = max(latent_len, self._longest.get(stage, 0))
        return call

    def held_bytes(self, names: Iterable[str]) -> int:
        """Device memory that those of the stages which are loaded hold, and would use again."""
        held = 0
        for name in self.loaded.intersection(names):
            stage = self._stages[name]
            held += stage.weight_bytes
            if not stage.shares_scratch and name in self._longest:  # its pool serves again
                held += stage.scratch_bytes(self._longest[name])
        return held
