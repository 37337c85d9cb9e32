"""An optimiser that can live inside a CUDA graph: Muon for block matrices, Adam for the rest.

Muon replaces the momentum of a matrix by its nearest orthogonal matrix (Newton-Schulz). Wide
and tall matrices are cut into square blocks, so that all of one size are done in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(blocks: Tensor, steps: int = 5) -> Tensor:
    """Blocks [N, d, d] → about U·Vᵀ of each, in bfloat16 on a GPU."""
    x = blocks.bfloat16() if blocks.is_cuda else blocks.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


def to_blocks(matrix: Tensor) -> Tensor:
    """[a, b] → [N, d, d] with d = min(a, b)."""
    d = min(matrix.shape)
    return matrix.unflatten(0, (-1, d)).unflatten(2, (-1, d)).transpose(1, 2).reshape(-1, d, d)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `to_blocks`."""
    d = min(shape)
    return blocks.reshape(shape[0] // d, shape[1] // d, d, d).transpose(1, 2).reshape(shape)


def is_block_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside a block whose long side is a multiple of the short."""
    inside = ".layers." in name or ".transformers." in name or "global_cond_embedder" in name
    return inside and p.ndim == 2 and max(p.shape) % min(p.shape) == 0 and min(p.shape) >= 128


class Optimiser:
    """`step()` after `backward()`. `rate` is a tensor, so that a graph sees its changes."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], muon: float = 2e-3, adam: float = 1e-3
    ) -> None:
        pairs = [(n, p) for n, p in named if p.requires_grad and p.numel()]
        self.matrices = [p for n, p in pairs if muon and is_block_matrix(n, p)]
        self.others = [p for n, p in pairs if not (muon and is_block_matrix(n, p))]
        device = pairs[0][1].device
        self.all = self.matrices + self.others
        self.rate = torch.ones((), device=device)
        self.count = torch.zeros((), device=device)
        self.muon, self.adam = muon, adam
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]
        self.average = [p.detach().clone() for p in self.all]

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.all:
            p.grad = None

    @torch.no_grad()
    def step(self, clip: float = 1.0, ema: float = 0.999) -> Tensor:
        """One update; returns the gradient norm before clipping."""
        grads = [p.grad for p in self.all]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        self.count += 1
        self._muon(grads[: len(self.matrices)])
        self._adam(grads[len(self.matrices) :])
        self._average((10 / (self.count + 10)).clamp(min=1 - ema))
        return norm

    def _average(self, weight: Tensor) -> None:
        difference = torch._foreach_sub([p.data for p in self.all], self.average)
        torch._foreach_mul_(difference, weight)
        torch._foreach_add_(self.average, difference)

    def _muon(self, grads: list[Tensor]) -> None:
        if not self.matrices:
            return
        torch._foreach_mul_(self.momentum, 0.95)
        torch._foreach_add_(self.momentum, grads)
        looked = torch._foreach_add(grads, self.momentum, alpha=0.95)
        for size in sorted({min(p.shape) for p in self.matrices}):
            some = [i for i, p in enumerate(self.matrices) if min(p.shape) == size]
            cut = [to_blocks(looked[i]) for i in some]
            whole = orthogonal(torch.cat(cut)) * (0.2 * size**0.5 * self.muon) * self.rate
            for i, part in zip(some, whole.split([len(c) for c in cut]), strict=True):
                self.matrices[i].data.sub_(from_blocks(part, self.matrices[i].shape))

    def _adam(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(self.first, 0.9)
        torch._foreach_add_(self.first, grads, alpha=0.1)
        torch._foreach_mul_(self.second, 0.98)
        torch._foreach_addcmul_(self.second, grads, grads, value=0.02)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_div_(root, (1 - 0.98**self.count).sqrt())
        torch._foreach_add_(root, 1e-8)
        update = torch._foreach_div(self.first, root)
        torch._foreach_mul_(update, self.rate * self.adam / (1 - 0.9**self.count))
        torch._foreach_sub_([p.data for p in self.others], update)

    @torch.no_grad()
    def averaged(self) -> None:
        """Put the running averages into the parameters, for good."""
        for p, mean in zip(self.all, self.average, strict=True):
            p.data.copy_(mean)
