"""The recipe, a few hundred steps with another seed: losses fall, the weights can be exported.

Run: `python -m pytest -m train tools/demo_model/test_train.py`; needs torch; a quarter of
an hour on two CPU cores.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.train
OPTIONS = """both --seed 11 --steps 200 --every 12 --clips 64 --latent-clips 64 --batch 4 --crop 4
    --dit-batch 6 --codec-seconds 1e9 --dit-seconds 1e9 --out"""


def test_losses_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waveform and spectra of the codec, velocity of the DiT, from the first logged to the last.

    The codec's total is left aside: the share of the spectra in it grows while it trains.
    """
    pytest.importorskip("torch")
    from safetensors import safe_open
    from tools.demo_model import export, train

    monkeypatch.setattr(sys, "argv", ["train", *OPTIONS.split(), str(tmp_path)])
    train.main()
    log = capsys.readouterr().out
    rows = {
        part: [
            [float(value) for value in line.split()]
            for line in re.findall(rf"^{part} \d+ \d+s (.+)$", log, re.MULTILINE)
        ]
        for part in ("codec", "dit")
    }
    first, last = rows["codec"][0], rows["codec"][-1]
    assert last[1] < first[1], log
    assert last[2] < first[2], log
    assert rows["dit"][-1][0] < 0.9 * rows["dit"][0][0], log
    target = tmp_path / "model"
    arguments = ["--weights", str(tmp_path), "--to", str(target), "--head", "32"]
    monkeypatch.setattr(sys, "argv", ["export", *arguments])
    export.main()
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "model.model.transformer.project_in.weight" in set(file.keys())
