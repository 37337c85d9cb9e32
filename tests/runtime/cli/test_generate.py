"""`sa3 generate`: what comes out, lengths, seeds, editing, what is refused and when."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sa3_models.catalogue import catalogue
from sa3_runtime import audio
from sa3_runtime.audio.wav import wav_bytes
from sa3_runtime.cli.meaning import seeds_of

RATE = 44_100
MUSIC = [m.name for m in catalogue().models.values() if m.kind == "generator"]


# -- what comes out --------------------------------------------------------------------------


def test_a_clip_is_a_file_its_path_on_stdout_and_talk_on_stderr(clip, own_place, pcm_of):
    ran = clip("a warm pad", "--seed", 7)
    assert ran.code == 0
    (path,) = ran.paths
    assert path.parent == own_place / "output"
    assert path.name.endswith("-7-a-warm-pad.wav")
    assert pcm_of(path).shape == (RATE // 2, 2)
    assert "seed 7" in ran.err
    assert clip("a warm pad", "--quiet").err == ""


def test_json_holds_what_docs_say(clip, own_place, pcm_of):
    (found,) = clip("x", "--seed", 7, "--json", "--spectrogram").objects
    path = Path(found["path"])
    assert found["bytes"] == path.stat().st_size
    assert Path(found["picture"]) == path.with_suffix(".png")
    assert found["samples"] == RATE // 2 == len(pcm_of(path))
    assert found["seconds"] == 0.5
    assert (found["sample_rate"], found["channels"], found["format"]) == (RATE, 2, "wav")
    assert found["seed"] == found["request"]["seed"] == 7
    assert found["request"]["steps"] == 8
    assert found["device"].startswith("cpu")
    assert found["warnings"] == []
    assert {"t5gemma", "dit_step", "dec", "total"} <= set(found["timing"])
    docs = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    for key in found:
        assert f"`{key}`" in docs, f"docs/cli.md does not describe {key}"


def test_the_same_request_gives_the_same_file(clip):
    """Same file twice, whatever it is called."""
    first = clip("x", "--seed", 7, "-o", "a.wav").paths[0].read_bytes()
    second = clip("x", "--seed", 7, "-o", "b.wav").paths[0].read_bytes()
    assert first == second


def test_format_windows_threads_and_name_leave_the_sound_alone(clip):
    """CASES 34: changing only these leaves the noise, and here even the sound, unchanged."""
    base = clip("x", "--seed", 7, "--json").objects[0]["pcm_sha256"]
    for words in (
        ["--format", "flac"], ["--format", "mp3"], ["--chunking"], ["--no-chunking"],
        ["--threads", 1], ["-o", "other.wav"], ["--free-models"],
    ):  # fmt: skip
        assert clip("x", "--seed", 7, "--json", *words).objects[0]["pcm_sha256"] == base, words


# -- lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MUSIC)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "abc", "", "max+0.001"])
def test_a_length_outside_the_range_is_refused_before_loading(sa3, no_loading, model, value):
    """CASES 26: code 2 and the range of that very model in the text, without loading."""
    longest = catalogue().models[model].max_seconds
    ran = sa3("x", "-m", model, f"--seconds={value.replace('max+0.001', str(longest + 0.001))}")
    assert ran.code == 2
    assert f"above 0 and at most {longest:g} for {model}" in ran.err


@pytest.mark.parametrize("model", MUSIC)
def test_the_longest_length_is_accepted(sa3, model):
    """CASES 26: max itself."""
    longest = catalogue().models[model].max_seconds
    (found,) = sa3("x", "-m", model, "--seconds", longest, "--dry-run", "--json").objects
    assert found["request"]["seconds"] == longest


def test_a_short_request_is_exactly_that_long_and_sounds_to_its_end(clip, pcm_of):
    """CASES 26: one second is 44,100 samples, with no silent tail."""
    pcm = pcm_of(clip("x", "--seconds", 1, "--seed", 1).paths[0])
    assert len(pcm) == RATE
    assert np.abs(pcm[-100:]).max() > 0


# -- seeds -----------------------------------------------------------------------------------


def test_every_seed_gives_its_own_sound(clip):
    """CASES 56: no 32-bit wrap."""
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1]
    hashes = {clip("x", "--seed", seed, "--json").objects[0]["pcm_sha256"] for seed in seeds}
    assert len(hashes) == len(seeds)


@pytest.mark.parametrize("seed", ["18446744073709551616", "-2", "1.5", "abc", ""])
def test_a_seed_outside_the_range_is_refused(clip, no_loading, seed):
    """CASES 56: code 2 for the rest."""
    ran = clip("x", f"--seed={seed}")
    assert ran.code == 2
    assert "seed" in ran.err


@pytest.mark.parametrize("words", [[], ["--seed", -1]])
def test_a_random_seed_is_reported_and_repeats_the_clip(clip, words):
    """CASES 56: read the seed from stdout and from the file, render again: identical bytes."""
    (found,) = clip("x", *words, "--json", "-o", "a.wav").objects
    path = Path(found["path"])
    stored = json.loads(audio.read_tags(path)["comment"])["request"]["seed"]
    assert stored == found["seed"]
    assert clip("x", *words, "--json").objects[0]["seed"] != found["seed"]
    again = clip("x", "--seed", found["seed"], "-o", "b.wav").paths[0]
    assert again.read_bytes() == path.read_bytes()


def test_many_clips_from_one_command(clip):
    ran = clip("x", "--prompt", "y", "--seeds", "1-2,5", "--json")
    got = [(found["request"]["prompt"], found["seed"]) for found in ran.objects]
    assert got == [(prompt, seed) for prompt in ("y", "x") for seed in (1, 2, 5)]
    assert len({found["path"] for found in ran.objects}) == 6
    batch = clip("x", "--batch", 3, "--json").objects
    assert [found["request"]["clip"] for found in batch] == [0, 1, 2]
    assert len({found["seed"] for found in batch}) == 1
    assert len({found["pcm_sha256"] for found in batch}) == 3
    single = clip("x", "--seed", batch[0]["seed"], "--json").objects[0]
    assert single["pcm_sha256"] == batch[0]["pcm_sha256"]


def test_a_list_of_seeds_and_ranges():
    assert seeds_of("1-3, 7") == [1, 2, 3, 7]
    assert seeds_of(str(2**64 - 1)) == [2**64 - 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "3-1"], "that range of seeds makes no sense"),
        (["--seeds", "1-99999"], "that range of seeds makes no sense"),
        (["--seeds", "a"], "seeds are numbers and ranges"),
        (["--seeds", "1", "--seed", "2"], "--seed and --seeds contradict each other"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--seeds", "1-5000", "--batch", "3"], "more than 10,000 clips"),
        (["--steps", "0"], "steps must be a whole number"),
        (["--cfg", "nan"], "cfg must be a number"),
        (["--cfg", "-1"], "cfg must be a number"),
        (["--negative-prompt", "y"], "negative prompt has no effect without guidance"),
        (["--apg", "0.5"], "apg has no effect without guidance"),
        (["--init-noise-level", "0.5"], "init noise level has no effect without init audio"),
        (["--inpaint", "0:1"], "inpaint has no effect without init audio"),
        (["--no-paste"], "no-paste has no effect without"),
        (["--sampler", "heun"], "heun"),
        (["--schedule", "cosine"], "cosine"),
        (["--device", "mps"], "unknown device: mps – cpu, cuda or cuda:N"),
        (["--precision", "int8"], "unknown precision: int8"),
        (["--threads", "0"], "0 is not in the range"),
        (["--format", "aac"], "unknown sound format: aac"),
        (["-o", ""], "--out is empty"),
        (["-o", "a.xyz"], "unknown sound file suffix: .xyz"),
        (["-o", "a.wav", "--format", "flac"], "contradict each other"),
        (["--lora", "x.safetensors"], "adapters (LoRA) are not supported"),
        (["-m", "nothing"], "there is no model 'nothing'"),
        (["-m", "same-s"], "same-s is an autoencoder alone"),
        (["--init-audio", "nothing.wav"], "there is no such sound file: nothing.wav"),
        (["--init-audio", "."], "a sound file is needed, this is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_before_loading(clip, no_loading, words, message):
    """CASES 28, 40, 50: nothing is ignored, nothing is loaded, code 2, nothing is written."""
    ran = clip("x", *words)
    assert ran.code == 2, ran.err
    assert message in ran.err
    assert ran.out == ""
    assert not [path for path in Path("output").rglob("*") if path.is_file()]


def test_negative_prompts_count_with_guidance_only(clip):
    """CASES 50: refused at guidance 1 (issue 5); empty is none; with guidance it changes things."""
    plain = clip("x", "--seed", 1, "--cfg", 3, "--json").objects[0]["pcm_sha256"]
    empty = clip("x", "--seed", 1, "--cfg", 3, "-n", "", "--json").objects[0]["pcm_sha256"]
    other = clip("x", "--seed", 1, "--cfg", 3, "-n", "noise", "--json").objects[0]["pcm_sha256"]
    assert plain == empty != other
    assert clip("x", "-n", "").code == 0


def test_an_empty_prompt_is_allowed_when_it_is_given(clip):
    (found,) = clip("--prompt", "", "--json").objects
    assert found["request"]["prompt"] == ""


def test_a_prompt_of_five_thousand_words_is_cut_and_told(clip):
    ran = clip("many words " * 2500, "-q")
    assert ran.code == 0
    assert "warning: the prompt has" in ran.err
    assert len(ran.err.splitlines()) == 1


# -- editing ---------------------------------------------------------------------------------


def test_the_source_sets_the_length_and_what_was_done_is_told_once(sa3, stub, own_place):
    """CASES 25: 24-bit mono at 48 kHz is accepted as it is."""
    mono = (np.arange(48_000) % 200 * 100).astype(np.int16)[:, None]
    (own_place / "take.wav").write_bytes(wav_bytes(mono, 48_000, "wav24"))
    ran = sa3("x", "-m", stub, "--init-audio", "take.wav", "--seeds", "1-2", "--json")
    assert ran.code == 0
    assert [found["seconds"] for found in ran.objects] == [1.0, 1.0]
    told = [line for line in ran.err.splitlines() if "resampled" in line]
    assert told == [
        "take.wav (24-bit): mono copied to both channels, resampled from 48,000 Hz to 44,100 Hz"
    ]


def test_the_source_is_read_once_for_all_clips(sa3, stub, tone, monkeypatch):
    from sa3_runtime.audio import reading

    calls = []
    monkeypatch.setattr(
        reading,
        "_load",
        lambda path, *rest, load=reading._load: calls.append(path) or load(path, *rest),
    )
    ran = sa3("x", "-m", stub, "--init-audio", tone, "--seeds", "1-3", "--json")
    assert len(ran.objects) == 3
    assert len(calls) == 1


def test_a_source_without_samples_needs_a_length(sa3, stub, own_place):
    """CASES 25: 0 frames."""
    (own_place / "empty.wav").write_bytes(wav_bytes(np.zeros((0, 2), np.int16), RATE))
    ran = sa3("x", "-m", stub, "--init-audio", "empty.wav")
    assert ran.code == 2
    assert "the init audio holds no samples: empty.wav – give --seconds" in ran.err
    assert sa3("x", "-m", stub, "--init-audio", "empty.wav", "--seconds", 0.5).code == 0
    (own_place / "one.wav").write_bytes(wav_bytes(np.ones((1, 2), np.int16), RATE))
    assert sa3("x", "-m", stub, "--init-audio", "one.wav", "--json").objects[0]["samples"] == 1


def test_inpainting_keeps_the_rest_and_continuation_goes_on(sa3, stub, tone, pcm_of):
    ran = sa3("x", "-m", stub, "--init-audio", tone, "--inpaint", "1:2", "--seed", 1)
    pcm, source = pcm_of(ran.paths[0]), pcm_of(tone)
    assert np.array_equal(pcm[: RATE - 8200], source[: RATE - 8200])
    assert not np.array_equal(pcm[RATE : 2 * RATE], source[RATE : 2 * RATE])
    again = sa3("--from", ran.paths[0], "-o", "again.wav").paths[0]
    assert again.read_bytes() == ran.paths[0].read_bytes()
    longer = sa3("x", "-m", stub, "--init-audio", tone, "--inpaint", "3:5", "--json").objects[0]
    assert longer["seconds"] == 5.0


def test_header_sizes_of_a_piped_source_do_not_matter(sa3, stub, own_place, tone):
    """CASES 43: the source is what a pipe wrote, its header says 0xFFFFFFFF."""
    data = bytearray(tone.read_bytes())
    data[40:44] = b"\xff" * 4
    (own_place / "piped.wav").write_bytes(data)
    ran = sa3("x", "-m", stub, "--init-audio", "piped.wav", "--json")
    assert ran.objects[0]["seconds"] == 3.0
    assert "everything to the end was read" in ran.err


# -- asking ----------------------------------------------------------------------------------


def test_a_person_is_asked_only_on_a_terminal_with_nothing_else_given(sa3, monkeypatch):
    asked = []

    def prompt(text, **kw):
        asked.append(text)
        return 2 if text == "Model" else "a warm pad"

    monkeypatch.setattr("click.prompt", prompt)
    assert "there is no prompt" in sa3().err
    monkeypatch.setattr("sa3_runtime.cli.generate._sits_there", lambda: True)
    assert "there is no prompt" in sa3("--seconds", 3).err
    assert "there is no prompt" in sa3("--no-input").err
    assert asked == []
    ran = sa3()
    assert asked == ["Model", "Prompt"]
    assert ran.code == 3  # the second model of the catalogue is not on this machine
    assert "sa3 pull small-music" in ran.err


# -- around it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("cpu", "cpu"), ("CUDA", "cuda"), ("gpu", "cuda"), ("1", "cuda:1"), ("cuda:2", "cuda:2")],
)
def test_devices_are_spelt_in_several_ways(wanted, name):
    from sa3_runtime.cli.device import device_name

    assert device_name(wanted) == name


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_not_chosen(monkeypatch, visible):
    """CASES 29: an empty CUDA_VISIBLE_DEVICES means the CPU."""
    from sa3_runtime.cli.device import device_name

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_name(None) == "cpu"


def test_an_old_driver_falls_to_the_cpu_and_says_so(monkeypatch, capsys):
    """CASES 17: what nobody asked for must not fail; what was asked for does (exit code 4)."""
    from sa3_runtime.cli import device

    monkeypatch.setattr(device, "installed", lambda _: "12.9.10")
    monkeypatch.setattr(device, "local_architectures", lambda: ("sm_86",))
    for too_old, name in ((True, "cpu"), (False, "cuda")):
        monkeypatch.setattr(device, "driver_too_old", lambda too_old=too_old: too_old)
        assert device.device_name(None) == name
        assert ("580 or newer" in capsys.readouterr().err) == too_old
    monkeypatch.setattr(device, "driver_too_old", lambda: True)
    assert device.device_name("cuda") == "cuda"


def test_bench_times_every_length(sa3, stub):
    (found,) = sa3("bench", "-m", stub, "--seconds", "0.5,1", "--repeat", 1, "--json").objects
    assert [row["seconds"] for row in found["rows"]] == [0.5, 1.0]
    assert all(0 < row["median"] < 60 for row in found["rows"])
    assert found["peak_rss_bytes"] > 1e7
    assert len(sa3("bench", "-m", stub, "--seconds", "0.5", "--repeat", 1).out.splitlines()) == 3
    assert sa3("bench", "-m", stub, "--seconds", "a").code == 2
    assert "too long" in sa3("bench", "-m", stub, "--seconds", "500").err
