"""The float64 twins against the reference's goldens: what the exporters are held against is right.

Their distance to the goldens is the float32 noise of the reference itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint
from sa3_models.geometry import SAMPLES_PER_LATENT

from .twins import dit, layers, same, text_encoder

Arrays = dict[str, NDArray]
Golden = Callable[[str], Arrays]


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Checkpoint:
    return Checkpoint(tiny)


def test_the_text_encoder_twin_is_the_reference(checkpoint: Checkpoint, golden: Golden) -> None:
    t5, w = golden("t5"), layers.load(checkpoint.text)
    for prompt in range(3):
        ids, mask = t5["input_ids"][prompt], t5["attention_mask"][prompt]
        got = text_encoder.hidden_states(w, checkpoint.text_config, ids, mask)
        assert np.isfinite(got).all()
        real = mask == 1
        want = t5["last_hidden_state"][prompt][real]
        np.testing.assert_allclose(got[real], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("length", [1, 5, 131])
@pytest.mark.parametrize("t", [1.0, 0.5, 0.02])
def test_the_dit_twin_is_the_reference(
    checkpoint: Checkpoint, golden: Golden, constants: Arrays, length: int, t: float
) -> None:
    g, w, config = golden("dit"), layers.load(checkpoint.dit), checkpoint.config.dit
    locals_ = {"local_zero": np.zeros((config.latent_dim + 1, length))}
    locals_["local_mask"] = g["local_add_cond"][0, :, :length].astype(np.float64)
    seen = 0
    for name, local in locals_.items():
        want = g.get(f"velocity.L{length}.t{t}.{name}")
        if want is None:
            continue
        got = dit.velocity(
            w,
            config,
            constants["expo_freqs_dim256"],
            x=g["x"][0, :, :length].astype(np.float64),
            t=t,
            tokens=g["cross_attn_cond"][0].astype(np.float64),
            seconds_token=g["global_cond"][0].astype(np.float64),
            local=local,
        )
        np.testing.assert_allclose(got, want[0], rtol=0, atol=1e-5)
        seen += 1
    assert seen


def test_the_dit_twin_masks_values_like_the_reference(
    checkpoint: Checkpoint, golden: Golden, constants: Arrays
) -> None:
    g, padded, config = golden("dit"), golden("cfg"), checkpoint.config.dit
    valid = np.arange(64) < int(padded["padded.L64.valid"][0])
    got = dit.velocity(
        layers.load(checkpoint.dit),
        config,
        constants["expo_freqs_dim256"],
        x=g["x"][0, :, :64].astype(np.float64),
        t=0.5,
        tokens=g["cross_attn_cond"][0].astype(np.float64),
        seconds_token=g["global_cond"][0].astype(np.float64),
        local=np.zeros((config.latent_dim + 1, 64)),
        valid=valid.astype(np.float64),
    )
    np.testing.assert_allclose(got, padded["padded.L64.t0.5.cfg1"][0], rtol=0, atol=1e-5)


def test_the_features_and_the_seconds_are_the_references(
    checkpoint: Checkpoint, golden: Golden, constants: Arrays
) -> None:
    table = constants["expo_freqs_dim256"]
    for t in (1.0, 0.5, 0.02):
        want = golden("dit")[f"timestep_features.t{t}"][0]
        np.testing.assert_allclose(layers.fourier_features(t, table), want, rtol=0, atol=1e-7)
    w, g = layers.load(checkpoint.dit), golden("conditioner")
    for seconds, want in zip(g["seconds"], g["seconds_embedding"], strict=True):
        got = dit.seconds_embedding(w, checkpoint.config.dit, seconds, table)
        np.testing.assert_allclose(got, want[0], rtol=0, atol=2e-6)


def test_the_context_twin_pads_like_the_reference(
    checkpoint: Checkpoint, golden: Golden, constants: Arrays
) -> None:
    g, w, t5 = golden("dit"), layers.load(checkpoint.dit), golden("t5")
    table = constants["expo_freqs_dim256"]
    seconds = dit.seconds_embedding(w, checkpoint.config.dit, 30.0, table)
    mask = t5["attention_mask"][0].astype(np.float64)
    hidden = t5["last_hidden_state"][0].astype(np.float64)
    got = dit.context(w, hidden, mask, seconds)
    np.testing.assert_allclose(got, g["cross_attn_cond"][0], rtol=0, atol=2e-6)
    assert not dit.context(w, hidden, mask, seconds, gate=0.0).any()


def test_the_autoencoder_twin_is_the_reference(checkpoint: Checkpoint, golden: Golden) -> None:
    ae, w = golden("ae"), layers.load(checkpoint.autoencoder)
    config = checkpoint.config.autoencoder
    audio, latents = ae["audio_i16"] / 32768, ae["latents"][0].astype(np.float64)
    for length in (1, 2, 33):
        got = same.decode(w, config, latents[:, :length])
        assert got.shape == (2, length * SAMPLES_PER_LATENT)
        stride = 11 if length == 33 else 1
        want = ae[f"decode.L{length}.audio" + (".stride11" if stride > 1 else "")][0]
        got = got[:, ::stride]
        np.testing.assert_allclose(got, want[:, : got.shape[1]], rtol=0, atol=3e-6)
    for length in (1, 2, 3, 31, 32, 33):
        got = same.encode(w, config, audio[:, : length * SAMPLES_PER_LATENT])
        want = ae[f"encode.L{length}.latents"][0][:, :length]
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
