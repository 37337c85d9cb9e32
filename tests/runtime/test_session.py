"""Sessions: what is checked, told and kept the same, mostly on a stub model."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa3_models.errors import ArtefactMissing, CheckpointError, RunFailed, UsageError
from sa3_runtime import Clip, Request, Session, load
from sa3_runtime.devices import Progress
from sa3_runtime.devices.cpu import CpuDevice

Script = Callable[..., "subprocess.CompletedProcess[str]"]

MakeStub = Callable[..., Path]


@pytest.fixture(scope="module")
def stub_session(stub: Path) -> Any:
    with load(stub, threads=1) as session:
        yield session


@pytest.mark.parametrize("decoder", ["nan", "huge"])
def test_what_is_no_sound_becomes_no_clip(
    make_stub: MakeStub, tmp_path: Path, decoder: str
) -> None:
    """CASES 04: −2³¹ in the decoder's output is a NaN or an infinity."""
    with (
        load(make_stub(tmp_path / "stub", decoder)) as session,
        pytest.raises(RunFailed, match=r"not numbers or beyond full scale.*precision") as failed,
    ):
        session.generate("x", seconds=1)
    assert failed.value.exit_code == 1


def test_latents_that_are_not_finite_become_no_clip(stub: Path) -> None:
    """CASES 04: found before the decoder's integer cast can hide them."""
    with load(stub) as session:
        run = session.device.run

        def spoiled(*args: Any, **options: Any) -> Any:
            result = run(*args, **options)
            result.outputs["latents"][0, 0, 3] = np.inf
            return result

        session.device.run = spoiled  # type: ignore[method-assign]
        with pytest.raises(RunFailed, match=r"1 of \d+ latents"):
            session.generate("x", seconds=1)


@pytest.mark.parametrize(
    ("decoder", "told"), [("constant", "constant"), ("silence", "constant"), ("frames", None)]
)
def test_a_constant_clip_is_told(
    make_stub: MakeStub, tmp_path: Path, decoder: str, told: str | None
) -> None:
    """CASES 04 and 31."""
    with load(make_stub(tmp_path / "stub", decoder)) as session:
        warnings = session.generate("x", seconds=1).warnings
    assert (told is None and not warnings) or told in warnings[0]


def test_a_silent_clip_is_told() -> None:
    """CASES 31: below −60 dBFS."""
    from sa3_runtime.result import suspicions

    quiet = np.zeros((1000, 2), np.int16)
    quiet[::2] = 32
    assert "silent" in next(suspicions(quiet))
    quiet[0] = 33
    assert not list(suspicions(quiet))


