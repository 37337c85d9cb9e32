"""The recipe, a few hundred steps with another seed: losses fall, the weights can be exported.

Run: `python -m pytest -m train tools/demo_model/test_train.py`; needs torch and some minutes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.train


def test_losses_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codec and DiT with seed 11; the last logged mean lies a tenth below the first."""
    pytest.importorskip("torch")
    from safetensors import safe_open
    from tools.demo_model import export, train

    sizes = [
        "--clips",
        "96",
        "--latent-clips",
        "96",
        "--batch",
        "6",
        "--crop",
        "4",
        "--dit-batch",
        "16",
    ]
    arguments = ["--out", str(tmp_path), "--seed", "11", "--steps", "240", "--every", "60"]
    times = ["--codec-seconds", "1e9", "--dit-seconds", "1e9"]
    monkeypatch.setattr(sys, "argv", ["train", "both", *arguments, *sizes, *times])
    train.main()
    log = capsys.readouterr().out
    for part in ("codec", "dit"):
        losses = [float(v) for v in re.findall(rf"^{part} \d+ \d+s ([\d.]+)", log, re.MULTILINE)]
        if part == "codec":
            assert len(losses) == 4
            assert losses[-1] < 0.9 * losses[0], log
        else:  # logged every fourth time: once here; an untrained DiT's loss is about 2
            assert losses, log
            assert losses[-1] < 1.8, log
    target = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["export", "--weights", str(tmp_path), "--to", str(target)])
    export.main()
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "model.model.transformer.project_in.weight" in file.keys()  # noqa: SIM118
