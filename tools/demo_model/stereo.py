"""Teach a trained decoder left from right, on a CPU, without touching its latents.

The autoencoder of the first run came out nearly mono: its latents tell the side of a sound (a
linear probe finds it), but its decoder did not use them. Here the encoder stays as it is, so a
DiT trained on its latents stays valid, and only the decoder learns on, mostly from panned sounds.

Knows: that one repair. Doesn't know: words.
`python -m tools.demo_model.stereo --codec output/demo/codec.safetensors --to output/demo/codec2.safetensors`
"""  # noqa: E501 - a command is one line

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import torch
from tools.demo_model.captions import draw
from tools.demo_model.codec import codec_report, spectral_loss
from tools.demo_model.model import SAMPLES_PER_LATENT, Autoencoder, Sizes
from tools.demo_model.optim import Optimiser
from tools.demo_model.sounds import render
from tools.demo_model.train import NOISY, load, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SIDES = ("left", "right", "left", "right", "centre")
FRAMES = 20  # latents of a clip here


def panned_sounds(seed: int, count: int) -> list:
    """Sounds of which four in five stand on one side; the wide ones stay."""
    r = Random(seed)
    sounds = [draw(r, 0.4, 1.85) for _ in range(count)]
    for sound in sounds:
        if not sound.wide:
            sound.side = r.choice(SIDES)
    return sounds


def make_audio(sounds: list) -> Tensor:
    """[N, 2, FRAMES · 4096] float32."""
    parts = [sounds[i : i + 32] for i in range(0, len(sounds), 32)]
    return torch.cat([render(part, FRAMES * SAMPLES_PER_LATENT) for part in parts])


def side_report(codec: Autoencoder, audio: Tensor, sides: list[str]) -> dict[str, float]:
    """Median of right over left in dB of what comes back, for each side."""
    with torch.no_grad():
        got = codec.decode(codec.encode(audio))
    energy = got.square().mean(-1) + 1e-10
    ratio = 10 * torch.log10(energy[:, 1] / energy[:, 0])
    return {
        side: round(ratio[[i for i, s in enumerate(sides) if s == side]].median().item(), 1)
        for side in ("left", "centre", "right")
    }


def loss_of(codec: Autoencoder, latents: Tensor, audio: Tensor, tonal: Tensor) -> Tensor:
    """Waveforms, and the spectra of one channel; the latents get some noise, as from a DiT."""
    level = torch.rand(len(latents), 1, 1) * 0.15
    noisy = latents + level * torch.randn_like(latents)
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        got = codec.decode(noisy)
    got = got.float()
    scale = audio.square().mean((1, 2)).sqrt() + 0.01
    wave = ((got - audio).abs().mean((1, 2)) / scale * tonal).mean()
    pick, row = torch.randint(2, (len(audio),)), torch.arange(len(audio))
    return wave * 2 + spectral_loss(got[row, pick], audio[row, pick])


def main() -> None:
    """Parse and go."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--codec", required=True)
    p.add_argument("--to", required=True)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--clips", type=int, default=800)
    p.add_argument("--seconds", type=float, default=1200)
    p.add_argument("--batch", type=int, default=10)
    p.add_argument("--crop", type=int, default=6, help="latents in a piece, even")
    p.add_argument("--muon", type=float, default=1.5e-3)
    p.add_argument("--adam", type=float, default=1e-3)
    p.add_argument("--head", type=int, default=32, help="head dim of the autoencoder")
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    codec = Autoencoder(Sizes(ae_head_dim=a.head))
    load(codec, Path(a.codec))
    sounds = panned_sounds(a.seed, a.clips)
    audio = make_audio(sounds)
    tonal = torch.tensor([0.1 if s.family in NOISY else 1.0 for s in sounds])
    with torch.no_grad():
        latents = torch.cat([codec.encode(part) for part in audio.split(16)])
    test = panned_sounds(a.seed + 1, 60)
    heard = make_audio(test)
    sides, kinds = [s.side for s in test], [s.family for s in test]
    print("before", side_report(codec, heard, sides), codec_report(codec, heard, kinds), flush=True)
    codec.encoder.requires_grad_(False)
    codec.bottleneck.requires_grad_(False)
    optimiser = Optimiser(codec.decoder.named_parameters(), a.muon, a.adam)
    lengths = torch.tensor([int(s.seconds * 44_100 / SAMPLES_PER_LATENT) for s in sounds])
    begin, done, total = time.monotonic(), 0, 0.0
    while (spent := (time.monotonic() - begin) / a.seconds) < 1:
        optimiser.rate.fill_(min(1.0, done / 50) * min(1.0, (1 - spent) / 0.6))
        clip = torch.randint(len(sounds), (a.batch,))
        start = (torch.rand(a.batch) * (lengths[clip] - a.crop // 2).clamp(min=1)).long() // 2 * 2
        start = start.clamp(max=latents.shape[-1] - a.crop)
        pairs = list(zip(clip.tolist(), start.tolist(), strict=True))
        some = torch.stack([latents[i, :, s : s + a.crop] for i, s in pairs])
        n = SAMPLES_PER_LATENT
        want = torch.stack([audio[i, :, s * n : (s + a.crop) * n] for i, s in pairs])
        optimiser.clear()
        loss = loss_of(codec, some, want, tonal[clip])
        loss.backward()
        optimiser.step()
        done, total = done + 1, total + loss.item()
        if done % 100 == 0:
            print(done, f"{time.monotonic() - begin:.0f}s {total / 100:.4f}", flush=True)
            total = 0.0
        if done % 200 == 0:
            print(side_report(codec, heard, sides), flush=True)
            save(codec, Path(a.to))
    optimiser.averaged()
    save(codec, Path(a.to))
    print("after", side_report(codec, heard, sides), codec_report(codec, heard, kinds), flush=True)


if __name__ == "__main__":
    main()