def test_one_sample_is_a_clip(stub_session: Session) -> None:
    clip = stub_session.generate("x", seconds=1 / 44_100, seed=1)
    assert clip.pcm.shape == (1, 2)


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1, 7.3, 30, 119.9, 120])
def test_a_clip_has_exactly_the_length_asked_for(stub_session: Session, seconds: float) -> None:
    """CASES 11 and 26: to the sample, without a silent tail."""
    clip = stub_session.generate("x", seconds=seconds, seed=1, steps=1)
    assert len(clip.pcm) == round(seconds * 44_100)
    assert clip.latents.shape[2] == -(-round(seconds * 44_100) // 4096)
    assert np.abs(clip.pcm[-1].astype(int)).max() > 0
    # the stub holds each latent for 4,096 samples: the last one is in its place
    last = np.rint(clip.latents[0, :2, -1] * 8000)
    np.testing.assert_array_equal(clip.pcm[-1], last)


@pytest.mark.parametrize("seconds", [120.1, 1e9])
def test_too_long_a_clip_is_refused_before_anything_is_loaded(stub: Path, seconds: float) -> None:
    """CASES 26."""
    with load(stub) as session:
        with pytest.raises(UsageError, match="its limit is 120 s"):
            session.generate("x", seconds=seconds)
        assert isinstance(session.device, CpuDevice)
        assert not session.device._loaded


def test_the_model_is_told_the_seconds_that_were_asked_for(stub_session: Session) -> None:
    """CASES 38: one number conditions the model and sets the length."""
    for seconds in (0.05, 1, 2.935, 7.3, 29.99, 30, 47.55, 119.9):
        request, planned, _ = stub_session.plan(Request("x", seconds=seconds))
        assert planned.inputs["seconds_total"][0] == np.float32(seconds)
        assert request.seconds == seconds
        assert abs(planned.plan.latent_len * 4096 / 44_100 - seconds) < 4096 / 44_100


def test_the_seed_that_was_used_repeats_a_random_clip(stub_session: Session) -> None:
    """CASES 56."""
    lucky = stub_session.generate("x", seconds=1)
    again = stub_session.generate("x", seconds=1, seed=lucky.request.seed)
    np.testing.assert_array_equal(lucky.pcm, again.pcm)
    other = stub_session.generate("x", seconds=1, seed=lucky.request.seed ^ 2**40)
    assert not np.array_equal(lucky.pcm, other.pcm)


def test_an_item_of_a_batch_equals_the_single_render(stub_session: Session) -> None:
    """CASES 34."""
    requests = [Request("x", seconds=1, seed=9, clip=i) for i in range(3)]
    clips = list(stub_session.generate_many(requests))
    for request, clip in zip(requests, clips, strict=True):
        np.testing.assert_array_equal(stub_session.render(request).pcm, clip.pcm)
    assert len({clip.pcm.tobytes() for clip in clips}) == 3


def test_generate_takes_every_option_of_a_request() -> None:
    """And by the same name and default."""
    from dataclasses import fields
    from inspect import signature

    options = signature(Session.generate).parameters
    ours = {name: p.default for name, p in options.items() if name != "self"}
    assert ours == {entry.name: entry.default for entry in fields(Request)}


@pytest.mark.parametrize("request_", ["x", {}, None, 3], ids=repr)
def test_only_a_request_is_rendered(stub_session: Session, request_: Any) -> None:
    with pytest.raises(UsageError, match=r"render takes a Request: .* – generate takes a prompt"):
        stub_session.render(request_)
    with pytest.raises(UsageError, match="render takes a Request"):
        list(stub_session.generate_many([request_]))


def test_one_request_is_not_many(stub_session: Session) -> None:
    with pytest.raises(UsageError, match="a list of requests is needed: Request"):
        list(stub_session.generate_many(Request("x")))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 3, b"x"], ids=repr)
