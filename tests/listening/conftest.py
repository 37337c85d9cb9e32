"""The demo model, loaded once, and what it renders as float64 [n, 2] at 44,100 Hz."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sa3_runtime import Session

Signal = NDArray[np.float64]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """The model that comes with the project, exported into a home of its own."""
    from sa3_runtime.session import load

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(tmp_path_factory.mktemp("listening")))
        with load("demo") as session:
            yield session


@pytest.fixture(scope="session")
def play(demo: Session) -> Callable[..., Signal]:
    """`play(prompt, seconds, seed, **options)`: a clip; the same one is rendered once."""

    @cache
    def render(prompt: str, seconds: float, seed: int = 1, **options: Any) -> Signal:
        clip = demo.generate(prompt, seconds=seconds, seed=seed, **options)
        sound = clip.pcm.astype(np.float64) / 32768
        sound.setflags(write=False)
        return sound

    return render


@pytest.fixture(scope="session")
def edit(demo: Session) -> Callable[..., Signal]:
    """`edit(source, prompt, seed, **options)`: a sound made from another, [n, 2] both."""

    def render(source: Signal, prompt: str, seed: int = 1, **options: Any) -> Signal:
        audio = np.ascontiguousarray(source.T, np.float32)
        clip = demo.generate(prompt, seed=seed, init_audio=audio, **options)
        return clip.pcm.astype(np.float64) / 32768

    return render
