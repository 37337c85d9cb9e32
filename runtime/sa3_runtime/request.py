"""What the user asks for, as a frozen value, and what a model sets.

Knows: which requests make sense, alone and for a model's limits. Doesn't know: stages, devices,
how anything is computed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sa3_models.errors import UsageError
from sa3_models.geometry import (
    LATENT_LEN_MAX,
    SAMPLE_RATE,
    SAMPLES_PER_LATENT,
    latent_len_for,
    samples_for,
)
from sa3_runtime.values import (
    SECONDS_MAX,
    flag,
    number,
    one_of,
    path,
    ranges,
    seen,
    text,
    whole,
)

if TYPE_CHECKING:
    from sa3_models.catalogue import Model

__all__ = ["SEED_MAX", "Chunking", "Limits", "Request"]

SEED_MAX = 2**64 - 1
STEPS_MAX = 1000
SECONDS_DEFAULT = 30.0
INIT_NOISE_DEFAULT = 0.7
INIT_NOISE_MIN = 0.01

Chunking = Literal["auto", "on", "off"]

# what each value of a request has to be, if it is given
_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "prompt": text,
    "seconds": partial(number, high=SECONDS_MAX, open_below=True),
    "seed": partial(whole, high=SEED_MAX),
    "clip": partial(whole, high=2**32 - 1),
    "steps": partial(whole, low=1, high=STEPS_MAX),
    "sampler": text,
    "schedule": text,
    "cfg": number,
    "negative_prompt": text,
    "apg": partial(number, high=1),
    "rescale": partial(number, high=1),
    "init_audio": partial(path, hint="sound itself goes to generate or to render(source=…)"),
    "init_noise_level": partial(number, low=INIT_NOISE_MIN, high=1),
    "inpaint": ranges,
    "paste": flag,
    "headroom": partial(number, high=60),
    "chunking": partial(one_of, known=("auto", "on", "off")),
    "limiter_ceiling": partial(number, high=1, open_below=True),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model sets: its defaults and its longest clip.

    name: the model, for messages.
    max_seconds: longest clip it was trained for.
    steps, sampler, cfg, seconds: its defaults.
    """

    name: str
    max_seconds: float
    steps: int
    sampler: str
    cfg: float
    seconds: float = SECONDS_DEFAULT

    @classmethod
    def of(cls, model: Model) -> Limits:
        """What a row of the catalogue sets."""
        return cls(
            name=model.name,
            max_seconds=float(model.max_seconds),
            steps=model.steps,
            sampler=model.sampler,
            cfg=model.cfg,
            seconds=float(model.seconds),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One clip to be made. None means "the model's default".

    prompt: what to play; empty means unconditional.
    seconds: length; None is the source's length when editing, else the model's default.
    seed: 0 … 2⁶⁴−1; None or −1 picks one and reports it.
    clip: index of the clip in a batch that shares a seed (another stream of noise each).
    steps, sampler, schedule: how to sample (sa3_runtime.samplers, .schedules).
    cfg: guidance scale, 1 = none. negative_prompt, apg (0 … 1), rescale (0 … 1) belong to it.
    init_audio: path of the source to start from.
    init_noise_level: how far to go from it, 0.01 (stay) … 1.
    inpaint: ranges of seconds to make anew, keeping the rest of the source; a range behind the end
        of the source continues it.
    paste: keep the kept parts to the sample; False is what the reference does.
    headroom: seconds rendered beyond the end and cut off, as the reference does with 6.
    chunking: code audio in windows: "auto" (what the device finds best), "on", "off".
    limiter_ceiling: peak of the output, 0 … 1; for decoders built with that input.
    """

    prompt: str = ""
    seconds: float | None = None
    seed: int | None = None
    clip: int = 0
    steps: int | None = None
    sampler: str | None = None
    schedule: str | None = None
    cfg: float | None = None
    negative_prompt: str | None = None
    apg: float | None = None
    rescale: float | None = None
    init_audio: str | None = None
    init_noise_level: float | None = None
    inpaint: tuple[tuple[float, float], ...] = ()
    paste: bool = True
    headroom: float = 0.0
    chunking: Chunking = "auto"
    limiter_ceiling: float | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            UsageError: a value out of range, or an option without what it belongs to.
        """
        if isinstance(self.seed, Integral) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                object.__setattr__(self, entry.name, _CHECKS[entry.name](entry.name, value))
        if not self.negative_prompt:
            object.__setattr__(self, "negative_prompt", None)
        if self.seconds is not None and samples_for(self.seconds) < 1:
            raise UsageError("seconds is less than one sample", found=f"{self.seconds}")
        if self.init_noise_level is not None and self.init_audio is None:
            raise _useless("init_noise_level", "init audio", "--init-audio")
        if self.inpaint and self.init_audio is None:
            raise _useless("inpaint", "init audio", "--init-audio")
        if not self.paste and not self.inpaint:
            raise _useless("no-paste", "an inpaint range", "--inpaint START:END")

    def resolve(self, limits: Limits, *, source_seconds: float | None = None) -> Request:
        """The same request with nothing left open: seed, length, defaults, the source's full path.

        Args:
            limits: of the model.
            source_seconds: length of the source audio, when editing.

        Raises:
            UsageError: too long for the model, a range outside the clip, or an option of guidance
                without guidance.
        """
        seconds = self._length(limits, source_seconds)
        frames = latent_len_for(seconds + self.headroom)
        if frames + frames % 2 > LATENT_LEN_MAX:
            raise UsageError(
                "clip and headroom together are too long",
                found=f"{seconds + self.headroom:g} s",
                hint=f"at most {LATENT_LEN_MAX * SAMPLES_PER_LATENT / SAMPLE_RATE:.1f} s",
            )
        for start, end in self.inpaint:
            if start >= seconds or end > seconds + 1 / SAMPLE_RATE:
                raise UsageError(
                    "an inpaint range lies outside the clip",
                    found=f"{start:g}:{end:g} in {seconds:g} s",
                    hint="make the clip longer with --seconds to continue it",
                )
        cfg = limits.cfg if self.cfg is None else self.cfg
        if cfg == 1:
            for name in ("negative_prompt", "apg", "rescale"):
                if getattr(self, name) is not None:
                    raise _useless(name, "guidance", "--cfg other than 1")
        source = self.init_audio
        if source is not None and Path(source).is_file():
            source = str(Path(source).absolute())
        level = self.init_noise_level
        if level is None:
            level = INIT_NOISE_DEFAULT if self.init_audio and not self.inpaint else 1.0
        return replace(
            self,
            seconds=seconds,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            steps=limits.steps if self.steps is None else self.steps,
            sampler=self.sampler or limits.sampler,
            cfg=cfg,
            init_audio=source,
            init_noise_level=level if self.init_audio else None,
        )

    def _length(self, limits: Limits, source_seconds: float | None) -> float:
        """Seconds: as asked for, else up to the end of source and ranges, else the model's.

        Raises:
            UsageError: less than a sample, or more than the model can make.
        """
        longest = limits.max_seconds
        if self.seconds is not None:
            seconds = self.seconds
        elif source_seconds is not None:
            seconds = max(source_seconds, *(end for _, end in self.inpaint), 0.0)
        else:
            seconds = min(limits.seconds, longest)
        if samples_for(seconds) < 1:
            raise UsageError("the source is empty", hint="give the length with --seconds")
        if seconds <= longest:
            return seconds
        if self.seconds is not None:
            raise UsageError(
                f"{seconds:g} s is too long for {limits.name}",
                found=f"its limit is {longest:g} s",
                hint=f"choose seconds from {1 / SAMPLE_RATE:.5f} to {longest:g}",
            )
        if source_seconds is not None and source_seconds <= longest:
            raise UsageError(
                f"an inpaint range ends later than {limits.name} can make",
                found=f"{seconds:g} s, its limit is {longest:g} s",
            )
        raise UsageError(
            f"the source is longer than {limits.name} can make",
            found=f"its limit is {longest:g} s",
            hint="say with --seconds how much of it to use",
        )

    def as_dict(self) -> dict[str, Any]:
        """The options that differ from a plain request, JSON-ready; `from_dict` reads them."""
        defaults = Request()
        values = {k: v for k, v in asdict(self).items() if v != getattr(defaults, k)}
        return {"prompt": self.prompt, **values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """Build from what `as_dict` gave.

        Raises:
            UsageError: an unknown key, or a value that makes no sense.
        """
        if not isinstance(data, Mapping):
            raise UsageError("a request is an object of options", found=seen(data))
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(str(key) for key in set(data) - known):
            raise UsageError(
                "unknown option in a request",
                found=", ".join(unknown),
                hint=f"known: {', '.join(sorted(known))}",
            )
        return cls(**data)


def _useless(option: str, needs: str, flag: str) -> UsageError:
    return UsageError(
        f"{option.replace('_', ' ')} has no effect without {needs}",
        hint=f"give {flag}, or leave it out",
    )