def test_a_prompt_is_text(stub_session: Session, prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt must be text"):
        stub_session.generate(prompt)


def test_one_range_is_not_a_list_of_ranges(stub_session: Session) -> None:
    source = np.zeros((2, 44_100), np.float32)
    with pytest.raises(UsageError, match=r"is a start and an end: 0\.2 – .*: \[\(1\.0, 2\.5\)\]"):
        stub_session.generate("x", init_audio=source, inpaint=(0.2, 0.5))  # type: ignore[arg-type]


def test_an_entry_of_a_folder_is_a_path(stub_session: Session, tmp_path: Path) -> None:
    path = stub_session.generate("x", seconds=0.1).save(tmp_path / "a.wav")
    (entry,) = os.scandir(tmp_path)
    assert stub_session.generate("x", init_audio=entry).request.init_audio == str(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": None}, "model must be a path: None"),
        ({"model": b"demo"}, "model must be a path: b'demo'"),
        ({"device": 0}, "device must be text: 0"),
        ({"threads": 2.5}, "threads must be a whole number from 1 to 1024: 2.5"),
        ({"threads": 0}, "threads must be a whole number from 1 to 1024: 0"),
        ({"precision": 16}, "precision must be text: 16"),
        ({"progress": True}, "progress must be a function: True"),
    ],
    ids=repr,
)
def test_options_of_loading_are_checked(stub: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load(**{"model": stub, **options})


def test_rendering_many_is_lazy(stub_session: Session) -> None:
    def requests() -> Any:
        yield Request("x", seconds=1, seed=1)
        raise AssertionError("asked for too much")

    assert isinstance(next(stub_session.generate_many(requests())), Clip)


def test_clips_do_not_share_memory_with_the_session(stub_session: Session) -> None:
    first = stub_session.generate("x", seconds=1, seed=1)
    kept = first.pcm.copy()
    stub_session.generate("y", seconds=1, seed=2)
    np.testing.assert_array_equal(first.pcm, kept)


def test_what_does_not_touch_the_sound_leaves_it_alone(stub: Path, stub_session: Session) -> None:
    """Same seed and request: threads, windows and freeing of models change nothing."""
    request = Request("x", seconds=40, seed=4, steps=2)
    expected = stub_session.render(request)
    for chunking in ("on", "off"):
        clip = stub_session.generate("x", seconds=40, seed=4, steps=2, chunking=chunking)
        np.testing.assert_array_equal(clip.pcm, expected.pcm)
    for options in ({"threads": 2}, {"threads": 64}, {"free_models": True}):
        with load(stub, **options) as session:
            np.testing.assert_array_equal(session.render(request).pcm, expected.pcm)


def test_headroom_changes_neither_length_nor_noise(stub_session: Session) -> None:
    plain = stub_session.plan(Request("x", seconds=3, seed=1))[1]
    padded = stub_session.plan(Request("x", seconds=3, seed=1, headroom=6))[1]
    assert (plain.plan.samples, padded.plan.samples) == (132_300, 132_300)
    assert padded.plan.latent_len > plain.plan.latent_len
    clip = stub_session.generate("x", seconds=3, seed=1, headroom=6)
    assert clip.latents.shape[2] == plain.plan.latent_len


def test_a_long_prompt_tells_what_was_cut(stub_session: Session) -> None:
    prompt = " ".join(f"word{i}" for i in range(5000))
    clip = stub_session.generate(prompt, seconds=1)
    (warning,) = [w for w in clip.warnings if "tokens" in w]
    assert "256 fit" in warning
    cut = warning.split("“")[1].rstrip("…”")
    assert cut
    assert cut in prompt


def test_an_empty_prompt_renders(stub_session: Session) -> None:
    assert np.isfinite(stub_session.generate("", seconds=1).latents).all()


def test_guidance_beyond_what_a_model_was_distilled_for_is_told(stub_session: Session) -> None:
    """CASES 31."""
    assert any("guidance of 15" in w for w in stub_session.generate(seconds=1, cfg=15).warnings)
    assert not stub_session.generate(seconds=1, cfg=3).warnings


@pytest.mark.parametrize("cfg", [0, 0.5, 1, 3, 7, 15])
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_any_guidance_and_step_count_stays_finite(
    stub_session: Session, cfg: float, steps: int
) -> None:
    """CASES 31."""
    clip = stub_session.generate("x", seconds=0.5, seed=1, cfg=cfg, steps=steps)
    assert np.isfinite(clip.latents).all()


@pytest.mark.parametrize("length", [0, 1, 4095, 44_100])
def test_a_source_of_any_length_is_taken(stub_session: Session, length: int) -> None:
    source = np.full((2, length), 0.25, np.float32)
    clip = stub_session.generate("x", seconds=1, init_audio=source, init_noise_level=0.01)
    assert len(clip.pcm) == 44_100
    assert any("source ends" in note for note in clip.notes) == (length < 44_100)


def test_a_source_longer_than_the_clip_is_cut_and_told(stub_session: Session) -> None:
    source = np.zeros((2, 100_000), np.float32)
    clip = stub_session.generate("x", seconds=1, init_audio=source)
    assert any("only the first 1 s" in note for note in clip.notes)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (np.zeros(10, np.float32), r"shape \[2, n\]: \(10,\) – give mono twice"),
        (np.zeros((1, 10), np.float32), r"shape \[2, n\]: \(1, 10\) – give mono twice"),
        (np.zeros((10, 2), np.int16), r"shape \[2, n\]: \(10, 2\) – give its \.T"),
        (np.zeros((2, 2, 2)), r"shape \[2, n\]: \(2, 2, 2\)$"),
        (3.0, r"shape \[2, n\]: \(\)$"),
        (np.full((2, 10), np.nan), "finite: 20 NaN or infinite"),
        (np.full((2, 10), 1e300), "finite: 20 NaN or infinite"),
        (np.zeros((2, 10), np.int32), "float or int16 samples: ndarray of int32"),
        (np.zeros((2, 10), np.uint8), "float or int16 samples: ndarray of uint8"),
        (np.zeros((2, 10), np.complex64), "float or int16 samples: ndarray of complex64"),
        (np.zeros((2, 10), bool), "float or int16 samples: ndarray of bool"),
        (np.full((2, 10), "0"), "float or int16 samples: ndarray of <U1"),
        ([[0.0], [0.0, 0.0]], "float or int16 samples: list"),
        (object(), "a path, a clip, or an array .*: object"),
        (b"kick.wav", "a path, a clip, or an array .*: bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_of_the_wrong_form_is_refused(
    stub_session: Session, source: Any, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        stub_session.generate("x", seconds=1, init_audio=source)


def test_a_clip_its_samples_and_its_file_are_the_same_source(
    stub_session: Session, tmp_path: Path
) -> None:
    made = stub_session.generate("x", seconds=0.5, seed=1)
    forms = [made.save(tmp_path / "a.wav"), made, made.pcm.T, made.pcm.T.astype(">i2")]
    forms.append(made.pcm.T / 32768)
    options = {"seed": 2, "inpaint": [(0.1, 0.2)]}
    expected = stub_session.generate("y", init_audio=forms[0], **options)
    for form in forms[1:]:
        clip = stub_session.generate("y", init_audio=form, **options)
        np.testing.assert_array_equal(clip.pcm, expected.pcm)
        assert clip.notes == expected.notes


def test_a_source_beyond_full_scale_is_told(stub_session: Session, tmp_path: Path) -> None:
    """As an array and from a file."""
    import soundfile

    def notes(source: Any) -> list[str]:
        clip = stub_session.generate("x", seconds=0.5, init_audio=source, steps=1)
        return [note for note in clip.notes if "full scale" in note]

    level = np.full((2, 22_050), -1.0)
    assert not notes(level)
    assert notes(level * 2) == ["the source peaks at 2 (+6.0 dBFS), full scale is 1"]
    soundfile.write(tmp_path / "loud.wav", level.T * 2, 44_100, "FLOAT")
    assert notes(tmp_path / "loud.wav") == notes(level * 2)


def test_a_source_that_changes_during_the_render_changes_nothing(stub: Path) -> None:
    source = np.random.default_rng(1).uniform(-0.5, 0.5, (2, 44_100)).astype(np.float32)
    options = {"seed": 2, "inpaint": [(0.4, 0.6)], "steps": 1}

    def spoil(_: Progress) -> None:
        source[:] = 1

    with load(stub, threads=1) as session:
        expected = session.generate("x", init_audio=source.copy(), **options).pcm
    with load(stub, threads=1, progress=spoil) as session:
        clip = session.generate("x", init_audio=source, **options)
    assert source.min() == 1
    np.testing.assert_array_equal(clip.pcm, expected)


def test_a_source_file_is_read_and_its_length_is_the_clips(
    stub_session: Session, tmp_path: Path
) -> None:
    made = stub_session.generate("x", seconds=1.5, seed=1)
    path = made.save(tmp_path / "quelle 音.wav")
    clip = stub_session.generate("y", init_audio=path, init_noise_level=0.01, seed=2)
    assert len(clip.pcm) == len(made.pcm)
    assert clip.request.init_audio == str(path)


def test_a_saved_clip_says_how_to_make_it_again(stub_session: Session, tmp_path: Path) -> None:
    from sa3_runtime.audio import read_tags
    from sa3_runtime.record import read_record

    clip = stub_session.generate("Dalí — 太鼓", seconds=0.5)
    path = clip.save(tmp_path / "a.wav")
    assert read_tags(path)["title"] == "Dalí — 太鼓"
    record = read_record(path)
    assert record.request == clip.request
    with load(record.model_word, threads=1) as session:
        np.testing.assert_array_equal(session.render(record.request).pcm, clip.pcm)


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_the_record_of_an_edit_is_of_the_source_that_was_heard(
    stub_session: Session, tmp_path: Path, change: str
) -> None:
    """Whatever has become of the file when the clip is saved."""
    from sa3_runtime.record import check_source, read_record

    source = stub_session.generate("x", seconds=0.5, seed=1).save(tmp_path / "source.wav")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    clip = stub_session.generate("y", init_audio=source, seed=2)
    source.unlink()
    if change == "replaced":
        stub_session.generate("x", seconds=0.5, seed=3).save(source)
    record = read_record(clip.save(tmp_path / "clip.wav"))
    assert record.source_sha256 == digest
    with pytest.raises(UsageError, match=r"changed since|is gone"):
        check_source(record)


def test_a_source_that_was_given_has_no_digest_of_a_file(
    stub_session: Session, tmp_path: Path
) -> None:
    """The request may name a file that is there, but it isn't what was heard."""
    path = stub_session.generate("x", seconds=0.5, seed=1).save(tmp_path / "source.wav")
    request = Request("y", init_audio=str(path))
    assert stub_session.render(request).source_sha256 is not None
    silence = np.zeros((2, 22_050), np.float32)
    assert stub_session.render(request, source=silence).source_sha256 is None


def test_threads_change_sound_by_rounding_alone(tiny: Path, session: Session) -> None:
    """CASES 34."""
    request = Request("x", seconds=1, seed=2)
    one = session.render(request).pcm.astype(float)
    with load(tiny, threads=2) as other:
        two = other.render(request).pcm.astype(float)
    assert np.corrcoef(one.ravel(), two.ravel())[0, 1] > 0.999


def test_little_noise_stays_near_the_source(session: Session) -> None:
    """The level is what decides how much of the source is left."""
    source = np.sin(np.arange(44_100) / 30)[None].repeat(2, 0).astype(np.float32) * 0.3
    options = {"seconds": 1, "seed": 1, "steps": 1, "sampler": "euler"}
    _, planned, _ = session.plan(
        Request("x", init_audio="a", init_noise_level=0.01, **options), source=source
    )
    starts = {}
    for level in (0.01, 0.5, 1.0):
        _, planned, _ = session.plan(
            Request("x", init_audio="a", init_noise_level=level, **options), source=source
        )

        def observe(step: Any, buffers: Any, level: float = level) -> None:
            if type(step).__name__ == "SetTime":
                starts[level] = (buffers["x"].copy(), buffers["init_latents"].copy())

        assert isinstance(session.device, CpuDevice)
        session.device.run(planned.plan, planned.inputs, observe=observe)
    distance = {level: np.abs(x - init).max() for level, (x, init) in starts.items()}
    assert distance[0.01] < 0.1 < distance[0.5] < distance[1.0]


def test_progress_counts_every_stage(stub: Path) -> None:
    events: list[Progress] = []
    with load(stub, progress=events.append) as session:
        session.generate("x", seconds=1, steps=3, cfg=2)
    last = {event.stage: event for event in events if event.stage != "load"}
    assert {stage: (e.done, e.total) for stage, e in last.items()} == {
        "t5gemma": (1, 1),
        "dit_prepare": (2, 2),
        "dit_step": (6, 6),
        "dec": (1, 1),
    }


def test_an_interrupt_ends_the_render_and_the_session_goes_on(stub: Path) -> None:
    def stop(event: Progress) -> None:
        if event.stage == "dit_step" and event.done == 2:
            raise KeyboardInterrupt

    with load(stub, progress=stop) as session:
        with pytest.raises(KeyboardInterrupt):
            session.generate("x", seconds=1)
        session._progress = None
        assert session.generate("x", seconds=1, seed=1).pcm.shape == (44_100, 2)


def test_a_closed_session_says_so(stub: Path) -> None:
    with load(stub) as session:
        session.generate("x", seconds=0.1)
    with pytest.raises(UsageError, match="session is closed"):
        session.generate("x", seconds=0.1)


def test_options_of_a_decoder_without_ceiling_are_refused(stub_session: Session) -> None:
    with pytest.raises(UsageError, match="fixed ceiling"):
        stub_session.generate("x", seconds=1, limiter_ceiling=0.5)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("model_config.json", ArtefactMissing, "model_config.json"),
        ("t5gemma-b-b-ul2/tokenizer.json", ArtefactMissing, "tokenizer is missing"),
        ("onnx/dec_fp32_chunkable_limiter.onnx", ArtefactMissing, "neither stage files nor"),
    ],
)
def test_a_model_with_a_hole_names_it(
    make_stub: MakeStub, tmp_path: Path, damage: str, error: type[Exception], message: str
) -> None:
    broken = make_stub(tmp_path / "Modell für 音 (2)")
    (broken / damage).unlink()
    with pytest.raises(error, match=message), load(broken) as session:
        session.generate("x", seconds=1)


