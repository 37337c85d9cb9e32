"""`sa3 play`: hand a sound file to a player that is installed.

Knows: names of players. Doesn't know: sound devices.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import click

from sa3_models.errors import RunFailed, UsageError
from sa3_runtime.cli.common import Command, talkative
from sa3_runtime.view import View

__all__ = ["find_player", "play", "play_file"]

# arguments in front of the file, in order of preference; aplay knows WAV only
_PLAYERS: dict[str, tuple[str, ...]] = {
    "afplay": (),
    "pw-play": (),
    "paplay": (),
    "ffplay": ("-nodisp", "-autoexit", "-loglevel", "error"),
    "mpv": ("--no-video", "--really-quiet"),
    "play": ("-q",),
    "aplay": ("-q",),
}


@click.command(cls=Command, examples=("sa3 play output/clip.wav",))
@click.argument("file", type=click.Path(path_type=Path))
@talkative
def play(file: Path, view: View) -> None:
    """Play FILE through the first player found on this machine."""
    if file.is_dir() or not file.is_file():
        raise UsageError("there is no such sound file", found=str(file))
    player = play_file(file)
    if view.json:
        view.object({"path": str(file), "player": player})


def find_player(path: Path) -> str:
    """The player that would play a file of that name.

    Raises:
        RunFailed: none is installed.
    """
    wav = path.suffix.lower() in (".wav", ".wave")
    for name in _PLAYERS:
        if shutil.which(name) and (wav or name != "aplay"):
            return name
    otherwise = f"open {path}" if path.exists() else "leave --play out"
    raise RunFailed(
        "no player was found", hint=f"install one of {', '.join(_PLAYERS)}, or {otherwise}"
    )


def play_file(path: Path) -> str:
    """Play a file to its end; returns the player's name.

    Raises:
        RunFailed: no player is installed, or it failed.
    """
    player = find_player(path)
    line = [shutil.which(player) or player, *_PLAYERS[player], str(path.absolute())]
    ended = subprocess.run(
        line, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    if ended.returncode:
        said = " ".join(ended.stderr.split())[-200:]
        raise RunFailed(f"{player} could not play {path.name}", found=said or None)
    return player
