"""The Stable Audio 3 family in torch, small: text encoder, DiT, SAME-S autoencoder.

Knows: the arithmetic of the family and the published parameter names (`state_dict()` of
`StableAudio` and of `TextEncoder` are the published files). Doesn't know: sounds, losses, files.
Shapes: audio [B, 2, S] float32 in -1..1, latents [B, C, L], tokens [B, T, dim].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 256  # samples of one channel in a patch
STRIDE = 16  # patches in a latent
SAMPLES_PER_LATENT = PATCH * STRIDE
GROUP = STRIDE + 1  # tokens of one latent inside the autoencoder
TEXT_LEN = 256  # prompt tokens of the product; shorter here, see `DiT.forward`


@dataclass(frozen=True)
class Sizes:
    """Everything that `model_config.json` and the text encoder's config say about sizes."""

    latent_dim: int = 64
    ae_dim: int = 256
    ae_encoder_depth: int = 2
    ae_decoder_depth: int = 3
    ae_head_dim: int = 64
    dim: int = 256
    depth: int = 5
    ff_mult: int = 2
    memory_tokens: int = 16
    head_dim: int = 64
    cond_dim: int = 128
    text_layers: int = 2
    text_heads: int = 2
    text_mlp: int = 256
    vocab: int = 768


def expo_frequencies(count: int = 128) -> Tensor:
    """[count] float32: 0.5 … 10,000 Hz, even in the logarithm."""
    low, high = math.log(0.5), math.log(10_000.0)
    return torch.exp(torch.linspace(0, 1, count) * (high - low) + low)


def expo_features(value: Tensor, frequencies: Tensor) -> Tensor:
    """Value [B] float32 → [B, 2·count] float32: cosines, then sines."""
    angle = value.float()[:, None] * frequencies * 2 * math.pi
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Rotary(nn.Module):
    """The stored table of inverse frequencies, F32."""

    inv_freq: Tensor

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000.0 ** (-torch.arange(0, dims, 2).float() / dims))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """cos, sin [length, dims] float32 for positions 0 … length-1."""
        positions = torch.arange(length, device=self.inv_freq.device, dtype=torch.float32)
        angle = positions[:, None] * self.inv_freq.float()[None]
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first dims of x [..., T, head_dim] by the table, in float32; dtype of x kept."""
    cos, sin = table
    dims = cos.shape[-1]
    head, tail = x[..., :dims].float(), x[..., dims:]
    first, second = head.chunk(2, dim=-1)
    turned = head * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), tail], dim=-1)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H·d] → [B, H, T, d]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[B, H, T, d] → [B, T, H·d]."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot product attention in the dtype of v; mask is added to the logits."""
    return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)


class RMSNorm(nn.Module):
    """x / rms(x) · gamma in float32, back to the dtype of x."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """X [..., dim], dtype kept."""
        return F.rms_norm(x.float(), self.gamma.shape, self.gamma, self.eps).to(x.dtype)


class DynamicTanh(nn.Module):
    """gamma · tanh(alpha · x) + beta."""

    def __init__(self, dim: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """X [..., dim], dtype kept."""
        return (self.gamma * torch.tanh(self.alpha * x) + self.beta).to(x.dtype)


class GatedProjection(nn.Module):
    """value · SiLU(gate), both from one linear layer."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner * 2)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., dim] → [..., inner]."""
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.silu(gate)


