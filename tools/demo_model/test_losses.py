"""What the training counts: one-sided sounds, kept frames of other clips. Quick; needs torch.

Run: `python -m pytest tools/demo_model/test_losses.py` from the project's folder.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tools.demo_model import codec  # noqa: E402  (needs torch)
from tools.demo_model.diffusion import compose  # noqa: E402
from torch import Tensor  # noqa: E402


@pytest.fixture
def left() -> Tensor:
    """A tone in the left channel only, [1, 2, 8192]."""
    tone = 0.4 * torch.sin(2 * torch.pi * 440 * torch.arange(8192) / 44_100)
    return torch.stack([tone, tone * 0])[None]


def tone_pool() -> Tensor:
    """Four equal clips of 32 cycles in a frame, [4, 2, 16384] float16."""
    tone = 0.1 * torch.sin(2 * torch.pi * 32 * torch.arange(16_384) / 4096)
    return tone.expand(4, 2, -1).half()


LOSSES = {
    "waveform": lambda got, want: codec.apart(got, want).mean(),
    "spectra": codec.spectral_loss,
    "middle and side": lambda got, want: codec.spectral_loss(
        codec.middle_side(got), codec.middle_side(want)
    ),
    "levels": codec.side_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_codec_unsure_of_the_side_is_not_taught_to_be_silent(left: Tensor, name: str) -> None:
    """The sum of |left| and |right| is the same for every mono answer: that taught it."""
    quiet, fair = (level * left[:, :1].expand(-1, 2, -1) for level in (0.02, 0.3))
    assert torch.isclose((quiet - left).abs().mean(), (fair - left).abs().mean())
    assert LOSSES[name](fair, left) < LOSSES[name](quiet, left)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_parting_the_channels_of_a_mono_answer_lowers_the_loss(
    left: Tensor, name: str, level: float
) -> None:
    """From equal channels on, and to nothing where the answer is right."""
    mono = level * left[:, :1].expand(-1, 2, -1)
    parted = mono * torch.tensor([1.05, 0.95])[:, None]
    assert LOSSES[name](parted, left) < 0.999 * LOSSES[name](mono, left)
    assert LOSSES[name](left, left) < 0.1 * LOSSES[name](mono, left)


def test_middle_and_side_keep_energy_and_turn_back() -> None:
    """An orthogonal turn of the two channels."""
    x = torch.randn(3, 2, 100, generator=torch.Generator().manual_seed(1))
    turned = codec.middle_side(x)
    assert torch.allclose(turned.square().sum(1), x.square().sum(1), atol=1e-5)
    assert torch.allclose(codec.middle_side(turned), x, atol=1e-6)


def test_half_of_the_crops_lean_to_a_side_and_both_sides_alike() -> None:
    """A quarter by the 26 dB that the words mean."""
    torch.manual_seed(1)
    pool = tone_pool()
    crops = codec.Crops(pool, torch.full((4,), 0.3), torch.ones(4), 2000, 2)
    found = codec.side_db(crops._place(crops._take()[0]))
    assert 0.40 < (found.abs() > 2).float().mean() < 0.55
    assert abs((found > 2).float().mean() - (found < -2).float().mean()) < 0.06
    assert ((found.abs() - 26).abs() < 0.1).float().mean() > 0.2


def test_a_fifth_of_the_crops_is_wide() -> None:
    """A quarter of a cycle between channels of one level."""
    torch.manual_seed(1)
    crops = codec.Crops(tone_pool(), torch.full((4,), 0.3), torch.ones(4), 2000, 2)
    x = crops._place(crops._take()[0])
    level = codec.side_db(x).abs() < 0.1
    alike = (x[:, 0] * x[:, 1]).mean(1) / x.square().mean((1, 2))
    assert 0.17 < (level & (alike.abs() < 0.01)).float().mean() < 0.23
    assert 0.27 < (level & (alike > 0.99)).float().mean() < 0.33


def test_another_clips_frames_are_kept_and_the_clip_itself_starts_in_the_hole() -> None:
    """Its prompt tells what fills the hole; free clips and clips without a hole stay."""
    x0 = torch.arange(2)[:, None, None] * 100.0 + torch.arange(8.0)
    keep = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0]] * 2).float()
    free = torch.tensor([False, True])
    mixed = compose(x0, keep, free, share=1.1)
    assert mixed[0, 0].tolist() == [100, 101, 0, 1, 2, 105, 106, 5]
    assert torch.equal(mixed[1], x0[1])  # starts anywhere: only with its own frames
    assert torch.equal(compose(x0, keep * 0, free, share=1.1), x0)
    assert torch.equal(compose(x0, keep, free, share=0.0), x0)
