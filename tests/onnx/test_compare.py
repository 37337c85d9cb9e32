"""The fidelity report: what it measures, and that it notices a bad export."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sa3_models.checkpoint import Checkpoint
from sa3_onnx import compare as module
from sa3_onnx import figures
from sa3_onnx.cli import compare as command
from sa3_onnx.compare import compare


def test_half_precision_of_the_tiny_models_reaches_the_target(tiny: Path, tmp_path: Path) -> None:
    report = compare(Checkpoint(tiny), lambda _: tmp_path, lengths=(5, 64), steps=3)
    assert report.passed, report.text()
    assert report.text_worst > 0.9999
    assert [row.steps for row in report.lengths] == [3, 3]
    for row in report.lengths:
        assert 0.99999 < row.cosine_worst <= row.cosine_mean < 1, "roundings must show"
        assert abs(row.std_ratio - 1) < 1e-3
        assert 40 < row.psnr_db < 120
        assert row.clipped == row.reference_clipped == 0
        assert abs(row.crest_db - row.reference_crest_db) < 0.5
    assert "reached" in report.text()


def test_long_lengths_are_compared_at_two_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG", 40)
    report = compare(Checkpoint(data / "tiny-music"), lambda _: tmp_path, lengths=(48,), steps=8)
    assert report.lengths[0].steps == module.LONG_STEPS


def test_a_bad_export_misses_the_target(data: Path, tmp_path: Path) -> None:
    """Weights of the half-precision step are scaled behind its back: its metadata still fits."""
    folder = shutil.copytree(data / "tiny-music", tmp_path / "model")
    out = tmp_path / "home" / "out"
    assert compare(Checkpoint(folder), lambda _: out, lengths=(5,), steps=2).passed
    path = out / "dit_step_fp16.onnx.data"
    values = np.fromfile(path, np.float16)
    path.write_bytes(np.where(np.abs(values) < 0.02, 0, values).astype(np.float16).tobytes())
    report = compare(Checkpoint(folder), lambda _: out, lengths=(5,), steps=2)
    assert not report.passed
    assert report.lengths[0].cosine_worst < 0.999
    assert "MISSED" in report.text()


def test_the_command_prints_a_report_or_an_object(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SA3_HOME", str(tmp_path))
    words = [str(data / "tiny-music"), "--length", "5", "--steps", "1"]
    result = CliRunner().invoke(command, [*words, "--json"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["passed"] is True
    assert row["lengths"][0]["latent_len"] == 5
    monkeypatch.setattr(figures, "TARGET_MEAN", 1.1)
    result = CliRunner().invoke(command, [*words, "-q"])
    assert result.exit_code == 1
    assert result.stderr == ""
    assert "MISSED" in result.stdout


def test_measures_of_sound() -> None:
    tone = (1000 * np.sqrt(2) * np.sin(np.arange(44100) * 0.1)).round().astype(np.int32)
    assert figures.crest(tone) == pytest.approx(20 * math.log10(math.sqrt(2)), abs=0.01)
    assert figures.crest(np.zeros(4, np.int32)) == 0
    assert figures.psnr(tone, tone) == 200
    assert figures.psnr(tone + 1, tone) == pytest.approx(20 * math.log10(32767))
    broken = np.array([0, 32766, -32767, 32767, -(2**31)], np.int32)
    assert figures.clipped(broken) == 3
