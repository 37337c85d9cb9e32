"""Which files make a model, and what the runtime must know about it.

Knows: where stage files, tokenizer and configuration lie; how missing exports are made (in their
own process: the runtime never imports exporters). Doesn't know: sessions, devices, graphs.

A checkpoint directory may hold its stage files in a folder `onnx/` of its own: such a directory
needs no weights, only `model_config.json` and the tokenizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sa3_models import catalogue, paths
from sa3_models.checking import read_export
from sa3_models.checkpoint import Checkpoint
from sa3_models.config import ModelConfig
from sa3_models.config_file import read_model_config
from sa3_models.errors import ArtefactMissing, BuildFailed
from sa3_models.inventory import published_graph
from sa3_models.stages import DIT_PARTS, EXPORTER, RENDER_STAGES, Precision, Stage, stage_file
from sa3_runtime.request import Limits
from sa3_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sa3_models.catalogue import Model

__all__ = ["Bundle", "find_bundle"]


@dataclass(frozen=True)
class Bundle:
    """A model that can be rendered with.

    model: its row in the catalogue, or a directory as one.
    config: what its `model_config.json` says.
    allow_export: make missing exports from the checkpoint.
    talk: let the exporter show its progress on stderr.
    """

    model: Model
    config: ModelConfig
    allow_export: bool = True
    talk: bool = False

    @property
    def limits(self) -> Limits:
        """Defaults and limits of requests."""
        return Limits.of(self.model)

    @property
    def margins(self) -> Mapping[str, int]:
        """Receptive fields of encoder and decoder, in latents per side."""
        coder = self.config.autoencoder
        return {"enc": coder.encode_margin(), "dec": coder.decode_margin()}

    @property
    def tokenizer(self) -> Path:
        """Its `tokenizer.json`; need not exist."""
        return self.model.checkpoint / self.config.text_subfolder / "tokenizer.json"

    def onnx_file(
        self, stage: Stage, precision: Precision, lowering: str = "operators"
    ) -> Path | None:
        """An ONNX file of a stage, or None; a damaged one, or of another checkpoint, doesn't count.

        Pulled graphs of the published repository serve where there are no weights to export.
        Its autoencoders are BF16, which stands in for FP16 (never for FP32: no CPU runs it).

        Raises:
            ArtefactMissing: a file is damaged, or another under its name, and can't be made again.
        """
        name = f"{stage_file(stage, precision, lowering)}.onnx"
        own = self.model.checkpoint / "onnx" / name
        if own.is_file():
            return read_export(own).path
        exported = self._export_dir(stage) / name
        if exported.is_dir():  # no exporter could put a file there
            raise ArtefactMissing(
                f"{name} is a folder, not a file", found=str(exported), hint=f"rm -r {exported}"
            )
        if exported.is_file() and self._reason_against(exported) is None:
            return exported
        if self._has_weights:
            return None
        formats = [precision, *(["bf16"] if precision == "fp16" else [])]
        graphs = (published_graph(self.model, stage, number) for number in formats)
        return next(filter(None, graphs), None)

    def outdated(self, precision: Precision, lowering: str = "operators") -> tuple[str, ...]:
        """Exports that are there and don't count, each with the reason: they are made again."""
        if not self._has_weights:
            return ()
        names = {stage: f"{stage_file(stage, precision, lowering)}.onnx" for stage in Stage}
        paths_there = [self._export_dir(stage) / name for stage, name in names.items()]
        reasons = [self._reason_against(path) for path in paths_there if path.is_file()]
        return tuple(filter(None, reasons))

    def _reason_against(self, path: Path) -> str | None:
        """Why an export doesn't count: damaged, or not of this checkpoint and today's exporter.

        None if it does. The key of a directory holds its fingerprint already.

        Raises:
            ArtefactMissing: it is damaged, and without weights nothing can be made anew.
        """
        try:
            metadata = read_export(path).metadata
        except ArtefactMissing as error:
            if not self._has_weights:
                raise
            return error.what
        if not self._has_weights:
            return None
        if metadata.get("exporter", str(EXPORTER)) != str(EXPORTER):
            return f"{path.name} was made by another version of the exporter"
        if self.directory is None and metadata.get("checkpoint") not in (None, self._fingerprint):
            return f"{path.name} was made from another checkpoint"
        return None

    @cached_property
    def _fingerprint(self) -> str:
        return Checkpoint(self.model.checkpoint).fingerprint

    @property
    def _has_weights(self) -> bool:
        return any(self.model.checkpoint.glob("model*.safetensors*"))

    def onnx_files(
        self, precision: Precision, stages: Iterable[Stage] = RENDER_STAGES
    ) -> dict[Stage, Path]:
        """The ONNX files of some stages in one precision; missing ones are exported first.

        A whole DiT stands in for its two parts where only that is there.

        Raises:
            ArtefactMissing: a file is missing and may not or cannot be exported.
            BuildFailed: the exporter failed.
        """
        stages = tuple(stages)
        found = {stage: self.onnx_file(stage, precision) for stage in stages}
        whole = self.onnx_file(Stage.DIT, precision)
        missing = [stage for stage, path in found.items() if path is None]
        if whole is not None and any(stage in missing for stage in DIT_PARTS):
            found = {s: p for s, p in found.items() if s not in DIT_PARTS}
            found[Stage.DIT] = whole
            missing = [stage for stage, path in found.items() if path is None]
        if missing:
            self.export(missing, precision)
            found |= {stage: self.onnx_file(stage, precision) for stage in missing}
        for stage, path in found.items():
            if path is None:
                raise ArtefactMissing(
                    f"{self.model.name} has no {stage_file(stage, precision)}.onnx",
                    found=f"nothing in {self._export_dir(stage)}",
                    hint=f"sa3 export {self._word}",
                )
        return {stage: path for stage, path in found.items() if path is not None}

    def export(self, stages: Iterable[Stage], precision: Precision) -> None:
        """Export stages from the checkpoint, in a process of its own.

        Raises:
            ArtefactMissing: there is no checkpoint or no tokenizer, or exporting isn't allowed.
            TokenizerBroken: its tokenizer can't be read.
            BuildFailed: the exporter failed.
        """
        names = [stage.value for stage in stages]
        if not self._has_weights:
            raise ArtefactMissing(
                f"{self.model.name} has neither stage files nor a checkpoint to make them from",
                found=f"no {', '.join(names)} in {paths.export_dir(self.model.name)}, "
                f"no model.safetensors in {self.model.checkpoint}",
                hint=f"sa3 pull {self._word}" if self.model.repo else "copy the checkpoint again",
            )
        if not self.allow_export:
            raise ArtefactMissing(
                f"{self.model.name} isn't exported yet",
                found="; ".join(self.outdated(precision)) or f"missing: {', '.join(names)}",
                hint=f"sa3 export {self._word}",
            )
        from filelock import FileLock

        Tokenizer(self.tokenizer)  # rather missed now than after minutes of exporting
        home = paths.export_dir(self.model.name)
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sa3_onnx", "export", self._word]
        command += [word for name in names for word in ("--stage", name)]
        command += ["--precision", precision, "--lowering", "operators"]
        with FileLock(home / ".lock"):
            # another process may have made them while this one waited
            if all(self.onnx_file(Stage(name), precision) for name in names):
                return
            result = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdout=subprocess.DEVNULL,
                stderr=None if self.talk else subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        if result.returncode:
            lines = (result.stderr or "").strip().splitlines()
            if lines and lines[-1].startswith("sa3: "):  # a whole sentence, with its own hint
                found, _, advice = lines[-1].removeprefix("sa3: ").partition(" – ")
                hint = advice or None
                if "--out" in advice:  # the exporter's own flag; here it names the clip
                    hint = "free some space, or set SA3_HOME to a folder on another disk"
            else:
                found = lines[-1] if lines else f"the exporter ended with {result.returncode}"
                hint = f"sa3 export {self._word} shows more"
            raise BuildFailed(f"{self.model.name} could not be exported", found=found, hint=hint)

    @property
    def directory(self) -> str | None:
        """Its checkpoint directory, if it has no name in the catalogue."""
        return None if self.model.name in catalogue.names() else str(self.model.checkpoint)

    @property
    def _word(self) -> str:
        """What names the model on a command line."""
        return self.directory or self.model.name

    def _export_dir(self, stage: Stage) -> Path:
        return paths.export_dir(self.model.name, self.model.stage_dir(stage))


def find_bundle(
    name_or_dir: str | Path, *, allow_export: bool = True, talk: bool = False
) -> Bundle:
    """The bundle of a catalogue name or a directory.

    Raises:
        UsageError: no such model, or one that can't make clips.
        ArtefactMissing: its checkpoint isn't on this machine.
        CheckpointError: its configuration can't be read.
    """
    model = catalogue.resolve_generator(name_or_dir)
    if not (model.checkpoint / "model_config.json").is_file():
        raise ArtefactMissing(
            f"{model.name} isn't on this machine",
            found=f"nothing in {model.checkpoint}",
            hint=f"sa3 pull {model.name}" if model.repo else "choose another one with --model",
        )
    return Bundle(model, read_model_config(model.checkpoint), allow_export, talk)
