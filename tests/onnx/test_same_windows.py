"""Windowed coding equals one-piece coding, and the margins it needs are the measured ones.

CASES 13: context as wide as the receptive field on both sides, measured by changing what lies
beyond a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from sa3_models.checkpoint import Checkpoint
from sa3_models.config import AutoencoderConfig
from sa3_models.geometry import LATENT_LEN_MAX, SAMPLES_PER_LATENT
from sa3_models.tiny import model_config, write_checkpoint
from sa3_onnx.author import Author
from sa3_onnx.same import author_decoder, author_encoder
from sa3_runtime.windows import split

Run = Callable[[NDArray], NDArray]
LENGTHS = (1, 2, 255, 256, 257, 300, 513)
WINDOW = 64
# sizes in which the real autoencoders differ: SAME-S has an even number of blocks, SAME-L sines
FAMILIES = {
    "same-s": {"coder_depth": 6},
    "same-l": {"coder_depth": 4, "sinusoidal_blocks": 3},
}


class Coder:
    """A random autoencoder of either family, its sound above full scale as real models' is."""

    def __init__(self, folder: Path, family: str) -> None:
        config = model_config(
            family, latent_dim=8, coder_dim=64, depth=1, dim=64, heads=1, **FAMILIES[family]
        )
        write_checkpoint(folder, seed=5, config=config)
        tensors = load_file(folder / "model.safetensors")
        for side, loud in (("encoder.layers.0", 1.0), ("decoder.layers.3", 1.5)):
            tensors[f"pretransform.model.{side}.mapping.weight_g"] *= loud
        save_file(tensors, folder / "model.safetensors")
        checkpoint = Checkpoint(folder)
        self.config: AutoencoderConfig = checkpoint.config.autoencoder
        options: dict[str, Any] = {"precision": "fp32", "lowering": "operators"}
        self.encode = _run(author_encoder(checkpoint, **options), folder / "enc.onnx")
        self.decode = _run(
            author_decoder(checkpoint, limiter=False, **options), folder / "raw.onnx"
        )
        self.pcm = _run(author_decoder(checkpoint, **options), folder / "dec.onnx")


def _run(g: Author, path: Path) -> Run:
    g.save(path)
    session = ort.InferenceSession(str(path))
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: np.ascontiguousarray(x)})[0]


@pytest.fixture(scope="module", params=FAMILIES)
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Coder:
    return Coder(tmp_path_factory.mktemp(request.param), request.param)


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def in_windows(run: Run, x: NDArray, total: int, margin: int, *, axis: int, scale: int) -> NDArray:
    """Run over windows of x (last axis in or out of latents) and join what each contributes.

    axis: of time in the result. scale: its entries per latent.
    """
    per_latent = x.shape[-1] // total
    parts = []
    for w in split(total, WINDOW, margin):
        y = run(x[..., w.start * per_latent : (w.start + w.length) * per_latent])
        kept = np.arange((w.first - w.start) * scale, (w.last - w.start) * scale)
        parts.append(np.take(y, kept, axis=axis))
    return np.concatenate(parts, axis=axis)


@pytest.mark.parametrize("total", LENGTHS)
def test_windowed_sound_equals_one_piece(coder: Coder, total: int) -> None:
    latent = noise(1, 8, total)
    margin = coder.config.decode_margin() - 1  # without the limiter's latent
    whole = coder.decode(latent)
    parts = in_windows(coder.decode, latent, total, margin, axis=2, scale=SAMPLES_PER_LATENT)
    assert whole.shape == parts.shape == (1, 2, total * SAMPLES_PER_LATENT)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("total", LENGTHS)
def test_windowed_pcm_is_within_one_step_of_one_piece(coder: Coder, total: int) -> None:
    """CASES 05 (f), behind a decoder: the limiter sees the same neighbours."""
    latent = noise(1, 8, total)
    margin = coder.config.decode_margin()
    whole = coder.pcm(latent)
    parts = in_windows(coder.pcm, latent, total, margin, axis=1, scale=SAMPLES_PER_LATENT)
    assert whole.shape == parts.shape == (1, total * SAMPLES_PER_LATENT, 2)
    assert abs(whole - parts).max() <= 1
    if total > 2:
        assert abs(whole).max() > 31_500, "or the limiter had nothing to do"


