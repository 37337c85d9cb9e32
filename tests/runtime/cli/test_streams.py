"""Streams as scripts and odd machines hand them over: encodings, pipes, terminals, signals."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sa3_runtime.audio.wav import wav_bytes
from sa3_runtime.cli.progress import Progress
from sa3_runtime.devices import Progress as Event
from sa3_runtime.view import View, duration, size

PROMPT = "Dalí — 日本の太鼓 🥁"
OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}


def test_old_locales_and_odd_bytes_are_no_reason_to_fail(spawn, stub, own_place):
    """CASES 46: C locale, ASCII streams; prompt and paths beyond ASCII, with an invalid byte."""
    pcm = np.zeros((44_100, 2), np.int16)
    pcm[:, 0] = np.arange(44_100) % 999
    source = os.fsencode(own_place) + "/Dalí 太鼓 ".encode() + b"\xff.wav"
    Path(os.fsdecode(source)).write_bytes(wav_bytes(pcm, 48_000))
    target = os.fsencode(own_place) + "/größe 🥁 ".encode() + b"\xfe.wav"
    done = spawn(
        PROMPT.encode(),
        "-m",
        stub,
        "--init-audio",
        source,
        "-o",
        target,
        "--seed",
        7,
        "-v",
        env=OLD,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == target + b"\n"  # byte for byte, for scripts
    assert Path(os.fsdecode(target)).is_file()
    assert done.stderr.isascii()
    shown = spawn("inspect", target, env=OLD)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()
    as_json = spawn("inspect", target, "--json", env=OLD)
    assert json.loads(as_json.stdout)["request"]["prompt"] == PROMPT
    again = spawn("--from", target, "-o", own_place / "again.wav", env=OLD)
    assert again.returncode == 0, again.stderr
    assert (own_place / "again.wav").read_bytes() == Path(os.fsdecode(target)).read_bytes()


def test_a_prompt_of_invalid_bytes_is_taken_with_replacement_letters(spawn, stub):
    """CASES 46: an invalid byte in the prompt."""
    done = spawn(b"rain \xff", "-m", stub, "--seconds", 0.1, "--json")
    assert done.returncode == 0, done.stderr
    assert b'"prompt": "rain \\ufffd"' in done.stdout


@pytest.mark.parametrize("env", [{}, OLD], ids=["utf-8", "ascii"])
def test_errors_are_printed_in_any_encoding(spawn, env):
    """CASES 46: an error that quotes what was typed."""
    done = spawn(PROMPT.encode(), "-m", "太鼓", env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(b"sa3: there is no model")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_to_fail(start, stub, own_place, closing):
    """CASES 46: stdout closed; and nothing printed lands in the file that got its number."""
    process = start("x", "-m", stub, "--seconds", 0.2, "-o", "./a.wav", wrap=closing)
    assert process.wait(60) == 0
    data = (own_place / "a.wav").read_bytes()
    assert data[:4] == b"RIFF"
    assert int.from_bytes(data[4:8], "little") == len(data) - 8


@pytest.mark.parametrize("closing", ["1</dev/null", "2</dev/null", "2>/dev/full"])
def test_streams_that_take_nothing_are_no_reason_to_fail(start, stub, own_place, closing):
    """CASES 46: a shell hands its script over in place of a closed stream; a full disk."""
    process = start("x", "-m", stub, "--seconds", 0.2, "-o", "./a.wav", wrap=closing)
    assert process.wait(60) == 0
    assert (own_place / "a.wav").is_file()


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("x", "-o", "-"), ("--help",)])
def test_standard_output_on_a_full_disk_is_said_and_gives_a_code(start, stub, words):
    """CASES 28: full disk."""
    more = ("-m", stub, "--seconds", 0.2) if words[0] == "x" else ()
    process = start(*words, *more, wrap=">/dev/full", stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    said = err.decode().splitlines()[-1]
    assert said.startswith("sa3: reading or writing failed: No space left on device")
    assert b"Traceback" not in err


def test_nobodys_text_steers_the_terminal(sa3, stub, own_place):
    """Prompts, tags and names of files hold control characters if somebody wants them to."""
    steering = "\x1b]0;title\x07\x1b[2Jrain\x9b2J\r\x00"
    made = sa3("generate", "--prompt", steering, "-m", stub, "--seconds", 0.2, "-o", "./a.wav")
    shown = sa3("inspect", "./a.wav")
    refused = sa3("inspect", "./\x1b[2J.wav")
    for text in (made.err, shown.out, refused.err):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\r", "\x00"}
    assert "\\x1b[2Jrain" in shown.out
    assert "\\x1b[2J.wav" in refused.err


def test_silence_has_no_level(sa3, own_place):
    Path("silent.wav").write_bytes(wav_bytes(np.zeros((100, 2), np.int16), 44_100))
    shown = sa3("inspect", "./silent.wav").out
    assert re.search(r"peak +silence", shown)
    assert "None" not in shown


def test_rendering_leaves_no_identifier_behind(spawn, stub, own_place):
    """CASES 16: ONNX Runtime keeps one, and asks the network for its collector, unless told."""
    env = {"HOME": str(own_place), "XDG_CACHE_HOME": None, "ORT_DISABLE_TELEMETRY": None}
    done = spawn("x", "-m", stub, "--seconds", 0.2, "-o", "./a.wav", env=env)
    assert done.returncode == 0, done.stderr
    assert not (own_place / ".cache").exists()


def test_a_reader_that_leaves_is_no_reason_to_shout(start, stub, own_place):
    """CASES 28, 46: piped to head: no traceback; the file is complete, so the code is 0."""
    process = start("x", "-m", stub, "--seconds", 0.2, "-o", "./a.wav", wrap="| head -c 0")
    _, err = process.communicate(timeout=60)
    assert (own_place / "a.wav").is_file()
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


def test_sound_into_a_pipe_that_closes_ends_quietly_with_a_code(start, stub):
    """CASES 28: broken pipe: the sound was not delivered, so the code is not 0."""
    process = start("x", "-m", stub, "--seconds", 20, "-o", "-", stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE)  # fmt: skip
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1
    assert b"Traceback" not in err
    assert b"Broken" not in err


def test_a_prompt_from_standard_input(spawn, stub):
    done = spawn("-", "-m", stub, "--seconds", 0.1, "--json", input=PROMPT.encode() + b"\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["request"]["prompt"] == PROMPT
    assert b"only one prompt" in spawn("-p", "-", "-p", "-", "-m", stub, input=b"x").stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "kill"]
)
def test_a_run_that_is_stopped_leaves_whole_files_only(start, stub, own_place, number, code):
    """CASES 28, 55: Ctrl-C and kill in the middle of many clips: code, no .part, whole files."""
    process = start(
        "x", "-m", stub, "--seconds", 100, "--steps", 200, "--seeds", "1-400",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    output = own_place / "output"
    deadline = time.monotonic() + 30
    while len(list(output.glob("*.wav"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert b"Traceback" not in err
    files = list(output.iterdir())
    assert 2 <= len(files) < 400
    for path in files:
        data = path.read_bytes()
        assert path.suffix == ".wav"
        assert int.from_bytes(data[4:8], "little") == len(data) - 8


def test_an_interruption_of_the_imports_says_nothing():
    """CASES 55: Ctrl-C before there is anything to clean up."""
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'sa3_runtime.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from sa3_runtime.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def through_terminal(start, *words, env=None) -> tuple[int, str]:
    """(exit code, what a terminal on stderr was sent)."""
    parent, child = pty.openpty()
    process = start(*words, stdout=subprocess.DEVNULL, stderr=child, env=env or {})
    os.close(child)
    sent = b""
    while True:
        ready, _, _ = select.select([parent], [], [], 30)
        try:
            block = os.read(parent, 65536) if ready else b""
        except OSError:  # Linux says so when the other side is closed
            break
        if not block:
            break
        sent += block
    os.close(parent)
    return process.wait(60), sent.decode()


def test_a_terminal_shows_stages_steps_and_the_time_left(start, stub):
    words = ["x", "-m", stub, "--seconds", 100, "--steps", 1000]
    code, sent = through_terminal(start, *words, env={"TERM": "xterm"})
    assert code == 0
    assert "loading" in sent
    assert "sampling" in sent
    assert "/1000" in sent
    assert " left" in sent
    assert "\r\x1b[K" in sent
    for quiet in (["--quiet"], []):
        env = {"TERM": "xterm"} if quiet else {"TERM": "dumb"}
        _, sent = through_terminal(start, *words, *quiet, env=env)
        assert "\x1b" not in sent
        assert "sampling" not in sent


@pytest.mark.parametrize(
    ("env", "words", "coloured"),
    [
        ({"TERM": "xterm"}, [], True), ({"TERM": "xterm", "NO_COLOR": "1"}, [], False),
        ({"TERM": "dumb"}, [], False), ({"TERM": "xterm"}, ["--no-color"], False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, [], True),
    ],
)  # fmt: skip
def test_colours_are_for_terminals_that_want_them(start, env, words, coloured):
    code, sent = through_terminal(start, "x", "-m", "nothing", *words, env=env)
    assert code == 2
    assert ("\x1b[31m" in sent) is coloured


def test_no_colours_and_no_progress_without_a_terminal(spawn, stub):
    done = spawn("x", "-m", stub, "--seconds", 0.2)
    assert b"\x1b" not in done.stderr
    forced = spawn("x", "-m", "nothing", env={"FORCE_COLOR": "1"})
    assert b"\x1b[31m" in forced.stderr


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_progress_counts_and_wipes_its_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = [100.0]
    monkeypatch.setattr("sa3_runtime.cli.progress.time.monotonic", lambda: clock[0])
    with Progress(View()) as progress:
        progress.title = "2/3 "
        progress(Event("dit_step", 0, 8, 0.0))
        for done in range(1, 5):
            clock[0] += 10
            progress(Event("dit_step", done, 8, 0.0))
        shown = sys.stderr.getvalue().split("\r\x1b[K")[-1]
        assert shown == "2/3 sampling   ████████████░░░░░░░░░░░░ 4/8  40 s left"
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_progress_is_drawn_ten_times_a_second_at_most(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = [100.0]
    monkeypatch.setattr("sa3_runtime.cli.progress.time.monotonic", lambda: clock[0])
    progress = Progress(View())
    for done in range(1001):
        clock[0] += 0.001
        progress(Event("dit_step", done, 1000, 0.0))
    assert sys.stderr.getvalue().count("\r") <= 13


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_in_words(seconds, text):
    assert duration(seconds) == text


def test_sizes_in_words():
    assert [size(n) for n in (7, 1500, 34_400_000, 1.7e9)] == ["7 B", "1.5 kB", "34.4 MB", "1.7 GB"]
