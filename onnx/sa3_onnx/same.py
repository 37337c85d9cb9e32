"""The SAME autoencoders: sound to latents and back.

Knows: MODEL_SPEC §5, patches, groups of tokens, soft-norm, the order of layers. Doesn't know:
attention (see sa3_onnx.same_attention), the limiter.

    enc  audio  f32 [1, 2, samples]    → latent f32 [1, C, latent_len]
    dec  latent f32 [1, C, latent_len] → pcm i32 [1, samples, 2]

The noise that the reference adds when decoding is left out: decoding is deterministic.
Folded when the file is written, in float64: the soft-norm into the linear layers beside it, the
weight norm, head_dim^-½ into the query norm, the order of queries and keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint
from sa3_models.errors import CheckpointError
from sa3_models.geometry import CHANNELS, PATCH, STRIDE
from sa3_models.stages import Stage
from sa3_onnx.author import Author, Lowering, Tensor
from sa3_onnx.limiter import limited_pcm
from sa3_onnx.same_attention import GROUP, Chunks, Windows, aligned_block, whole_groups
from sa3_onnx.same_blocks import block
from sa3_onnx.vocabulary import (
    END,
    axis_length,
    concat,
    derived,
    matmul,
    matrix,
    reshape,
    slice_axis,
    tokens,
    transpose,
)

__all__ = ["WINDOW_GROUPS", "author_decoder", "author_encoder"]

# Groups of queries in a block of SAME-L's sliding window, with primitives. Few repeat much of the
# halo, many score keys that the band hides. Measured at full width, two blocks deep, for 1, 2, 4,
# 8, 16: scratch of the 256-latent band 348, 267, 221, 204, 196 MB and of the 4096-latent band 5.6,
# 4.3, 3.5, 3.3, 3.1 GB (TensorRT-RTX, fp16); CPU 1.63, 1.54, 1.50, 1.48, 1.58 s per 128 latents.
WINDOW_GROUPS = 8


def author_encoder(
    checkpoint: Checkpoint,
    *,
    precision: str,
    lowering: Lowering,
    window_groups: int | None = None,
) -> Author:
    """Write the graph of `enc` (ports: docs/architecture.md).

    `window_groups`: groups of queries per block of SAME-L's sliding window, by default what the
    lowering is fast with; it changes speed and memory, not the result.
    """
    g = Author(Stage.ENCODER.value, precision=precision, lowering=lowering)
    coder = _Coder(g, checkpoint, Stage.ENCODER, window_groups)
    audio = g.input("audio", "float32", (1, CHANNELS, "samples"))
    patches = transpose(g, reshape(g, audio, CHANNELS, -1, PATCH), 1, 0, 2)
    patches = reshape(g, patches, -1, CHANNELS * PATCH)
    latents = g.op("Div", axis_length(g, patches, 0), g.ints(STRIDE))
    patches = whole_groups(g, patches, STRIDE * coder.multiple)
    x = reshape(g, coder.mapping(patches), -1, STRIDE, coder.side.dim)
    x = coder.transformer(coder.with_new_tokens(x), latents)
    x = slice_axis(g, reshape(g, x, -1, GROUP, coder.side.dim), STRIDE, GROUP, 1)
    z = coder.to_latents(reshape(g, x, -1, coder.side.dim))
    z = transpose(g, slice_axis(g, z, 0, latents, 0), 1, 0)
    z = reshape(g, z, 1, coder.config.latent_dim, -1)
    g.output("latent", z, "float32", (1, coder.config.latent_dim, "latent_len"))
    return g


def author_decoder(
    checkpoint: Checkpoint,
    *,
    precision: str,
    lowering: Lowering,
    ceiling_input: bool = False,
    limiter: bool = True,
    window_groups: int | None = None,
) -> Author:
    """Write the graph of `dec` (ports: docs/architecture.md).

    Args:
        checkpoint: a complete model or an autoencoder alone.
        precision: of the trunk.
        lowering: of the vocabulary.
        ceiling_input: add the input `limiter_ceiling` f32 [] instead of the fixed ceiling.
        limiter: False gives the sound before the limiter, `audio` f32 [1, 2, samples].
        window_groups: as in `author_encoder`.
    """
    g = Author(Stage.DECODER.value, precision=precision, lowering=lowering)
    coder = _Coder(g, checkpoint, Stage.DECODER, window_groups)
    channels = coder.config.latent_dim
    latent = g.input("latent", "float32", (1, channels, "latent_len"))
    ceiling = g.input("limiter_ceiling", "float32", ()) if limiter and ceiling_input else None
    latents = axis_length(g, latent, 2)
    x = coder.from_latents(transpose(g, reshape(g, latent, channels, -1), 1, 0))
    x = reshape(g, whole_groups(g, x, coder.multiple), -1, 1, coder.side.dim)
    x = coder.transformer(coder.with_new_tokens(x), latents)
    x = slice_axis(g, reshape(g, x, -1, GROUP, coder.side.dim), 1, GROUP, 1)
    patches = coder.mapping(reshape(g, x, -1, coder.side.dim))
    patches = slice_axis(g, patches, 0, g.op("Mul", latents, g.ints(STRIDE)), -2)
    audio = transpose(g, reshape(g, patches, -1, CHANNELS, PATCH), 1, 0, 2)
    audio = reshape(g, audio, 1, CHANNELS, -1)
    if limiter:
        g.output("pcm", limited_pcm(g, audio, ceiling), "int32", (1, "samples", CHANNELS))
    else:
        g.output("audio", audio, "float32", (1, CHANNELS, "samples"))
    return g


class _Coder:
    """One side of an autoencoder, emitted into one graph; tokens as in `vocabulary.tokens`.

    Attributes:
        multiple: latents that a sequence is padded to a multiple of.
    """

    def __init__(
        self, g: Author, checkpoint: Checkpoint, stage: Stage, window_groups: int | None
    ) -> None:
        self.g, self.config, self.tensors = g, checkpoint.config.autoencoder, checkpoint.autoencoder
        encodes = stage is Stage.ENCODER
        self.side = self.config.encoder if encodes else self.config.decoder
        self.name = "encoder.layers.0" if encodes else "decoder.layers.3"
        # groups of 17 tokens: patches then the learned token, or latent then 16 learned tokens
        self.new_tokens = (STRIDE, GROUP) if encodes else (1, GROUP)
        if self.config.family == "same-l":
            reach = self.config.sliding_window
            usual = aligned_block(reach) if g.lowering == "operators" else WINDOW_GROUPS
            self.multiple = max(window_groups or usual, reach)
            return
        self.multiple = self.config.chunk_latents
        if self.multiple % 2:
            raise CheckpointError(
                "a chunk of the autoencoder must hold an even number of latents",
                found=f"chunk_size {self.multiple * STRIDE}: {self.multiple} latents",
                hint="only such chunks can be shifted by half of their length",
            )

    def from_latents(self, z: Tensor) -> Tensor:
        """Latents [L, C] → [L, dim], the division by running_std undone: W·(z·std) + b."""
        g, name = self.g, "decoder.layers.1"
        std = float(self.tensors.read("bottleneck.running_std")[0])
        weight = matrix(g, self.tensors, f"{name}.weight", factor=std)
        return matmul(g, z, weight, g.constant(self.tensors.read(f"{name}.bias")[None]))

    def to_latents(self, x: Tensor) -> Tensor:
        """Tokens [L, dim] → soft-normed latents [L, C]: ((W·x + b)·scale + bias)/std."""
        g, name = self.g, "encoder.layers.2"
        scale, bias, std = (
            self.tensors.read(f"bottleneck.{part}").astype(np.float64).reshape(-1)
            for part in ("scaling_factor", "bias", "running_std")
        )
        weight = matrix(g, self.tensors, f"{name}.weight", factor=scale / std)
        shift = (self.tensors.read(f"{name}.bias") * scale + bias) / std
        return matmul(g, x, weight, g.constant(shift[None]))

    def with_new_tokens(self, groups: Tensor) -> Tensor:
        """Groups [n, 16 or 1, dim], filled up to 17 tokens with the learned one → n·17 tokens.

        They are padded with zeros, and the learned token is added there.
        """
        g, (start, stop) = self.g, self.new_tokens
        token = self.tensors.read(f"{self.name}.new_tokens").reshape(-1)
        added = np.zeros((1, GROUP, token.size))
        added[:, start:stop] = token
        padded = g.op("Pad", groups, g.ints(0, 0, 0, 0, stop - start, 0))
        return tokens(g, g.op("Add", padded, g.constant(added)), token.size)

    def mapping(self, x: Tensor) -> Tensor:
        """The weight-normed convolution between patches and tokens: [n, in] → n tokens of out.

        The rows of three taps side by side make it one matrix product; outside are zeros.
        """
        g, name, tensors = self.g, f"{self.name}.mapping", self.tensors
        out, into, taps = tensors.shape(f"{name}.weight_v")

        def kernel() -> NDArray[np.float32]:
            return tensors.weight_norm(name).transpose(2, 1, 0).reshape(taps * into, out)

        weight = derived(g, f"{name}.weight", (taps * into, out), kernel)
        if taps > 1:
            padded = g.op("Pad", x, g.ints(taps // 2, 0, taps // 2, 0))
            shifted = (slice_axis(g, padded, i, i + 1 - taps or END, 0) for i in range(taps))
            x = concat(g, 1, *shifted)
        x = tokens(g, x, taps * into)
        return matmul(g, x, weight, g.constant(tensors.read(f"{name}.bias")[None]))

    def transformer(self, x: Tensor, latents: Tensor) -> Tensor:
        """All blocks over tokens of dim; `latents` (int64 [1]) of the groups are real."""
        g, side = self.g, self.side
        plain = side.depth - max(side.sinusoidal_blocks - 1, 0)
        chunks = self.config.family == "same-s"
        geometry: Chunks | Windows
        if chunks:
            geometry = Chunks.of(g, x, self.multiple * GROUP)
        else:
            geometry = Windows.of(g, latents, self.multiple, self.config.sliding_window)
        shift = self.multiple * GROUP // 2  # tokens, half a chunk
        for i in range(side.depth):
            if chunks and i == side.depth // 2:
                ends = slice_axis(g, x, 0, shift, -2), slice_axis(g, x, -shift, END, -2)
                x = concat(g, -2, ends[0], x, ends[1])
                geometry = Chunks.of(g, x, self.multiple * GROUP)
            with g.scope(f"block{i}"):
                place = f"{self.name}.transformers.{i}"
                x = block(g, x, self.tensors, place, side, geometry, sinusoidal=i >= plain)
        return slice_axis(g, x, shift, -shift, -2) if chunks else x
