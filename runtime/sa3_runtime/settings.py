"""Settings and where each of them came from.

Lowest to highest: built-in defaults, the model's row in the catalogue, the file
`$XDG_CONFIG_HOME/sa3/config.toml`, variables `SA3_*`, flags. Knows: names, types, sources.
Doesn't know: what a setting does. Imports nothing heavy before it is asked for a value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa3_models.errors import UsageError

__all__ = ["SETTINGS", "Setting", "Value", "apply_environment", "config_path", "gather"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    name: in the file; the variable is `SA3_<NAME>`. kind: type a value is converted to.
    default: None when the model or the machine decides. meaning: for `sa3 config` and the docs.
    """

    name: str
    kind: type
    default: Any
    meaning: str

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return f"SA3_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its source: "default", "catalogue", a file, a variable or "flag"."""

    value: Any
    source: str


SETTINGS: tuple[Setting, ...] = (
    Setting("model", str, "demo", "model: a name of `sa3 list` or a checkpoint directory"),
    Setting("seconds", float, None, "length of a clip (the model's own, mostly 30)"),
    Setting("steps", int, None, "sampling steps (the model's own number)"),
    Setting("cfg", float, None, "guidance scale (the model's own)"),
    Setting("sampler", str, None, "pingpong, euler, rk4 or dpmpp (the model's own)"),
    Setting("schedule", str, None, "logsnr, full, full_sine, flux or none (the model's own)"),
    Setting("device", str, None, "cpu, cuda or cuda:N (CUDA if there is one, else the CPU)"),
    Setting("precision", str, None, "fp16, fp8 or fp32 (what the device is best at)"),
    Setting("threads", int, None, "CPU threads (the cores this process may use)"),
    Setting("format", str, None, "sound format where the file name does not say it (wav)"),
    Setting("output", str, None, "folder for clips without a folder of their own (output/)"),
    Setting("home", str, None, "folder of engines, exports and checkpoints (models/)"),
    Setting("offline", bool, False, "never ask the network"),
)


def config_path() -> Path:
    """The settings file; it need not exist."""
    if home := os.environ.get("XDG_CONFIG_HOME"):
        return Path(home) / "sa3" / "config.toml"
    from platformdirs import user_config_path

    return user_config_path("sa3", appauthor=False) / "config.toml"


def gather(flags: Mapping[str, Any] | None = None) -> dict[str, Value]:
    """Every setting with its value and source; the catalogue is the caller's to fill in.

    Args:
        flags: values given on the command line; None means not given.

    Raises:
        UsageError: an unknown name in the file, or a value of the wrong type, with its place.
    """
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    path = config_path()
    for name, value in _from_file(path).items():
        values[name] = Value(value, str(path))
    for setting in SETTINGS:
        text = os.environ.get(setting.variable)
        if text:
            values[setting.name] = Value(
                _converted(setting, text, setting.variable), setting.variable
            )
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = Value(value, "flag")
    return values


def apply_environment() -> None:
    """Pass on what other packages read from the environment only: model, home, being offline."""
    values = gather()
    if values["model"].source != "default":
        os.environ.setdefault("SA3_MODEL", values["model"].value)
    if values["home"].value:
        os.environ.setdefault("SA3_HOME", str(Path(values["home"].value).expanduser()))
    if values["offline"].value:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    import tomllib

    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError("the settings file cannot be read", found=f"{path}: {why}") from error
    known = {setting.name: setting for setting in SETTINGS}
    for name in table:
        if name not in known:
            raise UsageError(
                "unknown setting", found=f"{name} in {path}", hint=f"known: {', '.join(known)}"
            )
    return {
        name: _converted(known[name], value, f"{path}: {name}") for name, value in table.items()
    }


def _converted(setting: Setting, value: Any, where: str) -> Any:
    """A value of the setting's kind; text is read as a number or a switch where one is due."""
    import msgspec

    try:
        return msgspec.convert(value, setting.kind, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        kinds = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise UsageError(
            f"{setting.name} must be {kinds[setting.kind]}", found=f"{value!r} in {where}"
        ) from None
