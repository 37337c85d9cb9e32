"""T5Gemma's encoder in torch. Knows: the layer arithmetic and its parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tools.demo_model.model import Rotary, Sizes, heads, merge, rotate
from torch import Tensor, nn


class GemmaNorm(nn.Module):
    """x / rms(x) · (1 + weight) in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """X [..., dim] → float32."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return x.float() * scale * (1 + self.weight)


class TextAttention(nn.Module):
    """Bidirectional rotary attention with capped logits."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """X [B, T, dim] → the same shape; mask [B, T], 1 = token."""
        q, k, v = (
            heads(part(x), self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = rotate(q, table) @ rotate(k, table).transpose(-1, -2) * self.head_dim**-0.5
        scores = 50.0 * torch.tanh(scores.float() / 50.0)
        scores = scores.masked_fill(mask[:, None, None] == 0, -1e9)
        return self.o_proj(merge(scores.softmax(-1).to(v.dtype) @ v))


class TextMlp(nn.Module):
    """Gated feed-forward with tanh-GELU."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [B, T, dim] → the same shape."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class TextLayer(nn.Module):
    """One layer: norms before and after attention and feed-forward."""

    def __init__(self, dim: int, head_dim: int, inner: int) -> None:
        super().__init__()
        self.pre_self_attn_layernorm = GemmaNorm(dim)
        self.self_attn = TextAttention(dim, head_dim)
        self.post_self_attn_layernorm = GemmaNorm(dim)
        self.pre_feedforward_layernorm = GemmaNorm(dim)
        self.mlp = TextMlp(dim, inner)
        self.post_feedforward_layernorm = GemmaNorm(dim)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """X [B, T, dim] → the same shape."""
        h = self.self_attn(self.pre_self_attn_layernorm(x), table, mask)
        x = x + self.post_self_attn_layernorm(h)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class TextEncoder(nn.Module):
    """input_ids [B, T] int64, mask [B, T] (1 = token) → hidden states [B, T, dim] float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, head_dim = sizes.cond_dim, sizes.cond_dim // sizes.text_heads
        encoder = nn.Module()
        encoder.embed_tokens = nn.Embedding(sizes.vocab, dim)
        nn.init.normal_(encoder.embed_tokens.weight, std=dim**-0.5)
        encoder.layers = nn.ModuleList(
            TextLayer(dim, head_dim, sizes.text_mlp) for _ in range(sizes.text_layers)
        )
        encoder.norm = GemmaNorm(dim)
        self.model = nn.Module()
        self.model.encoder = encoder
        self.rotary = [Rotary(head_dim)]  # in a list: not stored, as in the published file

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Ids and mask [B, T] → [B, T, dim]."""
        encoder = self.model.encoder
        x = encoder.embed_tokens(ids) * encoder.embed_tokens.weight.shape[1] ** 0.5
        table = self.rotary[0].to(ids.device)(ids.shape[1])
        for layer in encoder.layers:
            x = layer(x, table, mask)
        return encoder.norm(x)
