"""Fixtures every test may use. Helpers are not imported from here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
