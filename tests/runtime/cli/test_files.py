"""Where clips go: names, folders, what is overwritten, what cannot be written."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from sa3_models.errors import RunFailed
from sa3_runtime import audio
from sa3_runtime.cli.targets import NAME_BYTES, default_name

RATE = 44_100


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


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_a_file_that_came_to_be_meanwhile_is_not_overwritten(
    clip, own_place, monkeypatch, pcm_of, links
):
    """CASES 55: runs side by side choose the same default name before either has written."""

    def refused(self, target):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    write, other = audio.write, b"another run's clip"

    def late(path, *args, **kw):
        monkeypatch.setattr(audio, "write", write)
        Path(path).write_bytes(other)
        return write(path, *args, **kw)

    monkeypatch.setattr(audio, "write", late)
    ran = clip("x", "--seed", 1)
    assert ran.code == 0
    (path,) = ran.paths
    assert path.name.endswith("-1-x-2.wav")
    assert len(pcm_of(path)) == RATE // 2
    (first,) = [found for found in path.parent.iterdir() if found != path]
    assert first.read_bytes() == other

    monkeypatch.setattr(audio, "write", late)
    ran = clip("x", "-o", "./mine.wav")
    assert ran.code == 1
    assert "could not be written: mine.wav: File exists – the clip is in" in ran.err
    assert Path("mine.wav").read_bytes() == other

    monkeypatch.setattr(audio, "write", late)
    assert clip("x", "-o", "./again.wav", "--force").code == 0
    assert len(pcm_of(Path("again.wav"))) == RATE // 2
    assert not list(own_place.rglob("*.part"))


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


def test_force_overwrites(clip, own_place, pcm_of):
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
    ran = clip("x", "--play")
    assert "no player was found" in ran.err
    assert "leave --play out" in ran.err  # there is nothing to open yet
    monkeypatch.setattr("sa3_runtime.audio.formats.has", lambda package: False)
    ran = clip("x", "-o", "a.flac")
    assert ran.code == 1
    assert "flac needs the package soundfile – pip install" in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_code_1_and_the_clip_is_kept(clip, pcm_of):
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


def test_a_clip_that_cannot_be_saved_is_kept_elsewhere(clip, monkeypatch, pcm_of):
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


@pytest.mark.parametrize("words", [("--dry-run",), ()])
def test_a_fixed_ceiling_is_refused_before_the_model_is_loaded(clip, no_loading, words):
    ran = clip("x", "--limiter-ceiling", 0.5, *words)
    assert ran.code == 2
    assert "this decoder's limiter has a fixed ceiling" in ran.err


def test_the_picture_is_beside_the_clip_and_never_overwritten(clip, own_place):
    made = clip("x", "-o", "a.wav", "--spectrogram")
    path = made.paths[0]
    assert f"picture: {path.with_suffix('.png')}" in made.err
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
    assert f"or open {path}" in ran.err
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


def test_bare_names_land_in_the_output_folder_of_the_project():
    from sa3_runtime.cli.targets import output_folder

    assert output_folder(None) == Path(__file__).parents[3] / "output"
    assert output_folder("there") == Path("there")
