"""Every kernel on a real GPU against its NumPy twin, on random data, with every output poisoned."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from sa3_runtime.devices.cuda.bindings import CudaDriver
from sa3_runtime.devices.cuda.compiler import compiled_kernels
from sa3_runtime.devices.cuda.driver import Allocation, Driver, Launch
from sa3_runtime.devices.cuda.launches import GUIDE_SCRATCH_BYTES, launches
from sa3_runtime.devices.null import NullDriver
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
    Step,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDriver]:
    driver = CudaDriver(0)
    driver.load(compiled_kernels(driver.architecture))
    yield driver
    driver.close()


def execute(driver: Driver, step: Step, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run one step on copies of the arrays and give all of them back."""
    buffers = {n: Buffer(n, a.shape, str(a.dtype)) for n, a in arrays.items()}
    memory = {name: Allocation(driver, array.nbytes) for name, array in arrays.items()}
    address = {name: allocation.address for name, allocation in memory.items()}
    scratch = Allocation(driver, GUIDE_SCRATCH_BYTES)
    for name, array in arrays.items():
        driver.copy(address[name], array.ctypes.data, array.nbytes)
    driver.synchronize()
    for launch in launches(step, buffers, address, scratch.address):
        driver.launch(launch)
    results = {name: np.empty_like(array) for name, array in arrays.items()}
    for name, array in results.items():
        driver.copy(array.ctypes.data, address[name], array.nbytes)
    driver.synchronize()
    return results


def both(gpu: CudaDriver, step: Step, arrays: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    return execute(gpu, step, arrays), execute(NullDriver(), step, arrays)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def poison(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


COEFFICIENTS = np.array([1, -0.7310586, 0.3333, 1e-8, 3.7e5], np.float32)


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 256, 324), (1, 256, 4096), (1, 3, 7)])
def test_sums_agree_to_the_bit(gpu, terms, shape):
    names = ["a", "b", "c", "d"][:terms]
    arrays = {name: normal(*shape, seed=i) for i, name in enumerate(names)}
    arrays |= {"coefficients": COEFFICIENTS, "out": poison(*shape)}
    step = Combine("out", tuple((i + 1, name) for i, name in enumerate(names)))
    found, expected = both(gpu, step, arrays)
    np.testing.assert_array_equal(found["out"], expected["out"])


def test_a_sum_may_overwrite_its_operand(gpu):
    arrays = {
        "x": normal(1, 256, 97),
        "v": normal(1, 256, 97, seed=1),
        "coefficients": COEFFICIENTS,
    }
    found, expected = both(gpu, Combine("x", ((0, "x"), (1, "v"))), arrays)
    np.testing.assert_array_equal(found["x"], expected["x"])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_words(gpu, counter, key, words):
    array = np.array(counter, np.uint32)
    memory = Allocation(gpu, array.nbytes)
    gpu.copy(memory.address, array.ctypes.data, array.nbytes)
    gpu.launch(Launch("philox_words", 1, 32, "pIII", (memory.address, *key, 1)))
    gpu.copy(array.ctypes.data, memory.address, array.nbytes)
    gpu.synchronize()
    assert tuple(array.tolist()) == words


@pytest.mark.parametrize("shape", [(1, 256, 324), (1, 32, 513), (1, 6, 7), (1, 256, 1), (1, 3, 5)])
@pytest.mark.parametrize("seed", [(0, 0), (2**64 - 1, 7)])
def test_noise_is_the_cpus_to_the_last_rounding(gpu, shape, seed):
    arrays = {"noise": poison(*shape), "seed": np.array(seed, np.uint64)}
    found, expected = both(gpu, DrawNoise("noise", 3), arrays)
    np.testing.assert_array_max_ulp(found["noise"], expected["noise"], maxulp=1)
    assert np.mean(found["noise"] != expected["noise"]) < 1e-4


@pytest.mark.parametrize("frames", [1, 7, 324])
def test_selects_copy_bits_even_of_nan(gpu, frames):
    rng = np.random.default_rng(3)
    source = normal(1, 8, frames)
    source[0, ::2] = np.nan
    keep = (rng.uniform(size=(1, 1, frames)) < 0.5).astype(np.float32)
    rows = (rng.uniform(size=(1, 8, 1)) < 0.5).astype(np.float32)
    steps = {
        Paste("x", "keep", "source"): "x",
        Mask("out", "source", "keep"): "out",
        Mask("out", "source", "rows"): "out",
        Mask("source", "source", "keep"): "source",
    }
    arrays = {
        "x": normal(1, 8, frames, seed=9),
        "source": source,
        "keep": keep,
        "rows": rows,
        "out": poison(1, 8, frames),
    }
    for step, name in steps.items():
        found, expected = both(gpu, step, arrays)
        np.testing.assert_array_equal(
            found[name].view(np.uint32), expected[name].view(np.uint32), str(step)
        )


