"""`sa3 generate`: requests, seeds, lengths, names of files, what is refused and when."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from sa3_models.catalogue import catalogue
from sa3_models.errors import RunFailed
from sa3_runtime import audio
from sa3_runtime.audio.wav import wav_bytes
from sa3_runtime.cli.flags import seeds_of
from sa3_runtime.cli.targets import NAME_BYTES, default_name

RATE = 44_100
MUSIC = [m.name for m in catalogue().models.values() if m.kind == "generator"]


def pcm_of(path: Path) -> np.ndarray:
    return np.round(audio.read(path).samples.T * 32768).astype(np.int16)


@pytest.fixture
def no_loading(monkeypatch):
    """Loading a model is a fault: what a test refuses must be refused before."""

    def load(*args, **kw):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("sa3_runtime.session.load", load)


@pytest.fixture
def tone(own_place) -> Path:
    t = np.arange(3 * RATE) / RATE
    x = np.round(9000 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
    path = own_place / "tone.wav"
    path.write_bytes(wav_bytes(np.stack([x, x], 1), RATE))
    return path


# -- what comes out --------------------------------------------------------------------------


def test_a_clip_is_a_file_its_path_on_stdout_and_talk_on_stderr(clip, own_place):
    ran = clip("a warm pad", "--seed", 7)
    assert ran.code == 0
    (path,) = ran.paths
    assert path.parent == own_place / "output"
    assert path.name.endswith("-7-a-warm-pad.wav")
    assert pcm_of(path).shape == (RATE // 2, 2)
    assert "seed 7" in ran.err
    assert clip("a warm pad", "--quiet").err == ""


def test_json_holds_what_docs_say(clip, own_place):
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


def test_a_clip_saved_from_python_is_repeated_too(sa3, stub, own_place):
    from sa3_runtime import load

    with load(stub) as session:
        made = session.generate("x", seconds=0.3, seed=3)
    made.save(own_place / "made.flac")
    again = sa3("--from", own_place / "made.flac", "-o", "again.wav").paths[0]
    assert np.array_equal(pcm_of(again), made.pcm)


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


def test_a_short_request_is_exactly_that_long_and_sounds_to_its_end(clip):
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


def test_inpainting_keeps_the_rest_and_continuation_goes_on(sa3, stub, tone):
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


# -- files -----------------------------------------------------------------------------------

PROMPTS = [
    "word " * 600, "4/4 & 3\\4", "../../x", "a\\0b", "-loud", "🥁🎹", "   ", "CON", "the end.",
    '"quoted" \'twice\'', "tab\tand\nnewline", "日本の太鼓", "x" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_any_prompt_gives_one_safe_name(clip, own_place, prompt):
    """CASES 35: one file inside the output folder, at most 120 bytes of name."""
    ran = clip("--prompt", prompt)
    assert ran.code == 0
    (path,) = (own_place / "output").rglob("*")
    assert ran.paths == [path]
    assert path.parent == own_place / "output"
    assert len(os.fsencode(path.name)) <= NAME_BYTES
    assert path.name.isascii()
    assert not set(path.name) & set('/\\:*?"<>| ')
    assert path.suffix == ".wav"


def test_names_tell_model_seed_and_prompt():
    assert (
        default_name("small-music", 7, "Dalí: warm pad!", ".wav")
        == "small-music-7-dali-warm-pad.wav"
    )
    assert default_name("m", 2**64 - 1, "日本", ".flac") == f"m-{2**64 - 1}.flac"
    long = default_name("m", 1, "alpha beta " * 50, ".wav")
    assert len(long) <= NAME_BYTES
    assert long.endswith(("alpha.wav", "beta.wav"))


def test_default_names_are_unique(clip):
    """CASES 55: twice the same request, two files."""
    first, second = clip("x", "--seed", 1).paths[0], clip("x", "--seed", 1).paths[0]
    assert second.name == f"{first.stem}-2.wav"
    assert first.read_bytes() == second.read_bytes()


def test_where_a_name_goes(clip, own_place):
    """CASES 55: bare name, new folder, existing folder, no suffix, suffix of another format."""
    output = own_place / "output"
    assert clip("x", "-o", "a.wav").paths == [output / "a.wav"]
    assert clip("x", "-o", "b").paths == [output / "b.wav"]
    assert clip("x", "-o", "c", "--format", "flac").paths == [output / "c.flac"]
    assert clip("x", "-o", "d.mp3").paths == [output / "d.mp3"]
    assert clip("x", "-o", "new/dir/e.wav").paths == [Path("new/dir/e.wav")]
    assert clip("x", "-o", "./f.wav").paths == [Path("f.wav")]
    assert Path("f.wav").is_file()
    assert clip("x", "--seed", 1, "-o", "new/dir").paths[0].parent == Path("new/dir")
    assert clip("x", "--seed", 1, "-o", "brand/new/").paths[0].parent == Path("brand/new")
    several = clip("x", "--seeds", "1-2", "-o", "g.wav").paths
    assert several == [output / "g-1.wav", output / "g-2.wav"]
    assert audio.read(output / "d.mp3").samples.shape == (2, RATE // 2)


def test_nothing_is_overwritten_without_force(clip, own_place, no_loading):
    """CASES 55: the older file stays; the refusal comes before the model is loaded."""
    path = own_place / "output" / "a.wav"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    for words in (["-o", "a.wav"], ["-o", path]):
        ran = clip("x", *words)
        assert ran.code == 2
        assert "exists already" in ran.err
        assert "--force" in ran.err
    path.rename(path.with_name("a-1.wav"))
    assert clip("x", "--seeds", "1-2", "-o", "a.wav").code == 2
    assert path.with_name("a-1.wav").read_bytes() == b"mine"


def test_force_overwrites(clip, own_place):
    path = own_place / "a.wav"
    path.write_bytes(b"mine")
    assert clip("x", "-o", path, "--force").code == 0
    assert len(pcm_of(path)) == RATE // 2


def test_a_link_is_followed(clip, own_place):
    """CASES 55: symlink."""
    (own_place / "link.wav").symlink_to(own_place / "real" / "a.wav")
    assert clip("x", "-o", own_place / "link.wav").code == 0
    assert (own_place / "link.wav").is_symlink()
    assert (own_place / "real" / "a.wav").is_file()
    assert clip("x", "-o", own_place / "link.wav").code == 2


def test_dev_null_takes_a_clip(clip):
    """CASES 55: /dev/null."""
    assert clip("x", "-o", "/dev/null", "--format", "wav").code == 0
    assert clip("x", "-o", "/dev/null").code == 0
    assert not Path("/dev/null").is_file()


def test_what_cannot_be_written_is_refused_at_once(clip, own_place, no_loading, monkeypatch):
    """CASES 28, 35, 55: file as folder, write-protected, no space, name too long."""
    (own_place / "file").write_bytes(b"x")
    ran = clip("x", "-o", own_place / "file" / "a.wav")
    assert ran.code == 2
    assert "a file is in the way" in ran.err
    (own_place / "a.wav").mkdir()
    ran = clip("x", "-o", "./a.wav", "--seeds", "1-2")  # a folder: the clips go into it
    assert "the model was loaded" in ran.err
    protected = own_place / "protected.wav"
    protected.write_bytes(b"mine")
    protected.chmod(0o444)
    ran = clip("x", "-o", protected, "--force")
    assert ran.code == 1
    assert "write-protected" in ran.err
    assert protected.read_bytes() == b"mine"
    ran = clip("x", "-o", f"{'n' * 300}.wav")
    assert ran.code == 2
    assert "file name is too long" in ran.err
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("sa3_runtime.cli.targets.shutil.disk_usage", lambda path: usage)
    ran = clip("x")
    assert ran.code == 1
    assert "not enough space for the clip: 0.0 MB free" in ran.err


def test_what_cannot_be_delivered_is_refused_at_once(clip, no_loading, own_place, monkeypatch):
    ran = clip("many words " * 6000, "-o", "a.opus")
    assert ran.code == 2
    assert "too long for the tags of an Opus file" in ran.err
    monkeypatch.setenv("PATH", str(own_place))
    assert "no player was found" in clip("x", "--play").err
    monkeypatch.setattr("sa3_runtime.audio.formats.has", lambda package: False)
    ran = clip("x", "-o", "a.flac")
    assert ran.code == 1
    assert "flac needs the package soundfile – pip install" in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_code_1_and_the_clip_is_kept(clip):
    """CASES 28: full disk."""
    ran = clip("x", "-o", "/dev/full")
    assert ran.code == 1
    assert "No space left on device" in ran.err
    rescued = Path(ran.err.rsplit("the clip is in ", 1)[1].strip())
    assert len(pcm_of(rescued)) == RATE // 2


def test_killed_while_writing_the_old_file_is_intact(script, stub, own_place):
    """CASES 55: kill -9 during the write."""
    path = own_place / "a.wav"
    path.write_bytes(b"mine")
    code = f"""
