"""Clips that know how they were made: `--from` and `inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sa3_runtime import audio

RATE = 44_100


@pytest.mark.parametrize(
    "name", ["wav", "wav24", "wavfloat", "flac", "ogg", "opus", "mp3"],
)  # fmt: skip
def test_every_format_repeats_its_request(clip, sa3, name):
    """`--from` a clip of any format gives the same samples again."""
    first = clip("Dalí — 太鼓", "--format", name, "--json").objects[0]
    again = sa3("--from", first["path"], "-o", "again.wav", "--json").objects[0]
    assert again["pcm_sha256"] == first["pcm_sha256"]
    assert again["request"] == first["request"]


def test_from_repeats_bit_by_bit_and_flags_change_it(clip, sa3):
    path = clip("x", "--steps", 3, "--sampler", "euler", "--cfg", 2, "-n", "y", "--batch", 2).paths[
        1
    ]
    again = sa3("--from", path, "-o", "again.wav").paths[0]
    assert again.read_bytes() == path.read_bytes()
    other = sa3("--from", path, "-o", "other.wav", "--seed", 5, "--json").objects[0]
    assert other["request"]["seed"] == 5
    assert (other["request"]["steps"], other["request"]["negative_prompt"]) == (3, "y")
    assert Path(other["path"]).read_bytes() != path.read_bytes()


def test_from_checks_its_source(clip, sa3, tone, stub):
    path = clip("x", "--init-audio", tone.name, "--init-noise-level", 0.5).paths[0]
    again = sa3("--from", path, "-o", "again.wav").paths[0]
    assert again.read_bytes() == path.read_bytes()
    tone.write_bytes(tone.read_bytes()[:-8])
    ran = sa3("--from", path)
    assert ran.code == 2
    assert "has changed since" in ran.err
    tone.unlink()
    assert "is gone" in sa3("--from", path).err


def test_from_tells_that_the_model_has_changed(make_stub, sa3, own_place):
    model = make_stub(own_place / "mine")
    path = sa3("x", "-m", model, "--seconds", 0.2).paths[0]
    config = json.loads((model / "model_config.json").read_text())
    config["sample_size"] += 44_100
    (model / "model_config.json").write_text(json.dumps(config))
    ran = sa3("--from", path)
    assert ran.code == 0
    assert "warning: the model has changed since: mine-" in ran.err


@pytest.mark.parametrize("comment", ["", "hello", "[]", "5", '{"model": "demo"}', '{"request": 5}',
                                     '{"model": "demo", "request": []}'])  # fmt: skip
def test_comments_of_other_programs_are_no_requests(sa3, own_place, comment):
    pcm = np.zeros((10, 2), np.int16)
    audio.write("x.wav", pcm, sample_rate=RATE, tags={"comment": comment})
    assert "no request in the tags" in sa3("--from", "x.wav").err
    assert sa3("inspect", "x.wav").code == 0


def test_from_refuses_what_holds_no_request(sa3, tone, own_place):
    assert "no request in the tags" in sa3("--from", tone).err
    assert "no such sound file" in sa3("--from", own_place / "nothing.wav").err


def test_a_clip_saved_from_python_is_repeated_too(sa3, stub, own_place, pcm_of):
    from sa3_runtime import load

    with load(stub) as session:
        made = session.generate("x", seconds=0.3, seed=3)
    made.save(own_place / "made.flac")
    again = sa3("--from", own_place / "made.flac", "-o", "again.wav").paths[0]
    assert np.array_equal(pcm_of(again), made.pcm)


def test_a_clip_saved_from_python_knows_its_source(sa3, stub, own_place, tone, pcm_of, monkeypatch):
    """From another folder too, and not where the source was changed since."""
    from sa3_runtime import load

    with load(stub) as session:
        made = session.generate("x", init_audio=tone.name, init_noise_level=0.5, seed=3)
        loose = session.generate("x", init_audio=audio.read(tone).samples, seed=3)
    (own_place / "elsewhere").mkdir()
    monkeypatch.chdir(own_place / "elsewhere")
    made.save(own_place / "made.wav")
    loose.save(own_place / "loose.wav")
    again = sa3("--from", own_place / "made.wav", "-o", "again.wav").paths[0]
    assert np.array_equal(pcm_of(again), made.pcm)
    assert again.read_bytes() == (own_place / "made.wav").read_bytes()
    tone.write_bytes(tone.read_bytes()[:-8])
    ran = sa3("--from", own_place / "made.wav")
    assert (ran.code, "has changed since" in ran.err) == (2, True)
    ran = sa3("--from", own_place / "loose.wav")
    assert "is gone: <array> – give it with --init-audio" in ran.err


def test_inspect_prints_the_request(clip, sa3):
    path = clip("Dalí", "--seed", 7).paths[0]
    text = sa3("inspect", path).out
    assert "Dalí" in text
    assert "seed               7" in text
    found = sa3("inspect", path, "--json", "--spectrogram").objects[0]
    assert found["request"]["prompt"] == "Dalí"
    assert found["seconds"] == 0.5
    assert Path(found["picture"]).is_file()
    assert "exists already" in sa3("inspect", path, "--spectrogram").err


def test_inspect_hands_graphs_on(sa3, stub):
    graph = stub / "onnx" / "dec_fp32_chunkable_limiter.onnx"
    text = sa3("inspect", graph).out
    assert "latent" in text
    assert "pcm" in text
    assert sa3("inspect", graph, "--json").objects
    ran = sa3("inspect", graph, "--spectrogram")
    assert ran.code == 2
    assert "--spectrogram is for clips" in ran.err
    assert sa3("inspect", stub / "nothing").code == 2


def test_inspect_refuses_flags_a_clip_has_not(clip, sa3):
    path = clip("x").paths[0]
    ran = sa3("inspect", path, "--nonsense")
    assert ran.code == 2
    assert "there is no option --nonsense for a clip" in ran.err