class FeedForward(nn.Module):
    """Gated feed-forward; children are named as published (`ff.0.proj`, `ff.2`)."""

    def __init__(self, dim: int, mult: int) -> None:
        super().__init__()
        self.ff = nn.Sequential(
            GatedProjection(dim, dim * mult), nn.Identity(), nn.Linear(dim * mult, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        """X [..., dim] → the same shape."""
        return self.ff(x)


# --------------------------------------------------------------------------- autoencoder


class DifferentialAttention(nn.Module):
    """attn(q, k, v) - attn(q2, k2, v) inside one chunk."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_qkv = nn.Linear(dim, dim * 5, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.q_norm = DynamicTanh(head_dim)
        self.k_norm = DynamicTanh(head_dim)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """X [chunks, 34, dim] → the same shape."""
        q, k, v, q2, k2 = (heads(part, self.head_dim) for part in self.to_qkv(x).chunk(5, dim=-1))
        q = rotate(self.q_norm(torch.cat([q, q2], dim=1)), table)  # both in one go
        k = rotate(self.k_norm(torch.cat([k, k2], dim=1)), table)
        first, second = attend(q, k, torch.cat([v, v], dim=1)).chunk(2, dim=1)
        return self.to_out(merge(first - second))


class CodecBlock(nn.Module):
    """x += attention(DyT(x)); x += feed-forward(DyT(x))."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.pre_norm = DynamicTanh(dim)
        self.self_attn = DifferentialAttention(dim, head_dim)
        self.ff_norm = DynamicTanh(dim)
        self.ff = FeedForward(dim, 3)
        self.rope = Rotary(head_dim // 2)

    def forward(self, x: Tensor) -> Tensor:
        """X [chunks, 34, dim]."""
        x = x + self.self_attn(self.pre_norm(x), self.rope(x.shape[1]))
        return x + self.ff(self.ff_norm(x))


class NormedConv(nn.Module):
    """1-d convolution with weight norm, stored as `weight_g`, `weight_v`, `bias`."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        conv = nn.Conv1d(inputs, outputs, kernel)
        self.weight_v = nn.Parameter(conv.weight.detach().clone())
        self.weight_g = nn.Parameter(conv.weight.detach().norm(dim=(1, 2), keepdim=True))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """X [B, inputs, T] → [B, outputs, T]."""
        weight = self.weight_g * self.weight_v / self.weight_v.norm(dim=(1, 2), keepdim=True)
        return F.conv1d(x, weight, self.bias, padding=self.weight_v.shape[-1] // 2)


class Resampler(nn.Module):
    """What encoder and decoder share: mapping, the inserted token and the chunked blocks."""

    def __init__(
        self, dim: int, head_dim: int, depth: int, inputs: int, outputs: int, kernel: int
    ) -> None:
        super().__init__()
        self.mapping = NormedConv(inputs, outputs, kernel)
        self.new_tokens = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.transformers = nn.ModuleList(CodecBlock(dim, head_dim) for _ in range(depth))

    def blocks(self, groups: Tensor) -> Tensor:
        """Groups [B, L, 17, dim], L even. First half of the blocks aligned, the rest shifted."""
        batch, count, _, dim = groups.shape
        aligned = len(self.transformers) // 2
        x = groups.reshape(-1, 2 * GROUP, dim)
        for block in self.transformers[:aligned]:
            x = block(x)
        x = x.reshape(batch, count, GROUP, dim)
        x = torch.cat([x[:, :1], x, x[:, -1:]], dim=1).reshape(-1, 2 * GROUP, dim)
        for block in self.transformers[aligned:]:
            x = block(x)
        return x.reshape(batch, count + 2, GROUP, dim)[:, 1:-1]


class Autoencoder(nn.Module):
    """SAME-S: stereo audio to one latent every 4,096 samples, and back."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, head, latent = sizes.ae_dim, sizes.ae_head_dim, sizes.latent_dim
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleDict(
            {
                "0": Resampler(dim, head, sizes.ae_encoder_depth, 2 * PATCH, dim, 1),
                "2": nn.Linear(dim, latent),
            }
        )
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleDict(
            {
                "1": nn.Linear(latent, dim),
                "3": Resampler(dim, head, sizes.ae_decoder_depth, dim, 2 * PATCH, 3),
            }
        )
        self.bottleneck = SoftNorm(latent)

    def encode(self, audio: Tensor) -> Tensor:
        """Audio [B, 2, L·4096] → latents [B, C, L]."""
        batch, channels, samples = audio.shape
        count = samples // SAMPLES_PER_LATENT
        audio = F.pad(audio, (0, (count % 2) * SAMPLES_PER_LATENT))
        patches = audio.reshape(batch, channels, -1, PATCH).transpose(2, 3).flatten(1, 2)
        stage: Resampler = self.encoder.layers["0"]
        x = stage.mapping(patches).float().transpose(1, 2).unflatten(1, (-1, STRIDE))
        last = stage.new_tokens.to(x.dtype)[:, None].expand(batch, x.shape[1], 1, -1)
        x = stage.blocks(torch.cat([x, last], dim=2))[:, :count, -1]
        return self.bottleneck.encode(self.encoder.layers["2"](x).transpose(1, 2))

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, L] → audio [B, 2, L·4096]."""
        count = latents.shape[-1]
        x = self.bottleneck.decode(latents).transpose(1, 2)
        x = F.pad(self.decoder.layers["1"](x).float(), (0, 0, 0, count % 2))[:, :, None]
        stage: Resampler = self.decoder.layers["3"]
        new = stage.new_tokens.to(x.dtype)[:, None].expand(x.shape[0], x.shape[1], STRIDE, -1)
        x = stage.blocks(torch.cat([x, new], dim=2))[:, :, 1:].flatten(1, 2)
        with torch.autocast(x.device.type, enabled=False):  # half precision would be heard
            patches = stage.mapping(x.transpose(1, 2))
        audio = patches.unflatten(1, (2, PATCH)).transpose(2, 3).flatten(2)
        return audio[..., : count * SAMPLES_PER_LATENT]


class SoftNorm(nn.Module):
    """The bottleneck: (x · scale + bias) / running_std on the way in."""

    running_std: Tensor
    noise_scaling_factor: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scaling_factor = nn.Parameter(torch.ones(1, dim, 1))
        self.bias = nn.Parameter(torch.zeros(1, dim, 1))
        self.register_buffer("noise_scaling_factor", torch.zeros(1, 0, 1))
        self.register_buffer("running_std", torch.ones(1))

    def encode(self, x: Tensor) -> Tensor:
        """X [B, C, L] → latents, float32."""
        return (x.float() * self.scaling_factor + self.bias) / self.running_std

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, L] → what the decoder takes."""
        return latents * self.running_std


# --------------------------------------------------------------------------- DiT


class SelfAttention(nn.Module):
    """Rotary self-attention, q and k normed per head."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.q_norm = RMSNorm(head_dim, 1e-6)
        self.k_norm = RMSNorm(head_dim, 1e-6)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """X [B, T, dim] → the same shape; mask is added to the logits."""
        q, k, v = (heads(part, self.head_dim) for part in self.to_qkv(x).chunk(3, dim=-1))
        q, k = rotate(self.q_norm(q), table), rotate(self.k_norm(k), table)
        return self.to_out(merge(attend(q, k, v, mask)))


class CrossAttention(nn.Module):
    """Attention to the context, q and k normed per head, no rotation."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.q_norm = RMSNorm(head_dim, 1e-6)
        self.k_norm = RMSNorm(head_dim, 1e-6)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """X [B, T, dim] looks at context [B, S, dim]; mask is added to the logits."""
        q = self.q_norm(heads(self.to_q(x), self.head_dim))
        k, v = (heads(part, self.head_dim) for part in self.to_kv(context).chunk(2, dim=-1))
        return self.to_out(merge(attend(q, self.k_norm(k), v, mask)))


class DiTBlock(nn.Module):
    """Self-attention, cross-attention, local conditioning, feed-forward; adaLN on both ends."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, head = sizes.dim, sizes.head_dim
        self.pre_norm = RMSNorm(dim)
        self.self_attn = SelfAttention(dim, head)
        self.cross_attend_norm = RMSNorm(dim)
        self.cross_attn = CrossAttention(dim, head)
        self.ff_norm = RMSNorm(dim)
        self.ff = FeedForward(dim, sizes.ff_mult)
        self.to_local_embed = nn.Sequential(
            nn.Linear(sizes.latent_dim + 1, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.to_scale_shift_gate = nn.Parameter(torch.zeros(dim * 6))

    def forward(
        self,
        x: Tensor,
        shared: Tensor,
        context: Tensor,
        local: Tensor,
        table: tuple[Tensor, Tensor],
        masks: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """X [B, M + L, dim]; shared [B, 6·dim]; local [B, L, C + 1]; masks: self, cross."""
        adjust = (shared + self.to_scale_shift_gate)[:, None].chunk(6, dim=-1)
        scale1, shift1, gate1, scale2, shift2, gate2 = adjust
        h = self.pre_norm(x) * (1 + scale1) + shift1
        x = x + self.self_attn(h, table, masks[0]) * torch.sigmoid(1 - gate1)
        x = x + self.cross_attn(self.cross_attend_norm(x), context, masks[1])
        local = self.to_local_embed(local)
        x = x + F.pad(local, (0, 0, x.shape[1] - local.shape[1], 0))
        h = self.ff_norm(x) * (1 + scale2) + shift2
        return x + self.ff(h) * torch.sigmoid(1 - gate2)


class Transformer(nn.Module):
    """The blocks of the DiT and what they share."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes.dim
        self.project_in = nn.Linear(sizes.latent_dim, dim, bias=False)
        self.project_out = nn.Linear(dim, sizes.latent_dim, bias=False)
        self.memory_tokens = nn.Parameter(torch.randn(sizes.memory_tokens, dim) * 0.02)
        self.rotary_pos_emb = Rotary(sizes.head_dim // 2)
        self.global_cond_embedder = nn.Sequential(
            nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim * 6)
        )
        self.layers = nn.ModuleList(DiTBlock(sizes) for _ in range(sizes.depth))


class DiT(nn.Module):
    """Velocity of the latents, given time, text, length and what to keep."""

    frequencies: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, latent, cond = sizes.dim, sizes.latent_dim, sizes.cond_dim
        self.preprocess_conv = nn.Conv1d(latent, latent, 1, bias=False)
        self.postprocess_conv = nn.Conv1d(latent, latent, 1, bias=False)
        self.to_timestep_embed = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.to_cond_embed = nn.Sequential(
            nn.Linear(cond, dim, bias=False), nn.SiLU(), nn.Linear(dim, dim, bias=False)
        )
        self.to_global_embed = nn.Sequential(
            nn.Linear(cond, dim, bias=False), nn.SiLU(), nn.Linear(dim, dim, bias=False)
        )
        self.transformer = Transformer(sizes)
        self.register_buffer("frequencies", expo_frequencies(), persistent=False)
        nn.init.zeros_(self.preprocess_conv.weight)
        nn.init.zeros_(self.postprocess_conv.weight)
        nn.init.zeros_(self.transformer.project_out.weight)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seconds: Tensor,
        local: Tensor,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        """Velocity [B, C, L] of x [B, C, L] at t [B].

        context [B, T, cond]: prompt tokens, then the seconds token. The product always has 257
        tokens; training uses few, with ONE padding token whose logit is raised by the logarithm
        of how many it stands for (`cross_mask`), which is the same function.
        seconds [B, cond]: the seconds vector. local [B, C + 1, L]: mask (1 = keep), kept latents.
        self_mask: added to the logits, hides frames past the end in a padded batch.
        """
        t_embed = self.to_timestep_embed(expo_features(t, self.frequencies))
        shared = self.transformer.global_cond_embedder(self.to_global_embed(seconds) + t_embed)
        context = self.to_cond_embed(context)
        x = x + self.preprocess_conv(x)
        x = self.transformer.project_in(x.transpose(1, 2)).float()
        memory = self.transformer.memory_tokens.to(x.dtype)
        x = torch.cat([memory.expand(x.shape[0], -1, -1), x], dim=1)
        table = self.transformer.rotary_pos_emb(x.shape[1])
        local = local.transpose(1, 2)
        for block in self.transformer.layers:
            x = block(x, shared, context, local, table, (self_mask, cross_mask))
        v = self.transformer.project_out(x[:, memory.shape[0] :]).transpose(1, 2)
        return v + self.postprocess_conv(v)


class StableAudio(nn.Module):
    """Everything in `model.safetensors`, under the published names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.model = DiT(sizes)
        self.pretransform = nn.Module()
        self.pretransform.model = Autoencoder(sizes)
        prompt, number, embedder = nn.Module(), nn.Module(), nn.Module()
        prompt.padding_embedding = nn.Parameter(torch.randn(sizes.cond_dim) * 0.02)
        embedder.embedding = nn.ModuleDict({"1": nn.Linear(256, sizes.cond_dim)})
        number.embedder = embedder
        self.conditioner = nn.Module()
        self.conditioner.conditioners = nn.ModuleDict({"prompt": prompt, "seconds_total": number})

    @property
    def dit(self) -> DiT:
        """The diffusion transformer."""
        return self.model.model

    @property
    def autoencoder(self) -> Autoencoder:
        """The autoencoder."""
        return self.pretransform.model

    def seconds_vector(self, seconds: Tensor) -> Tensor:
        """Seconds [B] → [B, cond] float32."""
        part = self.conditioner.conditioners["seconds_total"].embedder.embedding["1"]
        return part(expo_features(seconds.clamp(0, 384) / 384, self.dit.frequencies))

    def context(self, hidden: Tensor, mask: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, T + 2, cond] and the logit bias [B, 1, 1, T + 2] that makes it exact.

        hidden [B, T, cond] of a text encoder run on T < 256 tokens, mask [B, T] (1 = token),
        seconds [B, cond]. The padding token in place T stands for all 256 - n padding places.
        """
        padding = self.conditioner.conditioners["prompt"].padding_embedding
        padding = padding.to(hidden.dtype).expand(hidden.shape[0], 1, -1)
        tokens = torch.cat([hidden, padding, seconds[:, None].to(hidden.dtype)], dim=1)
        count = mask.sum(dim=1, keepdim=True).float()
        bias = torch.cat(
            [
                torch.where(mask.bool(), 0.0, -torch.inf),
                torch.log(TEXT_LEN - count),
                torch.zeros_like(count),
            ],
            dim=1,
        )
        return tokens, bias[:, None, None]
