"""The SAME autoencoders: sound to latents and back (MODEL_SPEC §5).

Knows: patches, groups of tokens, soft-norm, the order of layers. Doesn't know: attention (see
sa3_onnx.same_blocks), the limiter.

    enc  audio  f32 [1, 2, samples]   → latent f32 [1, C, latent_len]
    dec  latent f32 [1, C, latent_len] → pcm i32 [1, samples, 2]

The noise that the reference adds when decoding is left out: decoding is deterministic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint, Tensors
from sa3_models.config import AutoencoderConfig, CoderConfig
from sa3_models.errors import CheckpointError
from sa3_models.geometry import CHANNELS, PATCH, STRIDE
from sa3_onnx.author import Author, Tensor
from sa3_onnx.limiter import limited_pcm
from sa3_onnx.same_blocks import GROUP, Chunks, Windows, block, whole_groups
from sa3_onnx.vocabulary import (
    axis_length,
    concat,
    conv1x1,
    derived,
    matmul,
    matrix,
    reshape,
    slice_axis,
    transpose,
)

__all__ = ["author_decoder", "author_encoder"]

WINDOW_GROUPS = 4  # groups of queries in a block of SAME-L's sliding window
_LAST = 2**62  # a slice bound beyond every end
_ENCODER, _DECODER = "encoder.layers.0", "decoder.layers.3"


def author_encoder(
    g: Author, checkpoint: Checkpoint, *, window_groups: int = WINDOW_GROUPS
) -> None:
    """Write the encoder of a checkpoint's autoencoder.

    Args:
        g: an empty graph.
        checkpoint: a complete model or an autoencoder alone.
        window_groups: see `author_decoder`.
    """
    config, tensors = checkpoint.config.autoencoder, checkpoint.autoencoder
    side = config.encoder
    audio = g.input("audio", "float32", (1, CHANNELS, "samples"))
    patches = transpose(g, reshape(g, audio, CHANNELS, -1, PATCH), 1, 0, 2)
    patches = reshape(g, patches, -1, CHANNELS * PATCH)
    tokens = axis_length(g, patches, 0)
    latents = g.op("Div", tokens, g.ints(STRIDE))
    patches = whole_groups(g, patches, STRIDE * _multiple(config, window_groups))
    with g.scope("encoder"):
        x = _mapping(g, patches, tensors, f"{_ENCODER}.mapping", side)
        x = reshape(g, x, -1, STRIDE, side.dim)
        x = _with_new_tokens(g, x, tensors, f"{_ENCODER}.new_tokens", slice(STRIDE, GROUP))
        x = _transformer(g, x, latents, tensors, config, side, _ENCODER, window_groups)
        x = slice_axis(g, reshape(g, x, -1, GROUP, side.dim), STRIDE, GROUP, 1)
        z = _soft_norm(g, reshape(g, x, -1, side.dim), tensors)
        z = transpose(g, slice_axis(g, z, 0, latents, 0), 1, 0)
    z = reshape(g, z, 1, config.latent_dim, -1)
    g.output("latent", z, "float32", (1, config.latent_dim, "latent_len"))


def author_decoder(
    g: Author,
    checkpoint: Checkpoint,
    *,
    ceiling_input: bool = False,
    limiter: bool = True,
    window_groups: int = WINDOW_GROUPS,
) -> None:
    """Write the decoder of a checkpoint's autoencoder.

    Args:
        g: an empty graph.
        checkpoint: a complete model or an autoencoder alone.
        ceiling_input: add the input `limiter_ceiling` f32 [] instead of the fixed ceiling.
        limiter: False gives the sound before the limiter, `audio` f32 [1, 2, samples].
        window_groups: groups of queries per block of SAME-L's sliding window: changes speed and
            memory, not the result.
    """
    config, tensors = checkpoint.config.autoencoder, checkpoint.autoencoder
    side = config.decoder
    latent = g.input("latent", "float32", (1, config.latent_dim, "latent_len"))
    latents = axis_length(g, latent, 2)
    ceiling = g.input("limiter_ceiling", "float32", ()) if limiter and ceiling_input else None
    with g.scope("decoder"):
        x = transpose(g, reshape(g, latent, config.latent_dim, -1), 1, 0)
        scale = float(tensors.read("bottleneck.running_std")[0])
        weight = matrix(g, tensors, "decoder.layers.1.weight", factor=scale)
        x = matmul(g, x, weight, g.constant(tensors.read("decoder.layers.1.bias")))
        x = whole_groups(g, x, _multiple(config, window_groups))
        x = reshape(g, x, -1, 1, side.dim)
        x = _with_new_tokens(g, x, tensors, f"{_DECODER}.new_tokens", slice(1, GROUP))
        x = _transformer(g, x, latents, tensors, config, side, _DECODER, window_groups)
        x = slice_axis(g, reshape(g, x, -1, GROUP, side.dim), 1, GROUP, 1)
        x = _mapping(g, reshape(g, x, -1, side.dim), tensors, f"{_DECODER}.mapping", side)
        patches = slice_axis(g, x, 0, g.op("Mul", latents, g.ints(STRIDE)), 0)
    audio = transpose(g, reshape(g, patches, -1, CHANNELS, PATCH), 1, 0, 2)
    audio = reshape(g, audio, 1, CHANNELS, -1)
    if limiter:
        g.output("pcm", limited_pcm(g, audio, ceiling), "int32", (1, "samples", CHANNELS))
    else:
        g.output("audio", audio, "float32", (1, CHANNELS, "samples"))


def _multiple(config: AutoencoderConfig, window_groups: int) -> int:
    """The number of latents that a sequence is padded to a multiple of."""
    if config.family == "same-l":
        return max(window_groups, config.sliding_window)
    if config.chunk_latents % 2:
        raise CheckpointError(
            "a chunk of the autoencoder must hold an even number of latents",
            found=f"chunk_size = {config.chunk_latents * STRIDE}, {config.chunk_latents} latents",
            hint="only then can chunks be shifted by half of their length",
        )
    return config.chunk_latents


def _transformer(
    g: Author,
    x: Tensor,
    latents: Tensor,
    tensors: Tensors,
    config: AutoencoderConfig,
    side: CoderConfig,
    name: str,
    window_groups: int,
) -> Tensor:
    """All blocks: x [tokens, dim], padded to whole chunks or windows → the same shape."""
    plain = side.depth - max(side.sinusoidal_blocks - 1, 0)
    multiple = _multiple(config, window_groups)
    geometry: Chunks | Windows
    shifted_from = side.depth  # the block before which chunks are shifted
    shift = multiple * GROUP // 2
    if config.family == "same-s":
        geometry = Chunks(multiple * GROUP)
        shifted_from = side.depth // 2
    else:
        geometry = Windows.of(g, latents, multiple, config.sliding_window)
    for i in range(side.depth):
        if i == shifted_from:
            front, back = slice_axis(g, x, 0, shift, 0), slice_axis(g, x, -shift, _LAST, 0)
            x = concat(g, 0, front, x, back)
        with g.scope(f"block.{i}"):
            place = f"{name}.transformers.{i}"
            x = block(g, x, tensors, place, side, geometry, sinusoidal=i >= plain)
    return slice_axis(g, x, shift, -shift, 0) if shifted_from < side.depth else x


def _with_new_tokens(
    g: Author, groups: Tensor, tensors: Tensors, name: str, place: slice
) -> Tensor:
    """Groups [n, 1 or 16, dim] filled up to 17 tokens with the learned one: → [n·17, dim].

    Zeros are appended or put in front, then the learned token is added where they are.
    """
    token = tensors.read(name).reshape(-1)
    added = np.zeros((1, GROUP, token.size))
    added[:, place] = token
    front = place.start if place.stop < GROUP else 0
    back = GROUP - place.start
    pads = (0, 0, 0, 0, back, 0) if not front else (0, front, 0, 0, 0, 0)
    x = g.op("Add", g.op("Pad", groups, g.ints(*pads)), g.constant(added))
    return reshape(g, x, -1, token.size)


def _mapping(g: Author, x: Tensor, tensors: Tensors, name: str, side: CoderConfig) -> Tensor:
    """The weight-normed convolution between patches and tokens: [n, in] → [n, out].

    Three taps are three columns of rows side by side: one product instead of a convolution.
    """
    out, into, taps = tensors.shape(f"{name}.weight_v")
    bias = g.constant(tensors.read(f"{name}.bias"))

    def kernel() -> NDArray[np.float32]:
        return tensors.weight_norm(name).transpose(2, 1, 0).reshape(taps * into, out)

    weight = derived(g, f"{name}.weight", (taps * into, out), kernel)
    if taps > 1:
        reach = taps // 2
        wide = g.op("Pad", x, g.ints(reach, 0, reach, 0))
        x = concat(g, 1, *(slice_axis(g, wide, i, i - 2 * reach or _LAST, 0) for i in range(taps)))
    return conv1x1(g, x, weight, bias)


def _soft_norm(g: Author, x: Tensor, tensors: Tensors) -> Tensor:
    """The last linear layer of the encoder with the soft-norm folded into it, in float64.

    (W·x + b)·scale/std + bias/std.
    """
    scale, bias, std = (
        tensors.read(f"bottleneck.{part}").astype(np.float64).reshape(-1)
        for part in ("scaling_factor", "bias", "running_std")
    )
    name = "encoder.layers.2"
    weight = matrix(g, tensors, f"{name}.weight", factor=scale / std)
    shift = (tensors.read(f"{name}.bias") * scale + bias) / std
    return matmul(g, x, weight, g.constant(shift))
