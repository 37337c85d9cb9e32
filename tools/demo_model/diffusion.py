"""Training and sampling of the DiT with its text encoder. Latents in, latents out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from tools.demo_model.model import StableAudio
from tools.demo_model.text import TextEncoder
from torch import Tensor

SIGMA_START, SIGMA_END = -6.2, 2.0  # log-SNR of the default schedule, rate 0


def warp(u: Tensor) -> Tensor:
    """Uniform 0..1 → time of the default schedule."""
    return torch.sigmoid(u * (SIGMA_END - SIGMA_START) - SIGMA_END)


def schedule(steps: int, sigma: float = 1.0) -> Tensor:
    """[steps + 1] times from sigma to 0 exactly."""
    t = warp(torch.linspace(sigma, 0, steps + 1))
    t[0], t[-1] = sigma, 0.0
    return t


@dataclass
class Pool:
    """What the DiT learns from, on its device."""

    latents: Tensor  # [N, C, L] float16
    ids: Tensor  # [N, T] int64
    mask: Tensor  # [N, T] int64
    seconds: Tensor  # [N] float32
    frames: Tensor  # [N] int64, latents that hold the clip
    free: Tensor  # [N] bool: starts anywhere, so only ever used with something to keep


def keep_masks(frames: Tensor, free: Tensor, length: int) -> Tensor:
    """[B, L] float32: 1 = keep. Prefix, suffix or both ends of the clip, or nothing at all."""
    device, batch = frames.device, len(frames)
    position = torch.arange(length, device=device)[None]
    cut = torch.rand(batch, 2, device=device).sort(dim=1).values * frames[:, None]
    kind = torch.rand(batch, 1, device=device)
    start, end = cut[:, :1], cut[:, 1:]
    prefix = position < start.clamp(min=2)
    both = (position < start.clamp(min=2)) | (position >= end.clamp(min=3))
    suffix = position >= torch.minimum(end, frames[:, None] - 2.0)
    keep = torch.where(kind < 0.35, prefix, torch.where(kind < 0.75, both, suffix))
    wanted = free | (torch.rand(batch, device=device) < 0.22)
    return (keep & wanted[:, None] & (position < frames[:, None])).float()


def compose(x0: Tensor, keep: Tensor, free: Tensor, share: float) -> Tensor:
    """x0 [B, C, L] where a share of the clips that are not free keep frames of another clip.

    There the clip itself starts where the hole does, so that its prompt tells what fills it and
    what is kept does not. Nothing changes where nothing is kept. keep is [B, L], 1 = keep.
    """
    device, length = x0.device, x0.shape[-1]
    lead = keep.cumprod(1).sum(1, keepdim=True).long()  # frames kept before the hole
    start = (torch.arange(length, device=device)[None] - lead).clamp(min=0)
    late = x0.gather(2, start[:, None].expand_as(x0))
    mixed = torch.where(keep[:, None] > 0, x0.roll(1, 0), late)
    chosen = ~free & (torch.rand(len(x0), device=device) < share)
    return torch.where(chosen[:, None, None], mixed, x0)


def draw_times(batch: int, device: torch.device) -> Tensor:
    """[batch] float32: mostly as the sampler asks, some exactly 1, some uniform."""
    u, kind = torch.rand(batch, device=device), torch.rand(batch, device=device)
    t = torch.where(kind < 0.7, warp(u), torch.where(kind < 0.85, torch.ones_like(u), u))
    return t.clamp(min=0.005)


def diffusion_loss(
    model: StableAudio, text: TextEncoder, pool: Pool, batch: int, foreign: float
) -> Tensor:
    """Mean squared error of the velocity on a random batch; foreign: see `compose`."""
    device = pool.latents.device
    pick = torch.randint(len(pool.latents), (batch,), device=device)
    x0, frames = pool.latents[pick].float(), pool.frames[pick]
    length = x0.shape[-1]
    inside = (torch.arange(length, device=device)[None] < frames[:, None]).float()
    keep = keep_masks(frames, pool.free[pick], length)
    if foreign:
        x0 = compose(x0, keep, pool.free[pick], foreign)
    t, noise = draw_times(batch, device), torch.randn_like(x0)
    x = (1 - t)[:, None, None] * x0 + t[:, None, None] * noise
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        mask = pool.mask[pick]
        seconds = model.seconds_vector(pool.seconds[pick])
        context, bias = model.context(text(pool.ids[pick], mask), mask, seconds)
        gate = (torch.rand(batch, 1, 1, device=device) >= 0.12).to(context.dtype)
        local = torch.cat([keep[:, None], keep[:, None] * x0], dim=1)
        memory = model.dit.transformer.memory_tokens.shape[0]
        seen = torch.cat([torch.ones(batch, memory, device=device), inside], dim=1)
        hide = torch.where(seen > 0, 0.0, -torch.inf)[:, None, None]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        count = memory + length
        v = model.dit(
            x,
            t,
            context * gate,
            seconds,
            local,
            hide.to(dtype).expand(-1, -1, count, -1),
            bias.to(dtype).expand(-1, -1, count, -1),
        )
    weight = inside * (1 - 0.7 * keep)
    error = (v.float() - (noise - x0)).square().mean(1)
    return (error * weight).sum() / weight.sum()


@torch.no_grad()
def sample(
    model: StableAudio,
    text: TextEncoder,
    ids: Tensor,
    mask: Tensor,
    seconds: Tensor,
    length: int,
    *,
    steps: int = 8,
    seed: int = 0,
    cfg: float = 1.0,
    euler: bool = False,
) -> Tensor:
    """Latents [B, C, length] by pingpong (or Euler) for a batch of prompts of one length."""
    device = ids.device
    generator = torch.Generator().manual_seed(seed)
    shape = (len(ids), model.dit.transformer.project_in.in_features, length)

    def fresh() -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    vector = model.seconds_vector(seconds)
    context, bias = model.context(text(ids, mask), mask, vector)
    local = torch.zeros(shape[0], shape[1] + 1, length, device=device)
    times, x = schedule(steps).tolist(), fresh()
    for now, then in pairwise(times):
        t = torch.full((shape[0],), now, device=device)
        d = x - now * model.dit(x, t, context, vector, local, None, bias)
        if cfg != 1.0:
            plain = x - now * model.dit(x, t, context * 0, vector, local, None, bias)
            d = plain + cfg * (d - plain)
        x = d + (x - d) / now * then if euler else (1 - then) * d + then * fresh()
    return x
