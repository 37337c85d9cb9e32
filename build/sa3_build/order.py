"""One engine to build, as a value.

Knows: what decides an engine's content, and where it goes. Doesn't know: how it is made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from sa3_build.architectures import Architecture
from sa3_build.flavours import Flavour
from sa3_build.profiles import Range, Shapes, shapes_at
from sa3_build.recipes import estimate
from sa3_models.errors import ArtefactMissing
from sa3_models.onnx_file import OnnxFile
from sa3_models.sidecar import read_sidecar
from sa3_models.stages import Precision, Stage, stage_file

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """One graph, for some targets, with one TensorRT.

    ranges: the optimisation profiles asked for, in latent frames.
    home: folder of all artefacts; the plan goes to `<home>/<target>/<stage_dir>/<stem>.trt` for
    every target: built once, then linked, because one plan serves them all.
    """

    source: OnnxFile
    stage: Stage
    precision: Precision
    ranges: tuple[Range, ...]
    flavour: Flavour
    targets: tuple[Architecture, ...]
    home: Path
    stage_dir: str

    @property
    def name(self) -> str:
        """`sa3-sm-music/dit_step_fp16`: how talk about it calls it."""
        return f"{self.stage_dir}/{stage_file(self.stage, self.precision)}"

    def engine(self, target: Architecture) -> Path:
        """Where the engine of one target lies."""
        return self.home / target.name / f"{self.name}.trt"

    @property
    def profiles(self) -> tuple[tuple[Range | None, Shapes], ...]:
        """(range, shapes) of every optimisation profile; one without shapes if all are fixed."""
        shaped = [(span, shapes_at(self.source.inputs, span)) for span in self.ranges]
        return tuple(row for row in shaped if row[1]) or ((None, {}),)

    def key(self, target: Architecture) -> str:
        """Digest of everything that decides the engine: sources (by content), target, TensorRT,
        precision, profiles. Names of folders and the time of day are no part of it.
        """
        parts = {
            "source": sorted(self.source.sources.values()),
            "target": target.name,
            "flavour": self.flavour.name,
            "version": self.flavour.version(),
            "precision": self.precision,
            "profiles": [shapes for _, shapes in self.profiles],
            "recipe": _RECIPE,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def missing(self) -> Order | None:
        """The same order for those targets that have no engine of this key; None if all have."""
        lacking = tuple(target for target in self.targets if not self._is_built(target))
        return replace(self, targets=lacking) if lacking else None

    def estimate(self) -> tuple[float, int]:
        """(seconds, peak RSS in bytes) this build will roughly take."""
        return estimate(
            nodes=self.source.nodes,
            weight_bytes=self.source.weight_bytes,
            profiles=len(self.profiles),
        )

    def disk_bytes(self) -> int:
        """Room the engine will roughly need: its weights, and a share for the compiled code."""
        return round(1.15 * self.source.weight_bytes) + 4_000_000

    def _is_built(self, target: Architecture) -> bool:
        engine = self.engine(target)
        if not engine.is_file():
            return False
        try:
            sidecar = read_sidecar(engine)
        except ArtefactMissing:  # unreadable: build it again
            return False
        return (
            sidecar is not None
            and sidecar.engine_bytes == engine.stat().st_size
            and sidecar.key == self.key(target)
        )


_RECIPE = 1  # raised when `sa3_build.engine` changes what it builds from the same order
