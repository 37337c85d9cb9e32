"""The torch definitions against the reference's goldens (kept outside this repository).

Run: SA3_GOLDENS=… python -m pytest tools/demo_model/test_goldens.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402  (needs torch)
from tools.demo_model.model import Sizes, StableAudio  # noqa: E402
from tools.demo_model.text import TextEncoder  # noqa: E402

GOLDENS = Path(os.environ.get("SA3_GOLDENS", "")) / "tiny-music"
pytestmark = pytest.mark.skipif(
    not os.environ.get("SA3_GOLDENS"), reason="SA3_GOLDENS does not name the goldens' folder"
)
SIZES = Sizes(
    latent_dim=32,
    ae_dim=128,
    ae_encoder_depth=2,
    ae_decoder_depth=2,
    dim=128,
    depth=2,
    ff_mult=4,
    memory_tokens=64,
    cond_dim=64,
    text_layers=2,
    text_heads=2,
    text_mlp=128,
    vocab=512,
)


@pytest.fixture(scope="module")
def model() -> StableAudio:
    built = StableAudio(SIZES)
    built.load_state_dict(load_file(GOLDENS / "model.safetensors"), strict=True)
    built.dit.frequencies = load_file(GOLDENS.parent / "constants.safetensors")[
        "expo_freqs_dim256"
    ].reshape(-1)
    return built.eval()


@pytest.mark.parametrize("length", [5, 64])
@torch.no_grad()
def test_velocity(model: StableAudio, length: int) -> None:
    golden = load_file(GOLDENS / "golden_dit.safetensors")
    got = model.dit(
        golden["x"][..., :length],
        torch.tensor([0.5]),
        golden["cross_attn_cond"],
        golden["global_cond"],
        golden["local_add_cond"][..., :length],
    )
    want = golden[f"velocity.L{length}.t0.5.local_mask"]
    assert (got - want).abs().max() < 2e-5


@torch.no_grad()
def test_short_context_is_the_same_function(model: StableAudio) -> None:
    golden = load_file(GOLDENS / "golden_conditioner.safetensors")
    x = load_file(GOLDENS / "golden_dit.safetensors")["x"][..., :8]
    tokens, seconds = golden["case0.cross_attn_cond"], golden["case0.global_cond"]
    count = int(golden["prompt_mask"][0].sum())
    mask = torch.ones(1, count + 3)
    mask[:, count:] = 0
    local = torch.zeros(1, 33, 8)
    time = torch.tensor([0.7])
    context, bias = model.context(tokens[:, : count + 3], mask, seconds)
    short = model.dit(x, time, context, seconds, local, None, bias)
    full = model.dit(x, time, tokens, seconds, local)
    assert (short - full).abs().max() < 2e-5
    assert torch.allclose(model.seconds_vector(golden["case0.seconds"].reshape(1)), seconds,
                          atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 3])
@torch.no_grad()
def test_codec(model: StableAudio, length: int) -> None:
    golden = load_file(GOLDENS / "golden_ae.safetensors")
    got = model.autoencoder.decode(golden["latents"][..., :length])
    want = golden[f"decode.L{length}.audio"][..., : length * 4096]
    assert (got - want).abs().max() < 1e-5
    audio = golden["audio_i16"].float()[None, :, : length * 4096] / 32768
    latents = model.autoencoder.encode(audio)
    want = golden[f"encode.L{length}.latents"][..., :length]
    assert (latents - want).abs().max() < 1e-5


@torch.no_grad()
def test_text_encoder() -> None:
    folder = GOLDENS / "t5gemma-b-b-ul2"
    config = json.loads((folder / "config.json").read_text())["encoder"]
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    state = load_file(folder / "model.safetensors")
    encoder = TextEncoder(SIZES)
    encoder.load_state_dict({k: v for k, v in state.items() if k.startswith("model.encoder")})
    golden = load_file(GOLDENS / "golden_t5.safetensors")
    ids, mask = golden["input_ids"][:1], golden["attention_mask"][:1]
    got, want = encoder(ids, mask), golden["last_hidden_state"][:1]
    keep = mask.bool()
    assert (got[keep] - want[keep]).abs().max() < 2e-5