def test_paths_with_odd_letters_work(make_stub: MakeStub, tmp_path: Path) -> None:
    """CASES 46."""
    with load(make_stub(tmp_path / "Modell für 音 (3)")) as session:
        clip = session.generate("Dalí — 日本の太鼓 🥁", seconds=0.1)
    assert clip.request.prompt == "Dalí — 日本の太鼓 🥁"
    assert len(clip.pcm) == 4410


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model"):
        load(tmp_path / "nowhere")
    with pytest.raises(ArtefactMissing, match="is no checkpoint"):
        load(tmp_path)
    (tmp_path / "model_config.json").write_text("{")
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_an_autoencoder_alone_makes_no_clips() -> None:
    with pytest.raises(UsageError, match="autoencoder alone"):
        load("same-s")


def test_exports_are_not_made_where_that_is_not_allowed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SA3_HOME", str(tmp_path))
    with pytest.raises(ArtefactMissing, match="isn't exported yet"):
        load(tiny, allow_export=False)
    assert not list(tmp_path.rglob("*.onnx"))


def test_a_session_makes_the_same_clip_as_another_process(stub: Path, script: Script) -> None:
    """CASES 34."""
    code = (
        "import sys, zlib, sa3_runtime as sa3\n"
        "clip = sa3.load(sys.argv[1]).generate('x', seconds=1, seed=5)\n"
        "print(zlib.crc32(clip.pcm.tobytes()))"
    )
    assert len({script(code, stub).stdout for _ in range(2)}) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_one_allowed_core_is_one_quiet_thread(stub: Path, script: Script) -> None:
    """CASES 37: no affinity text on stderr."""
    code = (
        "import os, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import sa3_runtime as sa3\n"
        "with sa3.load(sys.argv[1]) as m:\n"
        "    m.generate('x', seconds=1, seed=5)\n"
        "    print(m.device.threads)"
    )
    done = script(code, stub)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_length(
    tiny: Path, home: Path, session: Session, script: Script
) -> None:
    """CASES 41: two minutes need little more than five seconds, because windows are bounded."""
    code = (
        "import re, sys, sa3_runtime as sa3\n"
        "with sa3.load(sys.argv[1], threads=1) as m:\n"
        "    m.generate('x', seconds=float(sys.argv[2]), steps=1, chunking=sys.argv[3])\n"
        # not ru_maxrss: that one starts at the size of the parent
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )

    def peak(seconds: str, chunking: str = "auto") -> int:
        return int(script(code, tiny, seconds, chunking).stdout) * 1024

    short, long, whole = peak("5"), peak("120"), peak("120", "off")
    assert long - short < 200e6
    assert whole - short > 1.5 * (long - short), "the measure would not notice"


def test_importing_the_runtime_loads_nothing_heavy(script: Script) -> None:
    loaded = set(script("import sys, sa3_runtime; print(*sys.modules)").stdout.split())
    assert not {"numpy", "onnxruntime", "onnx", "tokenizers", "torch", "sa3_onnx"} & loaded


def test_a_render_imports_no_exporter(stub: Path, script: Script) -> None:
    code = (
        "import sys, sa3_runtime as sa3\n"
        "sa3.load(sys.argv[1]).generate('x', seconds=1)\n"
        "print(*sys.modules)"
    )
    loaded = {name.partition(".")[0] for name in script(code, stub).stdout.split()}
    assert not {"onnx", "onnx_graphsurgeon", "torch", "sa3_onnx", "sa3_build"} & loaded
    assert "huggingface_hub" not in loaded
