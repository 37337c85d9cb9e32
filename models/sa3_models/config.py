"""What a model consists of, as typed values: the sizes and settings that computations depend on.

Knows: what follows from them. Doesn't know: the published files (sa3_models.config_file), tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "TEXT_SUBFOLDER",
    "AutoencoderConfig",
    "CoderConfig",
    "DitConfig",
    "ModelConfig",
    "Shift",
    "TextConfig",
]

TEXT_SUBFOLDER = "t5gemma-b-b-ul2"


@dataclass(frozen=True, slots=True)
class Shift:
    """Distribution shift of the sampling schedule (MODEL_SPEC §6).

    kind: "logsnr", "full", "full_sine", "flux" or "none". The other fields are that kind's options.
    """

    kind: str = "logsnr"
    min_length: int = 256
    max_length: int = 4096
    rate: float = 0.0
    alpha_min: float | None = None
    alpha_max: float | None = None


@dataclass(frozen=True, slots=True)
class DitConfig:
    """Sizes of the diffusion transformer.

    cond_dim is the width of a context token (= hidden size of the text encoder); global_dim that
    of the global condition; rotary dims follow from the stored inv_freq.
    """

    latent_dim: int
    dim: int
    depth: int
    heads: int
    cond_dim: int
    global_dim: int
    memory_tokens: int
    time_features: int
    ff_mult: int
    differential: bool
    seconds_max: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


@dataclass(frozen=True, slots=True)
class CoderConfig:
    """One side of a SAME autoencoder.

    sinusoidal_blocks: N as configured; the last N − 1 blocks gate with sin(πx) (0 = none).
    kernel: width of the mapping convolution (3 with conv_mapping, else 1).
    """

    dim: int
    depth: int
    head_dim: int
    sinusoidal_blocks: int
    kernel: int

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.dim // self.head_dim


@dataclass(frozen=True, slots=True)
class AutoencoderConfig:
    """A SAME autoencoder.

    family: "same-s" (chunks of `chunk_latents` latents, shifted by one for the second half of
    the blocks) or "same-l" (sliding window of `sliding_window` groups to each side).
    """

    family: Literal["same-s", "same-l"]
    latent_dim: int
    encoder: CoderConfig
    decoder: CoderConfig
    chunk_latents: int
    sliding_window: int

    def decode_margin(self) -> int:
        """Latents of context a decode window needs on each side to equal one-piece decoding.

        MODEL_SPEC §5: SAME-S two for any block count, SAME-L sliding_window·blocks; one more
        latent for the limiter, whose gain depends on under one latent to either side.
        """
        if self.family == "same-s":
            return 2 + 1
        return self.sliding_window * self.decoder.depth + 1

    def encode_margin(self) -> int:
        """Latents of context an encode window needs on each side (even starts included)."""
        return 2 if self.family == "same-s" else self.sliding_window * self.encoder.depth


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The T5Gemma encoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    query_scalar: float
    softcap: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything `model_config.json` says that a computation depends on.

    dit is None for a stand-alone autoencoder. sample_size is the training length in samples,
    trained_latents the shortest clip of the training range in latents.
    """

    autoencoder: AutoencoderConfig
    dit: DitConfig | None
    objective: Literal["rf_denoiser", "rectified_flow"] | None
    shift: Shift
    sample_size: int
    text_subfolder: str
    trained_latents: int = 256