import os, pathlib, signal
def half(self, data):
    with open(self, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.write_bytes = half
from sa3_runtime.cli.app import main
main(["x", "-m", {str(stub)!r}, "--seconds", "1", "-o", {str(path)!r}, "--force"])
"""
    assert script(code).returncode == -9
    assert path.read_bytes() == b"mine"
    assert [entry.suffix for entry in own_place.iterdir() if entry.name != "a.wav"] == [".part"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder nobody can write to")
def test_an_unwritable_folder_is_refused_before_loading(clip, no_loading):
    """CASES 28, 35: the target is tried first; /proc refuses even the administrator."""
    ran = clip("x", "-o", "/proc/self/a.wav")
    assert ran.code == 1
    assert "the output folder is not writable" in ran.err


def test_a_clip_that_cannot_be_saved_is_kept_elsewhere(clip, monkeypatch):
    """CASES 35: if saving fails after all, the render is not lost."""
    real, calls = audio.writing.write, []

    def write(path, *args, **kw):
        calls.append(path)
        if len(calls) == 1:
            raise RunFailed("the sound file could not be written", found="Stale file handle")
        return real(path, *args, **kw)

    monkeypatch.setattr("sa3_runtime.audio.writing.write", write)
    ran = clip("x", "--seed", 7)
    assert ran.code == 1
    rescued = Path(ran.err.rsplit("the clip is in ", 1)[1].strip())
    assert len(pcm_of(rescued)) == RATE // 2
    assert rescued.name == "7.wav"


def test_a_broken_render_leaves_no_file(make_stub, sa3, own_place):
    """CASES 4: not finite: no file, exit 1; an older one stays."""
    broken = make_stub(own_place / "broken", decoder="nan")
    (own_place / "old.wav").write_bytes(b"mine")
    ran = sa3("x", "-m", broken, "--seconds", 0.5, "-o", own_place / "old.wav", "--force", "--json")
    assert ran.code == 1
    assert "nothing was written" in ran.err
    assert ran.objects[0]["error"]["exit_code"] == 1
    assert (own_place / "old.wav").read_bytes() == b"mine"
    assert not list(own_place.rglob("*.part"))


def test_silence_is_written_told_and_recorded(make_stub, sa3, own_place):
    """CASES 31: a silent clip is a result, and is called one, also when quiet."""
    silent = make_stub(own_place / "silent", decoder="silence")
    ran = sa3("x", "-m", silent, "--seconds", 0.5, "--json", "-q")
    assert ran.code == 0
    assert ran.objects[0]["warnings"]
    assert "warning: the clip is" in ran.err


def test_a_missing_model_is_code_3_with_the_command_that_gets_it(sa3):
    """CASES 28: a model that is not on this machine."""
    ran = sa3("x", "-m", "small-music")
    assert ran.code == 3
    assert "sa3 pull small-music" in ran.err


def test_dry_run_checks_and_writes_nothing(clip, own_place, no_loading):
    ran = clip("x", "--seeds", "1-2", "--dry-run")
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 2
    assert not (own_place / "output").exists()
    assert clip("x", "--dry-run", "--steps", 0).code == 2


def test_the_picture_is_beside_the_clip_and_never_overwritten(clip, own_place):
    path = clip("x", "-o", "a.wav", "--spectrogram").paths[0]
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    path.unlink()
    assert "picture exists already" in clip("x", "-o", "a.wav", "--spectrogram").err
    assert clip("x", "-o", "a.wav", "--spectrogram", "--force").code == 0


def test_play_names_the_players_it_looked_for(sa3, clip, own_place, monkeypatch):
    path = clip("x").paths[0]
    monkeypatch.setenv("PATH", str(own_place))
    ran = sa3("play", path)
    assert ran.code == 1
    assert "no player was found – install one of afplay" in ran.err
    player = own_place / "aplay"
    player.write_text('#!/bin/sh\necho "$2" > played.txt\n')
    player.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own_place}:/bin:/usr/bin")
    assert sa3("play", path, "--json").objects == [{"path": str(path), "player": "aplay"}]
    assert Path("played.txt").read_text().strip() == str(path)
    player.write_text("#!/bin/sh\necho no such device >&2\nexit 1\n")
    ran = sa3("play", path)
    assert ran.code == 1
    assert "aplay could not play" in ran.err
    assert "no such device" in ran.err
    assert sa3("play", own_place / "nothing.wav").code == 2


def test_the_true_size_is_in_the_header_on_standard_output(spawn, stub):
    """CASES 43: `--out -` gives a header with the right sizes."""
    done = spawn("x", "-m", stub, "--seconds", 0.5, "-o", "-", "--seed", 1)
    data = done.stdout
    assert done.returncode == 0
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
    assert struct.unpack("<I", data[40:44])[0] == 4 * RATE // 2
    assert b"seed 1" in done.stderr
    flac = spawn("x", "-m", stub, "--seconds", 0.5, "-o", "-", "--format", "flac")
    assert flac.stdout[:4] == b"fLaC"


@pytest.mark.parametrize(
    "words", [["--json"], ["--seeds", "1-2"], ["--spectrogram"], ["--play"]], ids=" ".join
)
def test_standard_output_is_not_shared(clip, no_loading, words):
    ran = clip("x", "-o", "-", *words)
    assert ran.code == 2


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


def test_bare_names_land_in_the_output_folder_of_the_project():
    from sa3_runtime.cli.targets import output_folder

    assert output_folder(None) == Path(__file__).parents[3] / "output"
    assert output_folder("there") == Path("there")


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


def test_bench_times_every_length(sa3, stub):
    (found,) = sa3("bench", "-m", stub, "--seconds", "0.5,1", "--repeat", 1, "--json").objects
    assert [row["seconds"] for row in found["rows"]] == [0.5, 1.0]
    assert all(0 < row["median"] < 60 for row in found["rows"])
    assert found["peak_rss_bytes"] > 1e7
    assert len(sa3("bench", "-m", stub, "--seconds", "0.5", "--repeat", 1).out.splitlines()) == 3
    assert sa3("bench", "-m", stub, "--seconds", "a").code == 2
    assert "too long" in sa3("bench", "-m", stub, "--seconds", "500").err


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
