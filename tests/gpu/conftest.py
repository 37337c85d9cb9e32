"""GPU tests need a GPU; without one they are skipped, and nothing else is."""

from __future__ import annotations

import pytest

from sa3_models.errors import MachineMismatch


@pytest.fixture(scope="session", autouse=True)
def _a_gpu() -> None:
    from sa3_runtime.devices.cuda.bindings import CudaDriver

    try:
        CudaDriver(0).close()
    except MachineMismatch as error:
        pytest.skip(str(error))
