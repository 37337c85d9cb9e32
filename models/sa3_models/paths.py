"""Where artefacts lie on this machine.

Knows: `SA3_HOME`, the layout below it, the user's cache folder. Doesn't know: which files exist,
models, the hub.

    <home>/checkpoints/<name>/            pulled checkpoints, as their repository lays them out
    <home>/onnx/<key>/<stage dir>/        our own exports
    <home>/onnx/published/<stage dir>/    ONNX of the published repository
    <home>/sm_<cc>/<stage dir>/           engines of one compute capability
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "PUBLISHED",
    "architecture_name",
    "cache_dir",
    "checkpoint_dir",
    "engine_dir",
    "export_dir",
    "project_root",
    "sa3_home",
]

PUBLISHED = "published"  # the key under onnx/ that holds files of the published repository


def project_root() -> Path | None:
    """The folder with the launcher, or None when the package is installed without the project."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "sa3").is_file() else None


def sa3_home() -> Path:
    """Folder of all artefacts: `SA3_HOME`, else the project's `models/`, else the user's data."""
    if chosen := os.environ.get("SA3_HOME"):
        return Path(chosen).expanduser().absolute()
    if root := project_root():
        return root / "models"
    from platformdirs import user_data_path

    return user_data_path("sa3", appauthor=False)


def checkpoint_dir(name: str) -> Path:
    """Where the checkpoint of a catalogue model is pulled to."""
    return sa3_home() / "checkpoints" / name


def export_dir(key: str, stage_dir: str = "") -> Path:
    """Where exports of the model `key` lie; `stage_dir` names one stage's folder below it."""
    return sa3_home() / "onnx" / key / stage_dir


def architecture_name(text: str) -> str:
    """The name of a compute capability: "sm_90" for "sm_90", "sm90", "90" and "9.0"."""
    return "sm_" + text.lower().removeprefix("sm").lstrip("_").replace(".", "")


def engine_dir(architecture: str, stage_dir: str = "") -> Path:
    """Where engines of an architecture lie.

    Args:
        architecture: In any spelling that `architecture_name` takes.
        stage_dir: Folder of one stage below it.
    """
    return sa3_home() / architecture_name(architecture) / stage_dir


def cache_dir() -> Path:
    """What can be made again (compiled kernels, timing): `SA3_CACHE`, else the user's cache."""
    if chosen := os.environ.get("SA3_CACHE"):
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("sa3", appauthor=False)
