"""The command line with the real graphs of the tiny checkpoints, exported on first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from sa3_models.errors import ArtefactMissing
from sa3_runtime import audio, load


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(sa3, tiny, home, monkeypatch):
    monkeypatch.setenv("SA3_HOME", str(home))
    return lambda *words: sa3("generate", "--model", tiny, *words)


def test_three_seconds_twice_and_repeated(run, sa3):
    words = ["--prompt", "x", "--seconds", 3, "--seed", 7, "--json"]
    ran = run(*words)
    assert "exporting tiny-" in ran.err  # the first use says why it takes longer
    (first,) = ran.objects
    ran = run(*words)
    assert "exporting" not in ran.err
    (second,) = ran.objects
    assert first["samples"] == 132_300
    assert audio.read(first["path"]).samples.shape == (2, 132_300)
    assert Path(first["path"]).read_bytes() == Path(second["path"]).read_bytes()
    again = sa3("--from", first["path"], "-o", "again.wav").paths[0]
    assert again.read_bytes() == Path(first["path"]).read_bytes()


def test_every_mode_from_one_command_line(run):
    (source,) = run("--prompt", "x", "--seconds", 2, "--seed", 1).paths
    modes = (
        ["--init-audio", source, "--init-noise-level", 0.6],
        ["--init-audio", source, "--inpaint", "0.5:1"],
        ["--init-audio", source, "--inpaint", "2:3"],
        ["--seconds", 2, "--cfg", 3],
        ["--seconds", 2, "--cfg", 3, "--negative-prompt", "y", "--apg", 0.5],
        ["--seconds", 2, "--headroom", 6],
        ["--seconds", 2, "--sampler", "dpmpp", "--schedule", "flux"],
    )
    hashes = set()
    for words in modes:
        ran = run("--prompt", "x", "--seed", 1, "--json", *words)
        assert ran.code == 0, (words, ran.err)
        hashes.add(ran.objects[0]["pcm_sha256"])
        assert ran.objects[0]["seconds"] == (3.0 if "2:3" in words else 2.0)
    assert len(hashes) == len(modes)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


DAMAGES = {
    "t5gemma_fp32.onnx": (_cut, "t5gemma_fp32.onnx is not an ONNX model"),
    "dit_step_fp32.onnx.data": (_cut, "dit_step_fp32.onnx.data is cut"),
    "enc_fp32_chunkable.onnx.data": (Path.unlink, "which is missing"),
    "dec_fp32_chunkable_limiter.onnx.data": (
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        "the weights of dec_fp32_chunkable_limiter.onnx are not those it was written with",
    ),
}


def test_damaged_exports_are_made_again_with_a_line_each(run, home, tiny):
    words = ["--prompt", "x", "--seconds", 1, "--seed", 7, "--json"]
    (first,) = run(*words).objects
    for name, (damage, _) in DAMAGES.items():
        (path,) = home.glob(f"onnx/{tiny.name}-*/*/{name}")
        damage(path)
    with pytest.raises(ArtefactMissing, match=r"is cut; .* – sa3 export"):
        load(tiny, device="cpu", allow_export=False)
    ran = run(*words)
    assert ran.code == 0, ran.err
    for _, said in DAMAGES.values():
        assert ran.err.count(said) == 1
    assert ran.err.count("exporting it again") == len(DAMAGES)
    assert ran.objects[0]["pcm_sha256"] == first["pcm_sha256"]
    assert "exporting" not in run(*words).err