def test_windows_go_in_and_out_to_the_bit(gpu):
    arrays = {
        "latents": normal(1, 256, 97),
        "window": poison(1, 256, 32),
        "keep": normal(1, 1, 97, seed=2),
        "local": normal(1, 257, 97, seed=4),
        "audio": normal(1, 2, 9 * 4096, seed=5),
        "audio_window": poison(1, 2, 4 * 4096),
        "t": poison(1),
        "coefficients": COEFFICIENTS,
        "copy": poison(1, 256, 97),
    }
    for step in (
        Gather("window", "latents", 65),
        Gather("audio_window", "audio", 5 * 4096),
        Place("latents", "window", 2, 40, 3, 20),
        Place("local", "keep", 1, 0, 0, 1),
        Place("local", "latents", 1, 1, 0, 256),
        SetTime("t", 2),
        CopyOut("copy", "latents"),
    ):
        found, expected = both(gpu, step, arrays)
        for name in arrays:
            np.testing.assert_array_equal(
                found[name].view(np.uint32), expected[name].view(np.uint32), f"{step} {name}"
            )


def test_narrowing_clamps_and_counts(gpu):
    rng = np.random.default_rng(6)
    pcm = rng.integers(-33_000, 33_000, (1, 50_000, 2)).astype(np.int32)
    pcm[0, 1234, 1] = -(2**31)
    arrays = {
        "pcm": pcm,
        "out": np.full((60_000, 2), 77, np.int16),
        "status": np.array([5], np.int32),
    }
    found, expected = both(gpu, Narrow("out", "pcm", "status", 100, 1000, 40_001), arrays)
    np.testing.assert_array_equal(found["out"], expected["out"])
    inside = pcm[0, 1000:41_001]
    assert (
        found["status"][0]
        == expected["status"][0]
        == 5 + np.sum(np.abs(inside.astype(np.int64)) > 32_767)
    )


GUIDANCE = [
    {"t": t, "scale": s, "apg": a, "rescale": r}
    for t, (s, a, r) in itertools.product(
        (1.0, 0.02), ((1.0, 1.0, 0.0), (3.0, 1.0, 0.0), (7.0, 0.3, 0.7), (3.0, 0.0, 1.0))
    )
]


def guidance_arrays(frames: int, values: Mapping[str, float], *, padded: bool) -> dict:
    arrays = {
        "cond": normal(1, 256, frames),
        "uncond": normal(1, 256, frames, seed=1),
        "x": normal(1, 256, frames, seed=2),
        "out": poison(1, 256, frames),
        "coefficients": np.array(list(values.values()), np.float32),
    }
    if padded:
        arrays["valid"] = (np.arange(frames) < frames * 0.7)[None].astype(np.float32)
    return arrays


@pytest.mark.parametrize("values", GUIDANCE)
@pytest.mark.parametrize(("frames", "padded"), [(1, False), (97, True), (324, False), (4096, True)])
def test_guidance_agrees_to_rounding(gpu, values, frames, padded):
    arrays = guidance_arrays(frames, values, padded=padded)
    step = Guide("out", "cond", "uncond", "x", 0, 1, 2, 3, "valid" if padded else None)
    found, expected = both(gpu, step, arrays)
    scale = np.abs(expected["out"]).max()
    # the sums differ in their order alone; a std is summed in float32 by NumPy
    tolerance = 2e-5 if values["rescale"] else 3e-7
    assert np.abs(found["out"] - expected["out"]).max() <= tolerance * scale
    in_place = execute(gpu, Guide("cond", "cond", "uncond", "x", 0, 1, 2, 3, step.valid), arrays)
    np.testing.assert_array_equal(in_place["cond"], found["out"])


def test_guidance_gives_the_same_bits_every_time(gpu):
    arrays = guidance_arrays(1292, GUIDANCE[2], padded=True)
    step = Guide("out", "cond", "uncond", "x", 0, 1, 2, 3, "valid")
    first = execute(gpu, step, arrays)["out"]
    for _ in range(20):
        np.testing.assert_array_equal(execute(gpu, step, arrays)["out"], first)


def test_host_memory_is_seen_by_the_gpu(gpu):
    memory = Allocation(gpu, 4, host=True)
    counter = ctypes.c_uint32.from_address(memory.address)
    counter.value = 0
    gpu.launch(Launch("tick", 1, 1, "pI", (memory.address, 41)))
    gpu.synchronize()
    assert counter.value == 41
