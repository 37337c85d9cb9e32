"""Run the command line: in this process where that is enough, in its own where streams matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[3]
RATE = 44_100


@dataclass(frozen=True)
class Ran:
    """Exit code and streams of one run."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """What --json printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def paths(self) -> list[Path]:
        """The paths on standard output."""
        return [Path(line) for line in self.out.splitlines()]


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every test has its own home, settings, output folder and present folder."""
    for name in list(os.environ):
        if name.startswith("SA3_") or name in ("NO_COLOR", "FORCE_COLOR", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SA3_MODEL", "")  # a run may set it: so it is undone
    monkeypatch.delenv("SA3_MODEL")
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SA3_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("SA3_DEVICE", "cpu")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sa3(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """sa3("a prompt", "--seconds", 1) runs the command line in this process."""
    from sa3_runtime.cli.app import main

    def run(*words: object) -> Ran:
        capfd.readouterr()
        code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def clip(sa3: Callable[..., Ran], stub: Path) -> Callable[..., Ran]:
    """clip("a prompt", …) makes short clips with the stub model."""
    return lambda *words: sa3("generate", "--model", stub, "--seconds", 0.5, *words)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is a fault: what a test refuses must be refused before."""

    def load(*args: Any, **kw: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("sa3_runtime.session.load", load)


@pytest.fixture
def tone(own_place: Path) -> Path:
    """Three seconds of 440 Hz as a WAV file."""
    from sa3_runtime.audio.wav import wav_bytes

    t = np.arange(3 * RATE) / RATE
    x = np.round(9000 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
    path = own_place / "tone.wav"
    path.write_bytes(wav_bytes(np.stack([x, x], 1), RATE))
    return path


@pytest.fixture
def pcm_of() -> Callable[[Path], NDArray[np.int16]]:
    """pcm_of(path) reads a clip as int16 [n, 2]."""
    from sa3_runtime import audio

    return lambda path: np.round(audio.read(path).samples.T * 32768).astype(np.int16)


@pytest.fixture
def spawn(own_place: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """spawn("a prompt", …, env={…}) runs the command line in a process of its own."""
    return lambda *words, **kw: subprocess.run(
        command(*words), env=environment(kw.pop("env", {})), capture_output=True, check=False,
        timeout=300, **kw,
    )  # fmt: skip


@pytest.fixture
def script(own_place: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """script("print(1)") runs Python code in a process of its own."""
    return lambda code: subprocess.run(
        [sys.executable, "-c", code],
        env=environment({}), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.fixture
def start(own_place: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """As `spawn`, but the process is the caller's to feed and to end.

    wrap="| head" adds shell syntax behind the command.
    """

    def run(*words: object, wrap: str = "", **kw: Any) -> subprocess.Popen[bytes]:
        line = command(*words)
        if wrap:
            line = ["bash", "-o", "pipefail", "-c", f'"$@" {wrap}', "bash", *line]
            kw.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen(line, env=environment(kw.pop("env", {})), **kw)

    return run


def command(*words: object) -> list[str | bytes]:
    return [
        sys.executable, "-m", "sa3_runtime",
        *(word if isinstance(word, bytes) else str(word) for word in words),
    ]  # fmt: skip


def environment(changes: dict[str, str | None]) -> dict[str, str]:
    shelves = (ROOT / shelf for shelf in ("models", "onnx", "build", "runtime"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, shelves))}
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env
