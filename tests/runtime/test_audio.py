"""Sound files: what is read, what is written, what survives in the tags."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from sa3_models.errors import RunFailed, UsageError
from sa3_runtime.audio import encode, read, read_tags, write
from sa3_runtime.audio import formats as formats_module
from sa3_runtime.audio.formats import FORMATS, encoding_for
from sa3_runtime.audio.reading import resampled, to_stereo
from sa3_runtime.audio.tags import OPUS_TAG_BYTES
from sa3_runtime.audio.wav import parse_wav, wav_bytes

RATE = 44_100
TWO_SECONDS = 2 * RATE
JSON = json.dumps({"prompt": "Dalí — 日本の太鼓 🥁", "steps": list(range(800))})
TAGS = {"title": "Dalí — 日本の太鼓 🥁", "software": "sa3 0.1.0", "comment": JSON}


def sine(frames: int = TWO_SECONDS, channels: int = 2, rate: int = RATE) -> np.ndarray:
    """float64 [frames, channels], amplitude 0.8: 440 Hz left, 660 Hz right, 440 again, …"""
    t = np.arange(frames)[:, None] / rate
    return 0.8 * np.sin(2 * np.pi * np.array([440, 660] * 4)[:channels] * t)


def pcm16(frames: int = TWO_SECONDS) -> np.ndarray:
    return np.round(sine(frames) * 32767).astype(np.int16)


def chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def riff(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def layout(bits: int, channels: int = 2, rate: int = RATE, tag: int = 1) -> bytes:
    align = channels * bits // 8
    return struct.pack("<HHIIHH", tag, channels, rate, rate * align, align, bits)


def extensible(bits: int, channels: int, tag: int) -> bytes:
    guid = struct.pack("<H", tag) + bytes.fromhex("000000001000800000aa00389b71")
    return layout(bits, channels, tag=0xFFFE) + struct.pack("<HHI", 22, bits, 0) + guid


def packed(x: np.ndarray, bits: int, kind: str) -> bytes:
    """Samples of ±1 as the bytes of an encoding, without any library for sound."""
    if kind == "float":
        return x.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(x * 128) + 128).astype(np.uint8).tobytes()
    whole = np.round(x * 2.0 ** (bits - 1)).astype("<i8")
    return whole.view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()


ENCODINGS = [(8, "int"), (16, "int"), (24, "int"), (32, "int"), (32, "float"), (64, "float")]


@pytest.mark.parametrize("header", ["plain", "extensible"])
@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8])
@pytest.mark.parametrize(("bits", "kind"), ENCODINGS)
def test_every_wav_encoding_is_read_to_one_lsb(tmp_path, bits, kind, channels, header):
    """CASES 25: PCM 8/16/24/32 and float 32/64, plain and extensible, 1 to 8 channels."""
    x = sine(1000, channels)
    tag = 3 if kind == "float" else 1
    fmt = layout(bits, channels, tag=tag) if header == "plain" else extensible(bits, channels, tag)
    path = tmp_path / "in.wav"
    path.write_bytes(riff(chunk(b"fmt ", fmt), chunk(b"data", packed(x, bits, kind))))
    lsb = 2.0 ** (1 - bits) if kind == "int" else 1e-7
    wav = parse_wav(path.read_bytes(), "in.wav")
    assert wav.notes == ()
    assert np.abs(wav.samples - x.T).max() <= lsb + 6e-8  # float32 itself
    got = read(path).samples
    assert got.dtype == np.float32
    assert got.shape == (2, 1000)
    if channels <= 2:
        assert np.abs(got - x.T).max() <= lsb + 6e-8


def test_chunks_around_the_sound_do_no_harm(tmp_path):
    """CASES 25: LIST of odd size before the data, bext before, cue and unknown chunks after."""
    data = packed(sine(501), 24, "int")
    path = tmp_path / "in.wav"
    path.write_bytes(
        riff(
            chunk(b"bext", b"b" * 603),
            chunk(b"LIST", b"INFOISFT" + struct.pack("<I", 3) + b"abc\0"),
            chunk(b"LIST", b"odd"),
            chunk(b"fmt ", layout(24)),
            chunk(b"data", data),
            chunk(b"cue ", b"c" * 5),
            chunk(b"xyz ", b"z"),
        )
    )
    sound = read(path)
    assert sound.notes == ()
    assert np.abs(sound.samples - sine(501).T).max() < 2**-22
    assert read_tags(path) == {"software": "abc"}


@pytest.mark.parametrize("frames", [0, 1])
@pytest.mark.parametrize("trailer", [b"", chunk(b"LIST", b"INFO")])
def test_no_frame_and_one_frame(tmp_path, frames, trailer):
    """CASES 25: a data chunk of 0 frames and of 1 frame, with and without a chunk behind it."""
    path = tmp_path / "in.wav"
    data = packed(sine(5)[2 : 2 + frames], 16, "int")
    path.write_bytes(riff(chunk(b"fmt ", layout(16)), chunk(b"data", data), trailer))
    sound = read(path)
    assert sound.samples.shape == (2, frames)
    assert sound.notes == ()


@pytest.mark.parametrize("rate", [8000, 48_000])
@pytest.mark.parametrize("frames", [0, 1, 2])
def test_hardly_any_sound_at_another_rate(tmp_path, frames, rate):
    path = tmp_path / "in.wav"
    path.write_bytes(wav_bytes(pcm16(frames), rate))
    assert read(path).samples.shape == (2, round(frames * RATE / rate))


def broken(case: str) -> bytes:
    good = bytearray(riff(chunk(b"fmt ", layout(16)), chunk(b"data", pcm16().tobytes())))
    true = 4 * TWO_SECONDS
    sizes = {
        "data size 0": 0,
        "data size unknown": 0xFFFFFFFF,
        "data size too large by 1": true + 1,
        "data size odd": true - 1,
    }
    if case in sizes:
        good[40:44] = struct.pack("<I", sizes[case])
    elif case == "riff size 0":
        good[4:8] = struct.pack("<I", 0)
    elif case == "riff size too large":
        good[4:8] = struct.pack("<I", 0x7FFFFFFF)
    elif case == "rf64":
        ds64 = chunk(b"ds64", struct.pack("<QQQI", true + 72, true, TWO_SECONDS, 0))
        good[:12] = b"RF64\xff\xff\xff\xffWAVE" + ds64
        at = good.index(b"data")
        good[at + 4 : at + 8] = b"\xff" * 4
        good += chunk(b"LIST", b"INFO")
    elif case == "truncated in mid frame":
        good = good[:-101]
    return bytes(good)


@pytest.mark.parametrize(
    ("case", "lost", "told"),
    [
        ("data size 0", 0, True),
        ("data size unknown", 0, True),
        ("data size too large by 1", 0, True),
        ("data size odd", 1, True),
        ("riff size 0", 0, False),
        ("riff size too large", 0, True),
        ("rf64", 0, False),
        ("truncated in mid frame", 26, True),
    ],
)
def test_broken_headers_give_the_sound_that_is_there(tmp_path, case, lost, told):
    """CASES 43: sizes of 0, 0xFFFFFFFF, wrong by one, RF64, cut in the middle of a frame."""
    path = tmp_path / "in.wav"
    path.write_bytes(broken(case))
    sound = read(path)
    assert sound.samples.shape == (2, TWO_SECONDS - lost)
    assert np.abs(sound.samples - sine()[: TWO_SECONDS - lost].T).max() < 2**-14
    assert bool(sound.notes) is told


def test_other_wav_encodings_go_through_the_library_or_are_named(tmp_path, monkeypatch):
    """CASES 25: mu-law is read by libsndfile; without it, and for the unknown, one clear line."""
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "law.wav"
    soundfile.write(path, sine(2000), RATE, subtype="ULAW")
    assert np.abs(read(path).samples - sine(2000).T).max() < 0.04
    assert read(path, seconds=0.01).samples.shape == (2, 441)
    assert read_tags(path) == {}
    monkeypatch.setattr("sa3_runtime.audio.reading.has", lambda package: False)
    with pytest.raises(UsageError, match=r"mu-law in law.wav – convert it first"):
        read(path)
    monkeypatch.undo()
    path.write_bytes(riff(chunk(b"fmt ", layout(16, tag=0x1234)), chunk(b"data", b"\0" * 64)))
    with pytest.raises(UsageError, match="not a sound file"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello, this is a text file, not sound", "not a sound file"),
        (riff(chunk(b"data", b"\0" * 8)), "no format chunk"),
        (riff(chunk(b"fmt ", layout(16))), "no data chunk"),
        (riff(chunk(b"fmt ", layout(16, channels=0)), chunk(b"data", b"")), "makes no sense"),
        (riff(chunk(b"fmt ", layout(16, rate=0)), chunk(b"data", b"")), "makes no sense"),
        (riff(chunk(b"fmt ", layout(16, rate=3)), chunk(b"data", b"abcd")), "sample rate"),
        (riff(chunk(b"fmt ", b"short"), chunk(b"data", b"")), "too short"),
        (
            riff(
                chunk(b"fmt ", layout(32, tag=3)),
                chunk(b"data", np.array([0, np.nan, np.inf, 1], "<f4").tobytes()),
            ),
            "2 NaN or infinite",
        ),
    ],
)
def test_what_is_no_sound_is_refused_in_one_line(tmp_path, content, message):
    """CASES 28: unreadable input ends with a sentence and exit code 2."""
    path = tmp_path / "in.wav"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no such sound file"):
        read(tmp_path / "nothing.wav")
    with pytest.raises(UsageError, match="folder"):
        read(tmp_path)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_a_tone_keeps_its_pitch_and_level_at_every_rate(tmp_path, rate):
    t = np.arange(rate) / rate
    tone = np.round(0.5 * 32767 * np.sin(2 * np.pi * 1000 * t)).astype(np.int16)
    path = tmp_path / "in.wav"
    path.write_bytes(wav_bytes(np.stack([tone, -tone], 1), rate))
    sound = read(path)
    assert sound.samples.shape == (2, RATE)
    middle = sound.samples[:, 4410:-4410]
    expected = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)[4410:-4410]
    assert np.abs(middle - np.stack([expected, -expected])).max() < 1e-4
    assert bool(sound.notes) is (rate != RATE)


def test_mono_and_surround_become_stereo():
    x = sine(100, 1).T.astype(np.float32)
    assert np.array_equal(to_stereo(x), np.concatenate([x, x]))
    for channels in range(3, 12):
        same = np.repeat(x, channels, axis=0)
        if channels in (6, 7, 8):
            same[3] = 9.0  # the low-frequency channel takes no part
        assert np.allclose(to_stereo(same), np.concatenate([x, x]), atol=1e-6), channels
    left_only = np.zeros((6, 1), np.float32)
    left_only[4] = 1  # left surround
    assert to_stereo(left_only)[1, 0] == 0 < to_stereo(left_only)[0, 0]


def test_what_was_done_is_told_once(tmp_path):
    path = tmp_path / "take 1.wav"
    path.write_bytes(wav_bytes(pcm16(4800)[:, :1], 48_000, "wav24"))
    assert read(path).notes == (
        "take 1.wav (24-bit): mono copied to both channels, resampled from 48,000 Hz to 44,100 Hz",
    )


def test_only_the_wanted_beginning_is_read(tmp_path):
    path = tmp_path / "in.wav"
    path.write_bytes(wav_bytes(pcm16(), RATE))
    part = read(path, seconds=0.5).samples
    assert part.shape == (2, RATE // 2)
    assert np.array_equal(part, read(path).samples[:, : RATE // 2])


@pytest.mark.parametrize("encoding", FORMATS, ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("frames", [1, 4410, 70_001])
def test_every_format_is_written_and_read_back(tmp_path, encoding, frames):
    path = write(
        tmp_path / f"Dalí 太鼓{encoding.suffix}",
        pcm16(frames),
        sample_rate=RATE,
        format=encoding.name,
        tags=TAGS,
    )
    sound = read(path).samples
    assert sound.shape == (2, frames)
    source = pcm16(frames).T / np.float32(32768)
    if encoding.container in ("wav", "flac"):
        assert np.array_equal(sound, source)
    elif frames > 4410:
        error = sound - source
        assert np.sqrt((error**2).mean()) < 0.02 * np.sqrt((source**2).mean())
    tags = read_tags(path)
    assert tags["title"] == TAGS["title"]
    assert tags["comment"] == JSON
    assert tags["software"].startswith("sa3 0.1.0")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # no .part is left


def test_the_sixteen_bit_wav_is_what_the_standard_library_reads():
    data = encode(pcm16(100), RATE, encoding_for("a.wav"), TAGS)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, RATE)
        assert file.readframes(1000) == pcm16(100).tobytes()
    assert data[36:40] == b"data"  # at its customary place, for readers that assume it
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8


@pytest.mark.parametrize("encoding", FORMATS[:3], ids=lambda encoding: encoding.name)
def test_our_wav_files_are_read_by_libsndfile(tmp_path, encoding):
    soundfile = pytest.importorskip("soundfile")
    path = write(tmp_path / "a.wav", pcm16(999), sample_rate=RATE, format=encoding.name)
    got, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE
    assert np.array_equal(got, pcm16(999) / np.float32(32768))


def test_wav_needs_no_library(tmp_path, monkeypatch):
    monkeypatch.setattr(formats_module, "has", lambda package: False)
    write(tmp_path / "a.wav", pcm16(10), sample_rate=RATE, tags=TAGS)
    assert read_tags(tmp_path / "a.wav") == TAGS
    with pytest.raises(RunFailed, match=r"flac needs the package soundfile – pip install"):
        write(tmp_path / "a.flac", pcm16(10), sample_rate=RATE)


def test_a_comment_of_any_length_survives_in_wav_flac_ogg_and_mp3(tmp_path):
    comment = json.dumps({"prompt": "x" * 100_000})
    for suffix in (".wav", ".flac", ".ogg", ".mp3"):
        path = write(
            tmp_path / f"a{suffix}", pcm16(100), sample_rate=RATE, tags={"comment": comment}
        )
        assert read_tags(path)["comment"] == comment
    with pytest.raises(UsageError, match="too long for the tags of an Opus file"):
        write(tmp_path / "a.opus", pcm16(100), sample_rate=RATE, tags={"comment": comment})
    fits = {"title": "t", "comment": "x" * (OPUS_TAG_BYTES - 1)}
    path = write(tmp_path / "b.opus", pcm16(1), sample_rate=RATE, tags=fits)
    assert read_tags(path) == fits


@pytest.mark.parametrize("encoding", FORMATS, ids=lambda encoding: encoding.name)
def test_a_tag_without_an_utf8_form_is_written_with_question_marks(tmp_path, encoding):
    """CASES 46: a lone surrogate is what an undecodable byte of a terminal becomes."""
    path = tmp_path / f"out{encoding.suffix}"
    tags = {"title": "kick \udcff 太鼓"}
    write(path, pcm16(4410), sample_rate=RATE, format=encoding.name, tags=tags)
    assert read_tags(path)["title"] == "kick ? 太鼓"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pcm": sine(10)}, r"must be int16 \[n, 2\]: float64 \[10, 2\]"),
        ({"pcm": pcm16(10)[:, 0]}, r"must be int16 \[n, 2\]: int16 \[10\]"),
        ({"pcm": [[0, 0]]}, r"must be int16 \[n, 2\]: \[\[0, 0\]\]"),
        ({"path": None}, "path must be a path: None"),
        ({"format": 16}, "format must be text: 16"),
        ({"tags": {"title": 3}}, "the tag title must be text: 3"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_cannot_be_written_is_refused(tmp_path, options, told):
    """Floats were cut to whole numbers: silence."""
    options = {"path": tmp_path / "a.wav", "pcm": pcm16(10), "sample_rate": RATE} | options
    with pytest.raises(UsageError, match=told):
        write(**options)
    assert not list(tmp_path.iterdir())


def test_an_old_file_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    """CASES 55: a crash while writing leaves the older file as it was, and no .part."""
    path = write(tmp_path / "a.wav", pcm16(10), sample_rate=RATE)
    before = path.read_bytes()

    def cut_short(self, data):
        with self.open("wb") as file:
            file.write(data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(RunFailed, match="No space left on device – free some space"):
        write(path, pcm16(500), sample_rate=RATE)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_one_and_dev_null_is_written(tmp_path):
    """CASES 55: symlink, /dev/null."""
    (tmp_path / "link.wav").symlink_to("real.wav")
    write(tmp_path / "link.wav", pcm16(10), sample_rate=RATE)
    assert (tmp_path / "link.wav").is_symlink()
    assert read(tmp_path / "real.wav").samples.shape == (2, 10)
    write("/dev/null", pcm16(10), sample_rate=RATE, format="wav")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("a.wav", None, "wav"), ("a.WAV", None, "wav"), ("a.wave", None, "wav"), ("a", None, "wav"),
        ("a.wav", "wav24", "wav24"), ("a.wav", "WAV-float", "wavfloat"), ("a.oga", None, "ogg"),
        ("a.flac", "flac", "flac"), (None, "opus", "opus"), (None, None, "wav"),
    ],
)  # fmt: skip
def test_the_format_follows_from_suffix_and_name(path, name, expected):
    assert encoding_for(path, name).name == expected


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("a.xyz", None, r"unknown sound file suffix: .xyz – known are .wav, .flac"),
        ("a.wav", "flac", "contradict each other"),
        ("a.wav", "aac", "unknown sound format: aac"),
    ],
)
def test_formats_that_cannot_be_are_refused(path, name, message):
    with pytest.raises(UsageError, match=message):
        encoding_for(path, name)


def test_resampling_has_the_exact_length():
    for frames in (1, 2, 3, 441, 4800, 44_099):
        for rate in (8000, 11_025, 48_000, 96_000):
            got = resampled(np.ones((2, frames), np.float32), rate, RATE)
            assert got.shape == (2, round(frames * RATE / rate))


def test_damaged_files_give_sound_or_one_sentence(tmp_path):
    """CASES 25, 43: whatever bytes are flipped or cut off: sound, or a UsageError, nothing else."""
    rng = random.Random(5)
    whole = [(e.suffix, encode(pcm16(3000), RATE, e, TAGS)) for e in FORMATS]
    for _ in range(400):
        suffix, data = rng.choice(whole)
        damaged = bytearray(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
        for _ in range(rng.choice((1, 2, 5, 30))):
            near = min(len(damaged), rng.choice((64, 200, len(data))))
            damaged[rng.randrange(near)] = rng.choice((0, 128, 255, rng.randrange(256)))
        path = tmp_path / f"damaged{suffix}"
        path.write_bytes(damaged)
        for look in (read, read_tags):
            with contextlib.suppress(UsageError):
                look(path)


def test_memory_follows_what_is_there_not_what_the_header_promises(tmp_path):
    data = bytearray(encode(pcm16(3000), RATE, encoding_for("a.flac"), {}))
    data[21] |= 0x0F  # 36 bits of STREAMINFO hold the number of samples: 64 billion
    (tmp_path / "a.flac").write_bytes(data)
    with contextlib.suppress(UsageError):  # a version of the library may refuse it
        assert read(tmp_path / "a.flac").samples.shape[1] <= 3000


def test_a_signal_while_encoding_never_costs_a_piece_of_the_sound(capfd):
    """The library's callbacks into Python swallow exceptions: 3 of 12 runs wrote broken files."""
    pcm = np.random.default_rng(1).integers(-9000, 9000, (400_000, 2), np.int16)
    whole = encode(pcm, 44_100, encoding_for("a.flac"), {})

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for delay in range(1, 21):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay / 2000)
                data = encode(pcm, 44_100, encoding_for("a.flac"), {})
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert data == whole
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    assert capfd.readouterr().err == ""
