"""The torch definitions against the reference's goldens in tests/data.

Run: `python -m pytest tools/demo_model/test_goldens.py` from the project's folder; needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402  (needs torch)
from tools.demo_model.model import Sizes, StableAudio  # noqa: E402
from tools.demo_model.text import TextEncoder  # noqa: E402
from torch import Tensor  # noqa: E402

DATA = Path(__file__).parents[2] / "tests" / "data"
CHECKPOINT = DATA / "tiny-music"
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


def golden(part: str) -> dict[str, Tensor]:
    """One golden file of the tiny checkpoint."""
    return load_file(DATA / "goldens" / "tiny-music" / f"{part}.safetensors")


def floats(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors as float32."""
    return {name: tensor.float() for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def model() -> StableAudio:
    """The tiny checkpoint in the torch model, with the reference's table of frequencies."""
    built = StableAudio(SIZES)
    built.load_state_dict(floats(CHECKPOINT / "model.safetensors"), strict=True)
    constants = load_file(DATA / "goldens" / "constants.safetensors")
    built.dit.frequencies = constants["expo_freqs_dim256"].reshape(-1)
    return built.eval()


@pytest.mark.parametrize("length", [5, 64])
@torch.no_grad()
def test_velocity(model: StableAudio, length: int) -> None:
    """DiT with text, seconds and kept latents."""
    dit = golden("dit")
    got = model.dit(
        dit["x"][..., :length],
        torch.tensor([0.5]),
        dit["cross_attn_cond"],
        dit["global_cond"],
        dit["local_add_cond"][..., :length],
    )
    want = dit[f"velocity.L{length}.t0.5.local_mask"]
    assert (got - want).abs().max() < 4e-5  # ten times the reference's own noise


@torch.no_grad()
def test_short_context_is_the_same_function(model: StableAudio) -> None:
    """One padding token with a raised logit stands for all of them."""
    conditioner = golden("conditioner")
    x = golden("dit")["x"][..., :8]
    tokens, seconds = conditioner["case1.cross_attn_cond"], conditioner["case1.global_cond"]
    padding = model.conditioner.conditioners["prompt"].padding_embedding
    count = 256 - int((tokens[0, :256] - padding).abs().amax(1).lt(1e-5).sum())
    mask = torch.ones(1, count + 3)
    mask[:, count:] = 0
    local = torch.zeros(1, 33, 8)
    time = torch.tensor([0.7])
    context, bias = model.context(tokens[:, : count + 3], mask, seconds)
    short = model.dit(x, time, context, seconds, local, None, bias)
    full = model.dit(x, time, tokens, seconds, local)
    assert (short - full).abs().max() < 4e-5
    vector = model.seconds_vector(conditioner["case1.seconds"].reshape(1))
    assert torch.allclose(vector, seconds, atol=1e-5)


@torch.no_grad()
def test_codec(model: StableAudio) -> None:
    """One latent and two, both ways, and three on the way in."""
    ae = golden("ae")
    for length in (1, 2):
        got = model.autoencoder.decode(ae["latents"][..., :length])
        want = ae[f"decode.L{length}.audio"][..., : length * 4096]
        assert (got - want).abs().max() < 1.3e-5
    for length in (1, 2, 3):
        audio = ae["audio_i16"].float()[None, :, : length * 4096] / 32768
        latents = model.autoencoder.encode(audio)
        want = ae[f"encode.L{length}.latents"][..., :length]
        assert (latents - want).abs().max() < 1e-5


@torch.no_grad()
def test_text_encoder() -> None:
    """Hidden states where there is a token."""
    folder = CHECKPOINT / "t5gemma-b-b-ul2"
    config = json.loads((folder / "config.json").read_text())["encoder"]
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    state = floats(folder / "model.safetensors")
    encoder = TextEncoder(SIZES)
    encoder.load_state_dict({k: v for k, v in state.items() if k.startswith("model.encoder")})
    t5 = golden("t5")
    ids, mask = t5["input_ids"][:1], t5["attention_mask"][:1]
    keep = mask.bool()
    assert (encoder(ids, mask)[keep] - t5["last_hidden_state"][:1][keep]).abs().max() < 6e-5
