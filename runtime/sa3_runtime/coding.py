"""The autoencoder's part of a plan: source to latents, latents to sound, in windows or not.

Knows: where windows lie, what the decoders of this and older projects give. Doesn't know: the
sampler between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sa3_models.errors import RunFailed, UsageError
from sa3_models.geometry import CHANNELS, LIMITER_CEILING, SAMPLES_PER_LATENT
from sa3_runtime.plan import Gather, Narrow, Place, RunStage, Step
from sa3_runtime.windows import split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_models.stages import Port, StageIO
    from sa3_runtime.draft import Draft
    from sa3_runtime.request import Chunking

__all__ = ["chosen_window", "decode_steps", "encode_steps"]

# what decoders give, and the axis of their samples; only `pcm` is limited
DECODED = {"pcm": 1, "pcm_unbounded": 1, "audio": 2}
WINDOW = 128  # latents of a window when the request asks for windows


def chosen_window(chunking: Chunking, device: int, margin: int) -> int | None:
    """Latents coded in one piece, None for any number.

    Args:
        chunking: what the request says.
        device: what the device finds best.
        margin: receptive field per side; a window is at least four times that, and even.
    """
    if chunking == "off":
        return None
    window = min(device, WINDOW) if chunking == "on" else device
    window = max(window, 4 * margin)
    return window - window % 2


def encode_steps(
    draft: Draft, source: NDArray[np.float32], *, window: int | None, margin: int
) -> Iterator[Step]:
    """Encode a source to `init_latents`, cut to the clip and padded with silence.

    Args:
        draft: receives the buffers.
        source: float32 [2, n].
        window: latents of a window.
        margin: receptive field, latents per side.
    """
    io, geometry = draft.stage("enc"), draft.geometry
    frames, samples = geometry.frames, min(source.shape[1], geometry.samples)
    audio = np.zeros((1, CHANNELS, frames * SAMPLES_PER_LATENT), np.float32)
    audio[0, :, :samples] = source[:, :samples]
    draft.input("init_audio", audio)
    draft.latent("init_latents")
    port_in, port_out = io.inputs[0].name, io.outputs[0].name
    for part in split(frames, window or frames, margin):
        if part.length == frames:
            ports = ((port_in, "init_audio"),), ((port_out, "init_latents"),)
            yield RunStage("enc", *ports, frames)
            return
        shape = (1, CHANNELS, part.length * SAMPLES_PER_LATENT)
        heard = draft.work(f"enc_audio.{part.length}", shape, "float32")
        latent = draft.latent(f"enc_latent.{part.length}", part.length)
        yield Gather(heard, "init_audio", part.start * SAMPLES_PER_LATENT)
        yield RunStage("enc", ((port_in, heard),), ((port_out, latent),), part.length)
        skip, kept = part.first - part.start, part.last - part.first
        yield Place("init_latents", latent, 2, part.first, skip, kept)


def decode_steps(
    draft: Draft, *, window: int | None, margin: int, ceiling: float | None
) -> Iterator[Step]:
    """Decode `x` to the sound outputs, cut to the clip's samples.

    Args:
        draft: receives the buffers.
        window: latents of a window.
        margin: receptive field, latents per side.
        ceiling: of the limiter, None for its own.

    Raises:
        UsageError: the decoder's limiter takes no ceiling.
        RunFailed: the decoder's outputs are unknown.
    """
    io, geometry = draft.stage("dec"), draft.geometry
    port = next((p for p in (io.output(name) for name in DECODED) if p is not None), None)
    if port is None:
        raise RunFailed(
            "nothing is known about this decoder's outputs",
            found=", ".join(port.name for port in io.outputs),
            hint="export the autoencoder with this project",
        )
    extra = _ceiling(draft, io, ceiling, limited=port.name == "pcm")
    place = _outputs(draft, port)
    # what lies behind the clip shapes its end, one receptive field far
    total = min(geometry.frames, geometry.latents + margin + margin % 2)
    for part in split(total, window or total, margin):
        latent = "x"
        if part.length != geometry.frames:
            latent = draft.latent(f"dec_latent.{part.length}", part.length)
            yield Gather(latent, "x", part.start)
        shape = port.resolve(part.length)
        decoded = draft.work(f"dec_{port.name}.{part.length}", shape, port.dtype)
        inputs = ((io.inputs[0].name, latent), *extra)
        yield RunStage("dec", inputs, ((port.name, decoded),), part.length)
        at = part.first * SAMPLES_PER_LATENT
        count = min(part.last * SAMPLES_PER_LATENT, geometry.samples) - at
        if count > 0:
            yield place(decoded, at, (part.first - part.start) * SAMPLES_PER_LATENT, count)


def _outputs(draft: Draft, port: Port) -> Callable[[str, int, int, int], Step]:
    """Declare the sound outputs; gives the step that puts a decoded window into them."""
    samples = draft.geometry.samples
    draft.work("status", (1,), "int32", "output")
    if port.name == "pcm":
        draft.work("pcm", (samples, CHANNELS), "int16", "output")
        return lambda name, at, skip, count: Narrow("pcm", name, "status", at, skip, count)
    axis = DECODED[port.name]
    shape = (1, CHANNELS, samples) if axis == 2 else (1, samples, CHANNELS)
    draft.work(port.name, shape, port.dtype, "output")
    return lambda name, at, skip, count: Place(port.name, name, axis, at, skip, count)


def _ceiling(
    draft: Draft, io: StageIO, ceiling: float | None, *, limited: bool
) -> tuple[tuple[str, str], ...]:
    """The decoder's ceiling input, if it has one. A decoder without limiter is limited later."""
    if io.input("limiter_ceiling") is None:
        if ceiling is not None and limited:
            raise UsageError(
                "this decoder's limiter has a fixed ceiling",
                hint="export it with --ceiling-input, or leave --limiter-ceiling out",
            )
        return ()
    draft.input("limiter_ceiling", np.array(ceiling or LIMITER_CEILING, np.float32))
    return (("limiter_ceiling", "limiter_ceiling"),)
