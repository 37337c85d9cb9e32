"""A published checkpoint directory: configuration, tensors by name, nothing left unexplained.

Knows: where the files of a checkpoint lie, the spellings its tensors come in, which of them may be
ignored and why. Doesn't know: what is computed with them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import ModelConfig, TextConfig
from sa3_models.config_file import read_model_config, read_text_config
from sa3_models.errors import CheckpointError
from sa3_models.manifest import (
    IGNORED,
    Shape,
    autoencoder_tensors,
    conditioner_tensors,
    dit_tensors,
    model_tensors,
    text_tensors,
)
from sa3_models.safetensors_file import TensorEntry, read_rows, scan

__all__ = ["Checkpoint", "Tensors"]

WEIGHTS = "model.safetensors"
_TEXT_PREFIXES = ("model.encoder.", "encoder.", "")
_SPELLINGS = (
    (re.compile(r"\.parametrizations\.weight\.original0$"), ".weight_g"),
    (re.compile(r"\.parametrizations\.weight\.original1$"), ".weight_v"),
)


class Tensors:
    """The tensors of one part (DiT, autoencoder, …) by their names inside that part.

    Reading checks nothing but finiteness: shapes were checked when the part was opened.
    """

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError if the part has none of that name."""
        return self._entries[name].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """A tensor (or rows [start, stop) of it) as a new float32 array.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        values = read_rows(self._entries[name], start, stop)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"tensor '{name}' holds values that are not finite",
                found=f"{int((~np.isfinite(values)).sum())} of {values.size} in "
                f"{self._entries[name].path.name}",
                hint="download the checkpoint again",
            )
        return values

    def weight_norm(self, name: str) -> NDArray[np.float32]:
        """The effective weight of a weight-normed layer: g·v/‖v‖ over all but the output axis."""
        g, v = (self.read(f"{name}.weight_{part}").astype(np.float64) for part in "gv")
        norm = np.sqrt((v**2).sum(axis=tuple(range(1, v.ndim)), keepdims=True))
        weight: NDArray[np.float32] = (g * v / norm).astype(np.float32)
        return weight


class Checkpoint:
    """A directory in the published layout.

    Attributes:
        directory: the directory.
        config: the checked `model_config.json`.

    Raises (construction and properties):
        CheckpointError: names the file, or the tensors that are missing, extra or misshaped.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not a checkpoint directory",
                found="a file" if directory.exists() else "nothing there",
            )
        self.directory = directory
        self.config: ModelConfig = read_model_config(directory)

    @cached_property
    def text_config(self) -> TextConfig:
        """The text encoder's configuration."""
        return read_text_config(self.text_directory)

    @property
    def text_directory(self) -> Path:
        """Directory of the text encoder and its tokenizer."""
        return self.directory / self.config.text_subfolder

    @cached_property
    def dit(self) -> Tensors:
        """Tensors of the DiT and, under `conditioner.`, of the conditioners."""
        if self.config.dit is None:
            raise CheckpointError(
                f"{self.directory} holds an autoencoder alone",
                hint="give the directory of a complete model",
            )
        expected: dict[str, Shape] = dict(dit_tensors(self.config.dit))
        prefix = {name: f"model.model.{name}" for name in expected}
        for name, shape in conditioner_tensors(self.config.dit).items():
            expected[f"conditioner.{name}"] = shape
            prefix[f"conditioner.{name}"] = f"conditioner.conditioners.{name}"
        return self._part(self._model_entries, expected, prefix)

    @cached_property
    def autoencoder(self) -> Tensors:
        """Tensors of the SAME autoencoder, names as in a stand-alone file."""
        expected = autoencoder_tensors(self.config.autoencoder)
        lead = "" if self.config.dit is None else "pretransform.model."
        return self._part(self._model_entries, expected, {name: lead + name for name in expected})

    @cached_property
    def text(self) -> Tensors:
        """Tensors of the T5Gemma encoder, names without prefix."""
        entries = _entries(self.text_directory)
        lead = next((p for p in _TEXT_PREFIXES if f"{p}embed_tokens.weight" in entries), None)
        if lead is None:
            raise CheckpointError(
                f"{self.text_directory / WEIGHTS} holds no T5Gemma encoder",
                found="no tensor embed_tokens.weight under any known prefix",
            )
        expected = text_tensors(self.text_config)
        names = {name: lead + name for name in expected}
        _refuse_extra(entries, set(names.values()), self.text_directory / WEIGHTS)
        return self._part(entries, expected, names)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 that tells checkpoints apart without reading all of a large one.

        Covers the configurations, every tensor's name, type and shape, and 4 KB from the start,
        middle and end of each tensor: retraining changes them all.
        """
        digest = hashlib.sha256()
        parts = [self.directory, *([self.text_directory] if self.config.dit else [])]
        for part in parts:
            for name in ("model_config.json", "config.json", "tokenizer.json"):
                if (part / name).is_file():
                    digest.update((part / name).read_bytes())
            for name, entry in sorted(_entries(part).items()):
                digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
                size = int(np.prod(entry.shape, dtype=np.int64)) * (
                    4 if entry.dtype == "F32" else 2
                )
                with entry.path.open("rb") as file:
                    for at in {0, max(0, size // 2 - 2048), max(0, size - 4096)}:
                        file.seek(entry.offset + at)
                        digest.update(file.read(min(4096, size)))
        return digest.hexdigest()

    @cached_property
    def _model_entries(self) -> Mapping[str, TensorEntry]:
        entries = _entries(self.directory)
        _refuse_extra(entries, set(model_tensors(self.config)), self.directory / WEIGHTS)
        return entries

    @staticmethod
    def _part(
        entries: Mapping[str, TensorEntry], expected: Mapping[str, Shape], names: Mapping[str, str]
    ) -> Tensors:
        missing = [names[name] for name in expected if names[name] not in entries]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of {len(expected)} tensors",
                found="missing " + _some(missing),
                hint="it is incomplete, or its model_config.json belongs to another model",
            )
        wrong = [
            f"{names[name]} is {list(entries[names[name]].shape)}, expected "
            f"{['any' if size is None else size for size in shape]}"
            for name, shape in expected.items()
            if not _matches(entries[names[name]].shape, shape)
        ]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} tensors do not have the shape that model_config.json implies",
                found=_some(wrong),
                hint="the weights and the configuration belong to different models",
            )
        return Tensors({name: entries[names[name]] for name in expected})


def _matches(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )


def _some(items: list[str], most: int = 4) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _refuse_extra(entries: Mapping[str, TensorEntry], known: set[str], path: Path) -> None:
    extra = [
        name
        for name in entries
        if name not in known
        and not any(
            fnmatchcase(name.removeprefix("pretransform.model."), pattern) for pattern, _ in IGNORED
        )
    ]
    if extra:
        raise CheckpointError(
            f"{path} holds {len(extra)} tensors that no stage uses",
            found=_some(extra),
            hint="it belongs to another model or a newer release",
        )


def _entries(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of `model.safetensors`, or of the shards that its index names."""
    index = directory / f"{WEIGHTS}.index.json"
    if index.is_file() and not (directory / WEIGHTS).is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards", found=str(error)) from error
        files = [directory / shard for shard in shards]
    else:
        files = [directory / WEIGHTS]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in scan(file).items():
            for pattern, spelling in _SPELLINGS:
                name = pattern.sub(spelling, name)
            entries[name] = entry
    return entries
