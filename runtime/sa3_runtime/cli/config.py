"""`sa3 config`: every setting, its value and where that comes from.

Knows: the settings, the catalogue's share in them. Doesn't know: what they do.
"""

from __future__ import annotations

import click

from sa3_models.errors import Sa3Error
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.settings import SETTINGS, Value, config_path, gather
from sa3_runtime.view import View

__all__ = ["config", "with_catalogue"]


@click.command(
    cls=Command,
    examples=(
        "sa3 config",
        "SA3_STEPS=16 sa3 config --json",
        "echo 'model = \"small-music\"' >> ~/.config/sa3/config.toml",
    ),
)
@option("-m", "--model", metavar="NAME", section="Which", help="Show what holds for this model.")
@talkative
def config(model: str | None, view: View) -> None:
    """Show every setting with its value and its source.

    Settings are read from the settings file (a flat TOML table with the names below), from
    variables SA3_<NAME>, and from flags; each overrides the one before.
    """
    values = with_catalogue(gather({"model": model}))
    if view.json:
        settings = {
            setting.name: {
                "value": values[setting.name].value,
                "source": values[setting.name].source,
                "variable": setting.variable,
            }
            for setting in SETTINGS
        }
        view.object({"file": str(config_path()), "settings": settings})
        return
    view.out(f"settings file: {config_path()}{'' if config_path().is_file() else ' (none)'}")
    for setting in SETTINGS:
        entry = values[setting.name]
        shown = "(automatic)" if entry.value is None else str(entry.value)
        view.out(f"{setting.name:<10} {shown:<22} {entry.source:<12} {setting.meaning}")


def with_catalogue(values: dict[str, Value]) -> dict[str, Value]:
    """Fill in what the model decides where nothing else did; an unknown model decides nothing."""
    from sa3_models.catalogue import resolve
    from sa3_models.paths import sa3_home
    from sa3_runtime.cli.targets import output_folder

    values = dict(values)
    try:
        model = resolve(values["model"].value)
    except Sa3Error:
        model = None
    if model:
        own = {"steps": model.steps, "cfg": model.cfg, "sampler": model.sampler}
        own["seconds"] = min(model.seconds, float(model.max_seconds))
        for name, value in own.items():
            if values[name].value is None:
                values[name] = Value(value, "catalogue")
    for name, value in (
        ("home", str(sa3_home())),
        ("output", str(output_folder(None))),
        ("format", "wav"),
    ):
        if values[name].value is None:
            values[name] = Value(value, "default")
    return values
