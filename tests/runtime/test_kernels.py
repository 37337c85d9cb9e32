"""Kernels without a GPU: what is launched, with which parameters, and what the twins compute."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa3_models.errors import RunFailed
from sa3_runtime.devices.cuda.compiler import source_path
from sa3_runtime.devices.cuda.driver import Allocation
from sa3_runtime.devices.cuda.launches import (
    GUIDE_BLOCKS,
    GUIDE_SCRATCH_BYTES,
    MOST_BLOCKS,
    THREADS,
    launches,
    tick,
)
from sa3_runtime.devices.cuda.recording import host_array as view
from sa3_runtime.devices.null import NullDriver
from sa3_runtime.devices.twins import TWINS
from sa3_runtime.plan import (
    Buffer,
    Combine,
    CopyOut,
    DrawNoise,
    Gather,
    Guide,
    Mask,
    Narrow,
    Paste,
    Place,
    SetTime,
)

SOURCE = source_path().read_text()
LETTERS = {"u32": "I", "u64": "Q"}
BUFFERS = {
    buffer.name: buffer
    for buffer in (
        Buffer("x", (1, 4, 9), "float32"),
        Buffer("y", (1, 4, 9), "float32"),
        Buffer("window", (1, 4, 5), "float32"),
        Buffer("keep", (1, 1, 9), "float32"),
        Buffer("rows", (1, 4, 1), "float32"),
        Buffer("local", (1, 5, 9), "float32"),
        Buffer("valid", (1, 9), "float32"),
        Buffer("t", (1,), "float32"),
        Buffer("pcm_in", (1, 40, 2), "int32"),
        Buffer("pcm", (30, 2), "int16"),
        Buffer("status", (1,), "int32"),
        Buffer("half", (1, 3, 3), "float16"),
        Buffer("coefficients", (4,), "float32"),
        Buffer("seed", (2,), "uint64"),
    )
}
STEPS = (
    Combine("y", ((0, "x"),)),
    Combine("y", ((0, "x"), (1, "y"), (2, "x"), (3, "y"))),
    DrawNoise("x", 3),
    SetTime("t", 2),
    Guide("y", "x", "y", "x", 0, 1, 2, 3),
    Guide("y", "x", "y", "x", 0, 1, 2, 3, "valid"),
    Paste("x", "keep", "y"),
    Mask("y", "x", "keep"),
    Mask("y", "x", "rows"),
    Gather("window", "x", 3),
    Place("x", "window", 2, 1, 2, 3),
    Place("local", "x", 1, 1, 0, 4),
    Narrow("pcm", "pcm_in", "status", 2, 4, 20),
    CopyOut("y", "x"),
)


def parameters_in_source() -> dict[str, str]:
    """kernel name → a letter per parameter, as kernels.cu declares them."""
    found = {}
    pattern = r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^)]*)\)'
    for name, parameters in re.findall(pattern, SOURCE):
        letters = ""
        for parameter in parameters.split(","):
            kind = parameter.rsplit(None, 1)[0].removeprefix("const ").strip()
            letters += "p" if "*" in parameter else LETTERS[kind]
        found[name] = letters
    return found


def address_of(driver: NullDriver) -> tuple[dict[str, int], list[Allocation]]:
    sizes = {n: int(np.prod(b.shape)) * np.dtype(b.dtype).itemsize for n, b in BUFFERS.items()}
    memory = {name: Allocation(driver, size) for name, size in sizes.items()}
    return {name: m.address for name, m in memory.items()}, list(memory.values())


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_launch_fits_the_kernels_declaration(step):
    """A parameter too many or of another width would be read as garbage on the GPU."""
    driver = NullDriver()
    address, _memory = address_of(driver)
    declared = parameters_in_source()
    made = list(launches(step, BUFFERS, address, 4096))
    assert made
    for launch in made:
        assert launch.signature == declared[launch.kernel]
        assert len(launch.arguments) == len(launch.signature)
        for letter, value in zip(launch.signature, launch.arguments, strict=True):
            assert 0 <= value < 2 ** {"p": 64, "I": 32, "Q": 64}[letter]
        assert 1 <= launch.grid <= MOST_BLOCKS
        assert launch.block <= 1024


def test_every_kernel_has_a_twin_and_the_tick_fits_too():
    declared = parameters_in_source()
    assert declared.keys() == TWINS.keys()
    assert tick(1, 2).signature == declared["tick"]


def test_constants_agree_with_the_source():
    assert f"#define GUIDE_BLOCKS {GUIDE_BLOCKS}" in SOURCE
    assert f"#define GUIDE_THREADS {THREADS}" in SOURCE
    assert GUIDE_SCRATCH_BYTES == GUIDE_BLOCKS * 2 * 8


def test_no_float_is_added_atomically_and_no_sum_is_left_to_the_compiler():
    """Deterministic by construction: the only atomic counts integers."""
    assert re.findall(r"atomic\w+\(([^,]+),", SOURCE) == ["status"]
    combine = SOURCE[SOURCE.index("void combine(") : SOURCE.index("out[a][b] = mask")]
    assert "__fmul_rn" in combine
    assert not re.search(r"\bb\d\[i\] [*+] |\bc\d \* ", combine)


@settings(max_examples=60, deadline=None)
@given(
    outer=st.integers(1, 4),
    inner=st.integers(1, 5),
    target=st.integers(1, 12),
    window=st.integers(1, 12),
    data=st.data(),
)
def test_placing_equals_slicing(outer, inner, target, window, data):
    length = data.draw(st.integers(1, min(target, window)))
    at = data.draw(st.integers(0, target - length))
    skip = data.draw(st.integers(0, window - length))
    buffers = {
        "target": Buffer("target", (outer, target, inner), "float32"),
        "window": Buffer("window", (outer, window, inner), "float32"),
    }
    driver = NullDriver()
    memory = {n: Allocation(driver, 4 * int(np.prod(b.shape))) for n, b in buffers.items()}
    address = {name: m.address for name, m in memory.items()}
    arrays = {n: view(address[n], b.shape) for n, b in buffers.items()}
    rng = np.random.default_rng(0)
    for array in arrays.values():
        array[...] = rng.standard_normal(array.shape)
    expected = arrays["target"].copy()
    expected[:, at : at + length] = arrays["window"][:, skip : skip + length]
    for launch in launches(Place("target", "window", 1, at, skip, length), buffers, address, 0):
        driver.launch(launch)
    np.testing.assert_array_equal(arrays["target"], expected)


def test_rows_that_are_not_whole_words_are_refused():
    buffers = {**BUFFERS, "other": Buffer("other", (1, 3, 3), "float16")}
    address = dict.fromkeys(buffers, 0)
    with pytest.raises(RunFailed, match="32-bit"):
        list(launches(Place("half", "other", 2, 0, 0, 1), buffers, address, 0))


def test_long_buffers_get_a_grid_of_bounded_size():
    buffers = {"x": Buffer("x", (1, 2, 4096 * 4096), "float32"), "coefficients": BUFFERS["t"]}
    (launch,) = launches(Combine("x", ((0, "x"),)), buffers, dict.fromkeys(buffers, 0), 0)
    assert launch.grid == MOST_BLOCKS
