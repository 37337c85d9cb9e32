"""A line pasted from either published tool works; what it asks for that is not there is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from sa3_runtime.audio.wav import wav_bytes


@pytest.fixture(scope="module")
def free(make_stub, tmp_path_factory):
    """A stub model whose decoder leaves the limiter, and so its ceiling, to us."""
    return make_stub(tmp_path_factory.mktemp("models") / "free", output="pcm_unbounded")


@pytest.fixture
def line(sa3, free, own_place):
    """line("--prompt x …") checks a command line and gives its requests."""
    t = np.arange(10 * 44_100)
    x = (t % 100 * 90).astype(np.int16)
    for name in ("loop.wav", "song.wav"):
        (own_place / name).write_bytes(wav_bytes(np.stack([x, x], 1), 44_100))

    def check(text: str, model: object = free):
        ran = sa3(*shlex.split(text.replace("MODEL", str(model))), "--dry-run", "--json")
        return ran, [found["request"] for found in ran.objects if "request" in found]

    return check


TENSORRT = [
    (
        '--prompt "lofi house loop" --dit MODEL --seconds 30 --seed 42 --out loop30.wav',
        {"prompt": "lofi house loop", "seconds": 30.0, "seed": 42},
    ),
    (
        '--prompt P --negative-prompt "low quality" --dit MODEL --decoder DECODER --cfg 3 --apg 0.5'
        " --steps 12 --seconds 5 --quiet --out x.wav",
        {"negative_prompt": "low quality", "cfg": 3.0, "apg": 0.5, "steps": 12},
    ),
    (
        "--prompt P --dit MODEL --init-audio loop.wav --init-noise-level 0.6 --seconds 8",
        {"init_audio": "loop.wav", "init_noise_level": 0.6, "seconds": 8.0},
    ),
    (
        '--prompt P --dit MODEL --init-audio loop.wav --inpaint-range "2,5" --seconds 10',
        {"inpaint": [[2.0, 5.0]], "init_audio": "loop.wav"},
    ),
    (
        "--prompt P --dit MODEL --seconds 5 --precision fp16mixed --dec-precision fp8 --pinned-copy"
        " --no-mega-graph --free-models --chunking --models-dir models --limiter-ceiling 0.9",
        {"chunking": "on", "limiter_ceiling": 0.9},
    ),
    ("--prompt P --dit MODEL --seconds 5 --no-chunking --precision bf16", {"chunking": "off"}),
]
PYTORCH = [
    (
        '--model MODEL -p "lo-fi hip hop beat, 90 BPM" --duration 30 -o beat.wav',
        {"prompt": "lo-fi hip hop beat, 90 BPM", "seconds": 30.0},
    ),
    (
        "--model MODEL -p P --duration 5 --steps 8 --cfg-scale 2 --seed -1 --negative-prompt N"
        " --device cpu --no-half --chunked-decode --output out.wav --peak-ceiling-dbfs 0",
        {"cfg": 2.0, "negative_prompt": "N", "chunking": "on"},
    ),
    (
        "--model MODEL -p P --inpaint-audio song.wav --inpaint-start 1 --inpaint-start 8"
        " --inpaint-end 4 --inpaint-end 9.5",
        {"init_audio": "song.wav", "inpaint": [[1.0, 4.0], [8.0, 9.5]], "seconds": 10.0},
    ),
    (
        "--model MODEL -p P --peak-ceiling-dbfs -6 --no-chunked-decode --num-inference-steps 4",
        {"limiter_ceiling": 10**-0.3, "chunking": "off", "steps": 4},
    ),
]


@pytest.mark.parametrize(("text", "expected"), TENSORRT + PYTORCH)
def test_a_pasted_line_works(line, free, text, expected):
    from sa3_models.catalogue import resolve

    ran, requests = line(text.replace("DECODER", resolve(free).autoencoder))
    assert ran.code == 0, ran.err
    got = {key: requests[0][key] for key in expected}
    if "init_audio" in expected:
        expected = expected | {"init_audio": str(Path(expected["init_audio"]).absolute())}
    assert got == expected


def test_several_prompts_after_one_flag_are_several_clips(line):
    """The PyTorch tool takes a list of prompts."""
    _, requests = line('--model MODEL -p "a pad" "a drum" rain --duration 5')
    assert [request["prompt"] for request in requests] == ["a pad", "a drum", "rain"]
    _, requests = line("--model MODEL -p rain --batch-size 3 --duration 5 --seed 4")
    assert [(request["seed"], request["clip"]) for request in requests] == [(4, 0), (4, 1), (4, 2)]
    ran, _ = line("--model MODEL -p rain wind --duration 5 10")
    assert ran.code == 2
    assert "a list of lengths, one per clip, is not understood: 10" in ran.err


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--precision bf16", "--precision bf16 is retired, fp16 is used"),
        ("--precision fp16mixed", "--precision fp16mixed is retired, fp16 is used"),
        ("--pinned-copy", "--pinned-copy has no effect here"),
        ("--no-mega-graph", "--mega-graph has no effect here"),
        ("--dec-precision fp8", "--dec-precision has no effect here"),
        ("--peak-ceiling-dbfs 0", "--peak-ceiling-dbfs has no effect"),
    ],
)
def test_flags_without_a_meaning_are_told_once(line, flags, note):
    ran, requests = line(f"P -m MODEL --seconds 1 --seeds 1-3 {flags}")
    assert ran.code == 0
    assert len(requests) == 3
    assert [text for text in ran.err.splitlines() if note in text] == ran.err.splitlines()
    assert len(ran.err.splitlines()) == 1
    quiet, _ = line(f"P -m MODEL --seconds 1 {flags} --quiet")
    assert quiet.err == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder same-l", "that decoder does not belong to the model: same-l, the model's is"),
        ("--inpaint-start 1", "--inpaint-start and --inpaint-end belong together: 1 and 0"),
        (
            "--init-audio loop.wav --inpaint-audio song.wav --inpaint-start 1 --inpaint-end 2",
            "--init-audio and --inpaint-audio name two files",
        ),
        ("--init-audio loop.wav --inpaint 5", "an inpaint range is START:END in seconds: 5"),
        ("--init-audio loop.wav --inpaint 5:2", "must end after its start"),
        ("--init-audio loop.wav --inpaint a:b", "an inpaint range is START:END in seconds: a:b"),
        ("--init-audio loop.wav --inpaint 2:30 --seconds 20", "lies outside the clip"),
        ("--peak-ceiling-dbfs 3", "--peak-ceiling-dbfs must be at most 0"),
        ("--precision fp4", "unknown precision: fp4"),
        ("--lora-ckpt-path a", "adapters (LoRA) are not supported"),
        ("--lora-strength 0.5", "adapters (LoRA) are not supported"),
    ],
)
def test_what_contradicts_the_request_is_refused(line, flags, message):
    """CASES 40: adapters are refused, not ignored; so is a decoder of another model."""
    ran, _ = line(f"P -m MODEL {flags}")
    assert ran.code == 2
    assert message in ran.err


def test_the_published_names_of_decoders_agree_with_their_models(sa3):
    for model, decoder in (("sm-music", "same-s"), ("sm-sfx", "same-s"), ("medium", "same-l")):
        words = ["--prompt", "x", "--dit", model, "--decoder", decoder, "--dry-run"]
        assert sa3(*words).code == 0
    assert sa3("--prompt", "x", "--dit", "medium", "--decoder", "same-s", "--dry-run").code == 2


def test_a_precision_for_gpus_is_told_where_there_is_none(sa3, stub, monkeypatch):
    monkeypatch.delenv("SA3_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = sa3("x", "-m", stub, "--seconds", 0.2, "--precision", "fp16")
    assert ran.code == 0
    assert "--precision fp16 is for GPUs, this machine's CPU computes in fp32" in ran.err
    assert sa3("x", "-m", stub, "--precision", "fp16", "--device", "cpu").code != 0


def test_models_dir_is_the_home_of_that_run(sa3, own_place):
    ran = sa3("x", "-m", "small-music", "--models-dir", own_place / "engines")
    assert ran.code == 3
    assert str(own_place / "engines") in ran.err
