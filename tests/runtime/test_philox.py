from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sa3_runtime.philox import normal_noise, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter: list[int], key: tuple[int, int], words: str) -> None:
    out = philox4x32(np.array([counter], np.uint32), key)
    assert " ".join(f"{word:08x}" for word in out[0]) == words


def test_noise_is_the_documented_function_of_its_counter() -> None:
    """One number by hand, in float64: element (channel 5, frame 3) of 8 channels."""
    seed, draw, clip, channels, channel, frame = 0x1234_5678_9ABC_DEF0, 2, 7, 8, 5, 3
    element = frame * channels + channel
    counter = np.array([[element // 4, draw, clip, 0]], np.uint32)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[0].astype(np.int64)
    u = ((words >> 8) + 0.5) * 2.0**-24
    pair = 2 * ((element % 4) // 2)
    radius, angle = np.sqrt(-2 * np.log(u[pair])), 2 * np.pi * u[pair + 1]
    expected = radius * (np.sin(angle) if element % 2 else np.cos(angle))
    noise = normal_noise(seed, draw, channels, 10, clip=clip)
    assert noise.shape == (1, channels, 10)
    assert noise[0, channel, frame] == np.float32(expected)


def test_a_longer_render_keeps_the_noise_of_its_beginning() -> None:
    long = normal_noise(42, 0, 256, 500)
    for frames in (1, 2, 33, 499):
        np.testing.assert_array_equal(normal_noise(42, 0, 256, frames), long[..., :frames])


def test_every_seed_draw_and_clip_has_noise_of_its_own() -> None:
    """CASES 56: 1 and 1 + 2³² must not give the same piece."""
    seeds = (0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1)
    hashes = {normal_noise(seed, 0, 32, 8).tobytes() for seed in seeds}
    hashes |= {normal_noise(1, draw, 32, 8).tobytes() for draw in (1, 2, 8)}
    hashes |= {normal_noise(1, 0, 32, 8, clip=clip).tobytes() for clip in (1, 2)}
    assert len(hashes) == len(seeds) + 5


def test_noise_of_seed_42_never_changes() -> None:
    """CASES 34: rounded to 1e-4, so that the last bit of a platform's cosine doesn't count."""
    rounded = np.rint(normal_noise(42, 0, 256, 16) * 1e4).astype(np.int32)
    digest = hashlib.sha256(rounded.astype("<i4").tobytes()).hexdigest()
    assert digest[:16] == "87f651c322c56cfd"


def test_numbers_are_standard_normal() -> None:
    noise = normal_noise(3, 1, 256, 1024).astype(np.float64).ravel()
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)
    assert abs((noise**4).mean() - 3) < 4 * np.sqrt(96 / noise.size)
    flat = normal_noise(3, 1, 256, 1024)[0]
    assert abs((flat[:, 1:] * flat[:, :-1]).mean()) < 4 / np.sqrt(noise.size)
    assert abs((flat[1:] * flat[:-1]).mean()) < 4 / np.sqrt(noise.size)
