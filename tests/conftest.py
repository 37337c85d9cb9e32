"""Fixtures every test may use. Helpers are not imported from here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Golden = Callable[[str], dict[str, NDArray]]
DATA = Path(__file__).parent / "data"
TINY = ("tiny-music", "tiny-medium")


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of the test data."""
    return DATA


@pytest.fixture(scope="session", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each tiny checkpoint in the published layout: plain SAME-S, differential SAME-L."""
    return DATA / request.param


@pytest.fixture(scope="session")
def golden(tiny: Path) -> Golden:
    """Load one golden file ("dit", "ae", …) of the present tiny checkpoint as a dict of arrays."""
    from safetensors.numpy import load_file

    return lambda part: load_file(DATA / "goldens" / tiny.name / f"{part}.safetensors")


@pytest.fixture(scope="session")
def constants() -> dict[str, NDArray[np.float32]]:
    """Float32 tables that are part of the model's definition."""
    from safetensors.numpy import load_file

    return load_file(DATA / "goldens" / "constants.safetensors")


@pytest.fixture(scope="session")
def in_threads() -> Callable[..., list[Any]]:
    """Call functions at the same time: their results, errors among them, in `patience` seconds."""

    def results_of(*work: Callable[[], Any], patience: float = 60) -> list[Any]:
        results: list[Any] = [None] * len(work)
        start = threading.Barrier(len(work))

        def run(index: int) -> None:
            try:
                start.wait(patience)
                results[index] = work[index]()
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience)
            assert not thread.is_alive()
        return results

    return results_of
