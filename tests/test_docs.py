"""What the documentation shows is run: bash blocks as they are, Python blocks in their order.

The model is the tiny music checkpoint: the commands of the docs name none, or `demo`. Left out are
blocks with a comment `<!-- not run: why -->` above them, lines that end in `# needs: …` (network, a
GPU), and the project's other scripts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sa3_models.errors import Sa3Error

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.is_file() and "decisions" not in page.parts
]
FENCE = re.compile(
    r"^(?P<mark><!-- not run: [^\n]*-->\n)?```(?P<kind>bash|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LEFT_OUT = re.compile(r"# needs: |^\s*(\./(install|bootstrap)\.sh|\./script/|git |cd |pip )")


def blocks(page: Path, kind: str) -> list[str]:
    found = FENCE.finditer(page.read_text("utf-8"))
    return [match["text"] for match in found if match["kind"] == kind and not match["mark"]]


def commands() -> list:
    found = []
    for page in PAGES:
        for number, text in enumerate(blocks(page, "bash"), 1):
            lines = [line for line in text.splitlines() if not LEFT_OUT.search(line)]
            if any("./sa3" in line for line in lines):
                found.append(pytest.param("\n".join(lines), id=f"{page.name}-{number}"))
    return found


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """Exports are made once, by the first example that needs them."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def place(tmp_path, monkeypatch, home, data):
    """A folder that looks like the project's, with the sounds the examples start from."""
    from sa3_runtime.audio.wav import wav_bytes

    for name in list(os.environ):
        if name.startswith("SA3_"):
            monkeypatch.delenv(name)
    shelves = (ROOT / shelf for shelf in ("models", "onnx", "build", "runtime"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, shelves)))
    monkeypatch.setenv("SA3_HOME", str(home))
    monkeypatch.setenv("SA3_MODEL", str(data / "tiny-music"))
    monkeypatch.setenv("SA3_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("SA3_DEVICE", "cpu")
    monkeypatch.setenv("SA3_SECONDS", "2")  # where an example says nothing
    monkeypatch.setenv("SA3_STEPS", "2")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    t = np.arange(3 * 44_100) / 44_100
    pcm = np.round(9000 * np.sin(2 * np.pi * np.array([440, 550]) * t[:, None])).astype(np.int16)
    for name in ("piano.wav", "beat.wav"):
        Path(name).write_bytes(wav_bytes(pcm, 44_100))
    launcher = Path("sa3")
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sa3_runtime "$@"\n')
    launcher.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("text", commands())
def test_the_commands_of_the_docs_work(place, text):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", re.sub(r"(-m|--model) demo\b", "", text)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_of_the_docs_works(place, data, page):
    names: dict[str, object] = {"MODEL": data / "tiny-music"}
    for number, text in enumerate(blocks(page, "python"), 1):
        text = text.replace('"demo"', "MODEL")
        exec(compile(text, f"{page.name}-{number}", "exec"), names)


def test_the_fields_and_verbs_of_the_docs_are_all_there_are():
    from dataclasses import fields

    from sa3_runtime.audio.formats import FORMAT_NAMES
    from sa3_runtime.cli.app import VERBS
    from sa3_runtime.request import Request
    from sa3_runtime.settings import SETTINGS

    python = (ROOT / "docs" / "python.md").read_text("utf-8")
    for entry in fields(Request):
        assert f"`{entry.name}`" in python, entry.name
    cli = (ROOT / "docs" / "cli.md").read_text("utf-8")
    for name in (*VERBS, *FORMAT_NAMES, *(setting.name for setting in SETTINGS)):
        assert f"`{name}`" in cli, name


def test_every_exit_code_is_in_the_docs():
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    codes = {0, 1, 130}
    kinds = [Sa3Error]
    while kinds:
        kind = kinds.pop()
        codes.add(kind.exit_code)
        kinds += kind.__subclasses__()
    section = text[text.index("Exit codes:") : text.index("An error is one")]
    for code in codes:
        assert re.search(rf"(?<!\d){code} ", section), code
