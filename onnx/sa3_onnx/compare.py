"""How far a half-precision export is from the FP32 one, measured on the CPU.

Knows: which graphs to run on what, a plain sampler. Doesn't know: prompts, schedules, GPUs, how a
figure is computed (sa3_onnx.figures). Half precision runs with all its roundings emulated
(sa3_onnx.emulate), one after each operator: a GPU that fuses operators rounds less often, so this
is the pessimistic side.

Teacher-forced: at each step both models see the latents of the FP32 trajectory, so that errors do
not add up; free-run: the half-precision pipeline, text encoder included, goes its own way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint
from sa3_models.geometry import (
    LATENT_LEN_MAX,
    SAMPLE_RATE,
    SAMPLES_PER_LATENT,
    TEXT_LEN,
)
from sa3_models.stages import Precision, Stage
from sa3_onnx.author import Lowering
from sa3_onnx.emulate import emulated, has_half
from sa3_onnx.export import jobs_for, run
from sa3_onnx.figures import AtLength, Comparison, clipped, cosines, crest, psnr

__all__ = ["LENGTHS", "compare"]

LENGTHS = (33, 324, LATENT_LEN_MAX)
LONG = 1024  # latents; above, two steps are compared and the beginning is decoded
LONG_STEPS = 2
DECODED = 256  # latents of a long clip that are decoded
_TOKENS = 12  # of the random prompt
_QUIET = 3

Array = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Trajectory:
    """Latents before each step and the velocities there; the last entry of x is the result."""

    x: list[Array]
    v: list[Array]


def compare(
    checkpoint: Checkpoint,
    directory_of: Callable[[Stage], Path],
    *,
    precision: Precision = "fp16",
    coder_precision: Precision | None = None,
    lowering: Lowering | None = None,
    lengths: Iterable[int] = LENGTHS,
    steps: int = 8,
    seed: int = 0,
    say: Say = lambda _: None,
) -> Comparison:
    """Compare a model's half-precision stages with the FP32 ones; missing files are exported.

    Args:
        checkpoint: a complete model.
        directory_of: directory of a stage's files.
        precision: of text encoder and DiT.
        coder_precision: of the decoder; default BF16 for SAME-S, FP16 for SAME-L.
        lowering: of the half-precision files.
        lengths: in latents.
        steps: of the sampler.
        seed: of the noise and the prompt.
        say: told what is being done.
    """
    family = checkpoint.config.autoencoder.family
    coder_precision = coder_precision or ("bf16" if family == "same-s" else "fp16")
    stages = (Stage.TEXT, Stage.DIT_PREPARE, Stage.DIT_STEP)
    files: dict[tuple[Stage, bool], Path] = {}
    for stage in (*stages, Stage.DECODER):
        half = coder_precision if stage is Stage.DECODER else precision
        for kind, how, low in ((False, "fp32", None), (True, half, lowering)):
            jobs = jobs_for(checkpoint, directory_of, stages=[stage], precision=how, lowering=low)
            for done in run(checkpoint, jobs):
                files[stage, kind] = done.job.path
    bench = _Bench(checkpoint, files, tuple(lengths), steps, seed, say)
    return bench.report(precision, coder_precision)


class _Bench:
    """Runs both pipelines, one graph in memory at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: Mapping[tuple[Stage, bool], Path],
        lengths: tuple[int, ...],
        steps: int,
        seed: int,
        say: Say,
    ) -> None:
        self.checkpoint, self.files, self.say = checkpoint, files, say
        self.lengths = lengths
        self.steps = {n: steps if n <= LONG else min(steps, LONG_STEPS) for n in lengths}
        rng = np.random.default_rng(seed)
        self.mask = (np.arange(TEXT_LEN) < _TOKENS).astype(np.int64)[None]
        vocab = checkpoint.text_config.vocab
        self.ids = rng.integers(3, min(vocab, 256), (1, TEXT_LEN)) * self.mask
        channels = checkpoint.config.autoencoder.latent_dim
        self.noise = {
            n: [rng.standard_normal((1, channels, n), np.float32) for _ in range(self.steps[n] + 1)]
            for n in lengths
        }

    def report(self, precision: Precision, coder_precision: Precision) -> Comparison:
        hidden = [self._hidden(half) for half in (False, True)]
        text = cosines(hidden[0][0, :_TOKENS], hidden[1][0, :_TOKENS])
        reference: dict[int, _Trajectory] = {}
        with self._dit(half=False) as dit:
            for n in self.lengths:
                self.say(f"fp32, {n} latents")
                reference[n] = self._sample(dit(hidden[0], n), n)
        forced: dict[int, list[float]] = {}
        free: dict[int, Array] = {}
        with self._dit(half=True) as dit:
            for n in self.lengths:
                self.say(f"{precision}, {n} latents")
                velocity = dit(hidden[0], n)
                pairs = zip(self._levels(n), reference[n].x, reference[n].v, strict=False)
                forced[n] = [float(cosines(velocity(x, t).ravel(), v.ravel())) for t, x, v in pairs]
                free[n] = self._sample(dit(hidden[1], n), n).x[-1]
        self.say("decoding")
        wanted = {n: (reference[n].x[-1], free[n]) for n in self.lengths}
        pcm = {half: self._decode(wanted, half=half) for half in (False, True)}
        rows = tuple(
            AtLength(
                latent_len=n,
                steps=self.steps[n],
                cosine_mean=float(np.mean(forced[n])),
                cosine_worst=min(forced[n]),
                std_ratio=float(free[n].std() / reference[n].x[-1].std()),
                psnr_db=psnr(pcm[True][n][1], pcm[False][n][0]),
                decoder_psnr_db=psnr(pcm[True][n][0], pcm[False][n][0]),
                clipped=clipped(pcm[True][n][1]),
                reference_clipped=clipped(pcm[False][n][0]),
                crest_db=crest(pcm[True][n][1]),
                reference_crest_db=crest(pcm[False][n][0]),
            )
            for n in self.lengths
        )
        return Comparison(precision, coder_precision, float(text.mean()), float(text.min()), rows)

    def _hidden(self, half: bool) -> Array:
        with _session(self.files[Stage.TEXT, half]) as encoder:
            feeds = {"input_ids": self.ids, "attention_mask": self.mask}
            return next(iter(encoder(feeds).values()))

    @contextmanager
    def _dit(self, *, half: bool) -> Iterator[Callable[[Array, int], Callable[..., Array]]]:
        """Gives: hidden states, length → (latents, level) → velocity."""
        with (
            _session(self.files[Stage.DIT_PREPARE, half]) as prepare,
            _session(self.files[Stage.DIT_STEP, half]) as step,
        ):

            def prepared(hidden: Array, n: int) -> Callable[[Array, float], Array]:
                channels = self.checkpoint.config.autoencoder.latent_dim
                seconds = n * SAMPLES_PER_LATENT / SAMPLE_RATE
                fixed = prepare(
                    {
                        "t5_hidden": hidden,
                        "t5_mask": self.mask.astype(np.float32),
                        "seconds_total": np.array([seconds], np.float32),
                        "local_add_cond": np.zeros((1, channels + 1, n), np.float32),
                        "cond_gate": np.ones(1, np.float32),
                    }
                )
                fixed = {**fixed, "padding_mask": np.ones((1, n), np.float32)}

                def velocity(x: Array, t: float) -> Array:
                    feeds = {**fixed, "x": x, "t": np.array([t], np.float32)}
                    out: Array = step(feeds)["velocity"]
                    return out

                return velocity

            yield prepared

    def _levels(self, n: int) -> Sequence[float]:
        return [float(t) for t in np.linspace(1, 0, self.steps[n] + 1, dtype=np.float32)]

    def _sample(self, velocity: Callable[[Array, float], Array], n: int) -> _Trajectory:
        """Pingpong for rf_denoiser models, Euler for rectified flows, over even levels."""
        pingpong = self.checkpoint.config.objective == "rf_denoiser"
        levels = self._levels(n)
        xs, vs = [self.noise[n][0]], []
        for i, (t, after) in enumerate(pairwise(levels)):
            v = velocity(xs[-1], t)
            if pingpong:
                x = (1 - after) * (xs[-1] - t * v) + after * self.noise[n][i + 1]
            else:
                x = xs[-1] + (after - t) * v
            vs.append(v)
            xs.append(x.astype(np.float32))
        return _Trajectory(xs, vs)

    def _decode(
        self, latents: Mapping[int, tuple[Array, ...]], *, half: bool
    ) -> dict[int, list[NDArray[np.int32]]]:
        with _session(self.files[Stage.DECODER, half]) as decoder:
            return {
                n: [
                    decoder({"latent": np.ascontiguousarray(z[:, :, :DECODED])})["pcm"]
                    for z in each
                ]
                for n, each in latents.items()
            }


@contextmanager
def _session(path: Path) -> Iterator[Callable[[Arrays], dict[str, Any]]]:
    """A function from inputs to outputs by name; half precision with its roundings."""
    import onnxruntime as ort

    import onnx

    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.enable_cpu_mem_arena = False
    model = onnx.load(str(path), load_external_data=False)
    if has_half(model):
        source = path.with_name(f"{path.name}.{os.getpid()}.part")
        onnx.save_model(emulated(model), str(source))
    else:
        source = path
    try:
        session = ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    finally:
        if source is not path:
            source.unlink()
    names = [port.name for port in session.get_outputs()]
    yield lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
