"""The figures of a comparison: how each is computed, which are good enough, and the report.

Knows: vectors and PCM in NumPy. Doesn't know: what made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.geometry import PCM_PEAK
from sa3_models.stages import Precision

__all__ = [
    "TARGET_MEAN",
    "TARGET_WORST",
    "AtLength",
    "Comparison",
    "clipped",
    "cosines",
    "crest",
    "psnr",
]

TARGET_MEAN, TARGET_WORST = 0.9999, 0.999  # of the velocity's cosine


@dataclass(frozen=True)
class AtLength:
    """What was measured at one length.

    cosine_mean, cosine_worst: of teacher-forced velocities over the steps. std_ratio: deviation of
    the free-run latents over that of the FP32 ones. psnr_db: PCM of the free run against FP32;
    decoder_psnr_db: both decoders on the FP32 latents. clipped: samples at full scale or beyond.
    crest_db: peak over RMS; the `reference_` values are those of FP32.
    """

    latent_len: int
    steps: int
    cosine_mean: float
    cosine_worst: float
    std_ratio: float
    psnr_db: float
    decoder_psnr_db: float
    clipped: int
    reference_clipped: int
    crest_db: float
    reference_crest_db: float


@dataclass(frozen=True)
class Comparison:
    """A half-precision export against FP32.

    precision, coder_precision: of text encoder and DiT, of the decoder. text_mean, text_worst:
    cosine of the hidden states over the prompt's tokens.
    """

    precision: Precision
    coder_precision: Precision
    text_mean: float
    text_worst: float
    lengths: tuple[AtLength, ...]

    @property
    def passed(self) -> bool:
        """Whether every length reaches both targets."""
        return all(
            row.cosine_mean >= TARGET_MEAN and row.cosine_worst >= TARGET_WORST
            for row in self.lengths
        )

    def text(self) -> str:
        """The report for people."""
        lines = [
            f"{self.precision} against fp32 (decoder {self.coder_precision}), roundings emulated",
            f"text encoder: cosine mean {self.text_mean:.7f}, worst token {self.text_worst:.7f}",
            "     L steps  velocity cosine mean / worst   "
            "std ratio   PSNR  decoder   clipped   crest",
        ]
        lines += [
            f"{row.latent_len:6d} {row.steps:5d}  {row.cosine_mean:.8f} / {row.cosine_worst:.8f}"
            f"   {row.std_ratio:9.5f} {row.psnr_db:6.1f} {row.decoder_psnr_db:8.1f}"
            f" {row.clipped:5d}/{row.reference_clipped:<4d}"
            f" {row.crest_db:5.1f}/{row.reference_crest_db:.1f} dB"
            for row in self.lengths
        ]
        verdict = "reached" if self.passed else "MISSED"
        lines.append(f"target (mean ≥ {TARGET_MEAN}, worst ≥ {TARGET_WORST}): {verdict}")
        return "\n".join(lines)


def cosines(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Cosine of the angle between vectors along the last axis, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine: NDArray[np.float64] = (a * b).sum(-1) / norms
    return cosine


def psnr(pcm: NDArray[np.int32], reference: NDArray[np.int32]) -> float:
    """Peak signal-to-noise ratio in dB, the peak being full scale; 200 where equal."""
    error = float(np.mean((pcm.astype(np.float64) - reference) ** 2))
    return 200.0 if error == 0 else float(10 * np.log10(PCM_PEAK**2 / error))


def clipped(pcm: NDArray[np.int32]) -> int:
    """Samples at full scale or beyond (NaN becomes −2³¹)."""
    return int((np.abs(pcm.astype(np.int64)) >= PCM_PEAK).sum())


def crest(pcm: NDArray[np.int32]) -> float:
    """Peak over RMS in dB, 0 for silence."""
    wide = pcm.astype(np.float64)
    rms = np.sqrt((wide**2).mean())
    return 0.0 if rms == 0 else float(20 * np.log10(np.abs(wide).max() / rms))