@pytest.mark.parametrize("total", LENGTHS)
def test_windowed_latents_equal_one_piece(coder: Coder, total: int) -> None:
    sound = 0.3 * noise(1, 2, total * SAMPLES_PER_LATENT)
    margin = coder.config.encode_margin()
    whole = coder.encode(sound)
    parts = in_windows(coder.encode, sound, total, margin, axis=2, scale=1)
    assert whole.shape == parts.shape == (1, 8, total)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)


def reach(run: Run, x: NDArray, total: int, cut: int) -> tuple[int, int]:
    """How many latents after and before a cut change with what lies beyond it.

    Results that do not depend on it are the same to the bit: same shapes, same kernels.
    """
    at = cut * x.shape[-1] // total

    def by_latent(x: NDArray) -> NDArray:
        y = run(x)[0]
        return y.reshape(len(y), total, -1)

    whole = by_latent(x)
    after, before = x.copy(), x.copy()
    after[..., :at] *= -1
    before[..., at:] *= -1
    changed = [np.flatnonzero((by_latent(y) != whole).any(axis=(0, 2))) for y in (after, before)]
    return int(changed[0][-1]) + 1 - cut, cut - int(changed[1][0])


def test_the_receptive_field_is_what_the_margins_say(coder: Coder) -> None:
    """Neither less (windows would differ) nor more (windows would cost more than they need)."""
    total, cut = 28, 14
    config = coder.config
    decoded = reach(coder.decode, noise(1, 8, total), total, cut)
    encoded = reach(coder.encode, noise(1, 2, total * SAMPLES_PER_LATENT), total, cut)
    margin = config.decode_margin() - 1  # the limiter's latent comes on top
    if config.family == "same-s":
        assert decoded == (margin, margin) == (2, 2)
        assert encoded == (1, 1)
        assert config.encode_margin() == 2  # the next even number
    else:
        # forward one less: of the group before, a token sees those at or behind its own place,
        # and the token that would carry the last step is not among those that are kept
        assert decoded == (margin - 1, margin) == (3, config.decoder.depth)
        assert encoded == (config.encode_margin() - 1, config.encode_margin())


def test_a_window_that_starts_on_an_odd_latent_decodes_wrongly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Why windows of SAME-S start on even latents: a chunk is two of them."""
    coder = Coder(tmp_path_factory.mktemp("odd"), "same-s")
    latent = noise(1, 8, 20)
    whole = coder.decode(latent)[..., 10 * SAMPLES_PER_LATENT : 11 * SAMPLES_PER_LATENT]
    for start, right in ((4, True), (5, False)):
        first = (10 - start) * SAMPLES_PER_LATENT
        part = coder.decode(latent[:, :, start:])[..., first : first + SAMPLES_PER_LATENT]
        assert bool(abs(part - whole).max() < 1e-5) is right


def test_the_longest_sequence_ends_like_its_last_window(coder: Coder) -> None:
    latent = noise(1, 8, LATENT_LEN_MAX)
    whole = coder.decode(latent)
    assert whole.shape == (1, 2, LATENT_LEN_MAX * SAMPLES_PER_LATENT)
    margin = coder.config.decode_margin() - 1
    part = coder.decode(latent[:, :, -WINDOW:])[..., margin * SAMPLES_PER_LATENT :]
    np.testing.assert_allclose(part, whole[..., -part.shape[-1] :], rtol=0, atol=1e-5)


def test_nothing_clicks_at_a_seam(coder: Coder) -> None:
    """CASES 13: steps at seams are no larger than those elsewhere."""
    total, margin = 300, coder.config.decode_margin()
    latent = noise(1, 8, total)
    pcm = in_windows(coder.pcm, latent, total, margin, axis=1, scale=SAMPLES_PER_LATENT)
    steps = abs(np.diff(pcm[0].astype(np.int64), axis=0)).max(axis=1)
    seams = [w.last * SAMPLES_PER_LATENT - 1 for w in split(total, WINDOW, margin)[:-1]]
    assert len(seams) > 3
    # a random model's patches do not join smoothly: compare with the joints of other patches
    joints = steps[255::256]
    assert steps[seams].max() <= joints.max()
    assert np.median(steps[seams]) <= np.quantile(joints, 0.9)
