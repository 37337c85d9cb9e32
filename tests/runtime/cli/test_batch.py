"""`sa3 batch`: rows, resuming, failures, shards."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np
import pytest

from sa3_runtime import audio
from sa3_runtime.audio.wav import wav_bytes
from sa3_runtime.cli.jobs import read_jobs, shard_of

ROWS = [
    {"prompt": "long", "seconds": 2.0, "seed": 1, "id": "first"},
    {"prompt": "short", "seconds": 0.3, "seed": 2, "out": "short.flac"},
    {"prompt": "guided", "seconds": 0.5, "seed": 3, "cfg": 2, "negative_prompt": "noise"},
]


@pytest.fixture
def jobs(own_place):
    def write(*rows: object, name: str = "jobs.jsonl"):
        path = own_place / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", "utf-8")
        return path

    return write


@pytest.fixture
def batch(sa3, stub):
    return lambda path, *words: sa3("batch", path, "-m", stub, "--out-dir", "clips", *words)


def manifest(own_place, name="manifest.jsonl"):
    return [json.loads(line) for line in (own_place / "clips" / name).read_text().splitlines()]


def test_every_row_becomes_a_clip_in_order_of_length(batch, jobs, own_place):
    ran = batch(jobs(*ROWS), "--json")
    assert ran.code == 0
    entries = manifest(own_place)
    assert [entry["line"] for entry in entries] == [2, 3, 1]
    assert {entry["status"] for entry in entries} == {"done"}
    by_line = {entry["line"]: entry for entry in entries}
    assert by_line[2]["file"] == "short.flac"
    assert by_line[1]["id"] == "first"
    assert by_line[1]["samples"] == 88_200
    assert by_line[3]["request"]["negative_prompt"] == "noise"
    for entry in entries:
        path = own_place / "clips" / entry["file"]
        assert audio.read(path).samples.shape == (2, entry["samples"])
        assert json.loads(audio.read_tags(path)["comment"])["request"] == entry["request"]
    *clips, summary = ran.objects
    assert clips == entries
    assert summary["batch"]["done"] == 3
    assert summary["batch"]["failed"] == 0


def test_a_row_is_the_same_clip_as_a_command(batch, jobs, own_place, sa3, stub):
    batch(jobs(ROWS[0]))
    words = ["-m", stub, "--seconds", 2, "--seed", 1, "--json"]
    assert sa3("long", *words).objects[0]["pcm_sha256"] == manifest(own_place)[0]["pcm_sha256"]


def test_a_second_run_makes_only_what_is_missing(batch, jobs, own_place, monkeypatch):
    path = jobs(*ROWS)
    batch(path)
    before = {p.name: p.stat().st_mtime_ns for p in (own_place / "clips").iterdir()}
    monkeypatch.setattr("sa3_runtime.session.load", None)  # nothing to do: no model is loaded
    ran = batch(path)
    assert ran.code == 0
    assert "3 skipped" in ran.err
    assert {p.name: p.stat().st_mtime_ns for p in (own_place / "clips").iterdir()} == before
    monkeypatch.undo()


def test_a_missing_truncated_or_changed_row_is_made_again(batch, jobs, own_place, monkeypatch):
    monkeypatch.delenv("SA3_OUTPUT")
    batch(jobs(*ROWS))
    clips = own_place / "clips"
    files = {entry["line"]: clips / entry["file"] for entry in manifest(own_place)}
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:100])
    files[3].unlink()
    with (clips / "manifest.jsonl").open("a") as file:
        file.write('{"status": "do')  # the run was killed while it wrote
    ran = batch(jobs(*ROWS), "--force")
    assert ran.code == 0
    assert files[1].read_bytes() == whole
    files[3].unlink()
    ran = batch(jobs(*ROWS))
    assert "1 made, 2 skipped" in ran.err
    changed = [ROWS[0], ROWS[1], {**ROWS[2], "steps": 3}]
    ran = batch(jobs(*changed))
    assert "1 made, 2 skipped" in ran.err


def test_done_means_that_the_file_holds_this_very_clip(batch, jobs, own_place):
    """The name, the size and an old line of the manifest are not enough."""
    row = {"prompt": "rain", "seconds": 0.5, "seed": 1, "steps": 8, "out": "a.wav"}
    clip = own_place / "clips" / "a.wav"
    batch(jobs(row))
    first = clip.read_bytes()
    ran = batch(jobs({**row, "steps": 4}))
    assert (ran.code, clip.read_bytes()) == (6, first)
    assert "another file is there already: a.wav" in ran.err
    assert batch(jobs({**row, "steps": 4}), "--force").code == 0
    other = clip.read_bytes()
    assert len(other) == len(first)
    assert "0 made, 1 skipped" in batch(jobs({**row, "steps": 4})).err
    ran = batch(jobs(row))
    assert (ran.code, clip.read_bytes()) == (6, other)  # another row's clip, no longer this one's
    assert batch(jobs(row), "--force").code == 0
    assert "0 made, 1 skipped" in batch(jobs(row)).err


@pytest.mark.parametrize("shard", [(), ("--shard", "1/2")])
@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"\x55"])
def test_a_damaged_clip_is_made_again(batch, jobs, own_place, damage, shard):
    row = {"prompt": "rain", "seconds": 0.5, "seed": 1, "out": "a.wav"}
    batch(jobs(row), *shard)
    clip = own_place / "clips" / "a.wav"
    whole = clip.read_bytes()
    clip.write_bytes(damage(whole))
    assert clip.read_bytes() != whole
    assert "1 made, 0 skipped" in batch(jobs(row)).err
    assert clip.read_bytes() == whole


def test_a_clip_that_cannot_be_read_is_made_again(batch, jobs, monkeypatch):
    def fails(path):
        raise PermissionError(13, "Permission denied", str(path))

    batch(jobs(*ROWS))
    monkeypatch.setattr("sa3_runtime.cli.jobs.sha256_of", fails)
    assert "3 made, 0 skipped" in batch(jobs(*ROWS)).err


@pytest.mark.parametrize("change", [{"seconds": 0.4}, {"cfg": 3}, {"steps": 3}, {"headroom": 1}])
def test_a_clip_of_another_request_is_not_overwritten(batch, jobs, own_place, sa3, stub, change):
    """Same name, prompt, seed and index in the batch, and yet not what this row makes."""
    row = {"prompt": "rain", "seconds": 0.5, "seed": 1, "out": "a.wav"}
    words = [word for key, value in change.items() for word in (f"--{key}", value)]
    (own_place / "clips").mkdir()
    clip = own_place / "clips" / "a.wav"
    sa3("rain", "-m", stub, "--seconds", 0.5, "--seed", 1, *words, "-o", clip)
    own = clip.read_bytes()
    ran = batch(jobs(row))
    assert (ran.code, clip.read_bytes()) == (6, own)
    assert "another file is there already" in ran.err


def test_a_clip_that_was_not_noted_down_is_made_again(batch, jobs, own_place):
    """The run was killed between file and manifest; the tags tell of the row, source included."""
    pcm = np.zeros((22_050, 2), np.int16)
    pcm[::7] = 1000
    (own_place / "in.wav").write_bytes(wav_bytes(pcm, 44_100))
    row = {
        "prompt": "x",
        "init_audio": "in.wav",
        "inpaint": [[0.1, 0.2]],
        "seed": 1,
        "out": "a.wav",
    }
    batch(jobs(row))
    (own_place / "clips" / "manifest.jsonl").unlink()
    assert "1 made" in batch(jobs(row)).err
    (own_place / "clips" / "manifest.jsonl").unlink()
    (own_place / "in.wav").write_bytes(wav_bytes(pcm // 2, 44_100))
    assert "another file is there already" in batch(jobs(row)).err


def test_another_format_is_another_clip(batch, jobs, own_place):
    path = jobs({"prompt": "x", "seconds": 0.2, "seed": 1})
    batch(path)
    assert "1 made, 0 skipped" in batch(path, "--format", "wav24").err
    entries = manifest(own_place)
    assert [entry["format"] for entry in entries] == ["wav", "wav24"]
    assert entries[0]["file"] != entries[1]["file"]
    assert "0 made, 1 skipped" in batch(path).err
    named = jobs({"prompt": "x", "seconds": 0.2, "seed": 1, "out": "a.wav"})
    batch(named)
    assert "another file is there already" in batch(named, "--format", "wav24").err


def test_a_name_beats_the_format_unless_both_mean_one_suffix(batch, jobs, own_place):
    rows = [
        {"prompt": "x", "seconds": 0.2, "seed": 1, "out": out} for out in ("a.wav", "b.flac", "c")
    ]
    assert batch(jobs(*rows), "--format", "wav24").code == 0
    formats = {entry["file"]: entry["format"] for entry in manifest(own_place)}
    assert formats == {"a.wav": "wav24", "b.flac": "flac", "c.wav": "wav24"}


def test_a_half_written_line_of_the_manifest_costs_nothing_else(batch, jobs, own_place):
    batch(jobs(ROWS[1]))
    path = own_place / "clips" / "manifest.jsonl"
    path.write_text(path.read_text() + '{"status": "do')
    batch(jobs(*ROWS))
    assert "3 skipped" in batch(jobs(*ROWS)).err


def test_a_damaged_manifest_stops_nothing(batch, jobs, own_place):
    batch(jobs(*ROWS))
    path = own_place / "clips" / "manifest.jsonl"
    path.write_bytes(b"\xff\xfe\x81\n[1]\n5\n" + path.read_bytes() + b"\x00\x81")
    ran = batch(jobs(*ROWS))
    assert ran.code == 0
    assert "0 made, 3 skipped" in ran.err


def test_failures_are_written_down_and_the_rest_goes_on(batch, jobs, own_place):
    rows = [
        "not json",
        {"prompt": "x", "foo": 1},
        {"prompt": "x", "seconds": "five"},
        {"prompt": "x", "seconds": 0},
        {"prompt": "x", "seconds": 500},
        {"seconds": 1},
        {"prompt": "x", "init_audio": "nothing.wav"},
        {"prompt": "x", "seconds": 0.2, "out": "../a.wav"},
        {"prompt": "x", "seconds": 0.2, "out": "a.xyz"},
        {"prompt": "x", "seconds": 0.2, "negative_prompt": "y"},
        {"prompt": "good", "seconds": 0.2, "seed": 1},
    ]
    ran = batch(jobs(*rows), "--json")
    assert ran.code == 6
    entries = manifest(own_place)
    failed = {entry["line"]: entry["error"] for entry in entries if entry["status"] == "failed"}
    assert sorted(failed) == list(range(1, 11))
    assert "foo" in failed[2]["found"]
    assert "$.seconds" in failed[3]["found"]
    assert "its limit is 120 s" in failed[5]["found"]
    assert "no such sound file" in failed[7]["what"]
    assert [entry["line"] for entry in entries if entry["status"] == "done"] == [11]
    assert ran.objects[-1]["error"]["exit_code"] == 6
    assert "10 of 11 rows failed" in ran.err
    again = batch(jobs(*rows))
    assert again.code == 6
    assert "0 made, 1 skipped, 10 failed" in again.err


def test_an_unforeseen_fault_of_one_row_is_not_the_end(batch, jobs, own_place, monkeypatch):
    from sa3_runtime.session import Session

    render = Session.render

    def fails(self, request, **kw):
        if request.prompt == "short":
            raise MemoryError("no room")
        return render(self, request, **kw)

    monkeypatch.setattr(Session, "render", fails)
    ran = batch(jobs(*ROWS))
    assert ran.code == 6
    assert [entry["status"] for entry in manifest(own_place)] == ["failed", "done", "done"]
    assert "MemoryError no room" in ran.err


def test_rows_without_a_seed_keep_theirs(batch, jobs, own_place):
    path = jobs({"prompt": "x", "seconds": 0.2}, {"prompt": "y", "seconds": 0.2})
    batch(path)
    seeds = [entry["seed"] for entry in manifest(own_place)]
    assert len(set(seeds)) == 2
    assert "2 skipped" in batch(path).err
    batch(path, "--force")
    assert [entry["seed"] for entry in manifest(own_place)] == seeds * 2


def test_shards_share_the_rows(batch, jobs, own_place):
    rows = [{"prompt": "x", "seconds": 0.1, "seed": seed} for seed in range(7)]
    path = jobs(*rows)
    for shard in (1, 2, 3):
        assert batch(path, "--shard", f"{shard}/3").code == 0
    lines = [
        [entry["line"] for entry in manifest(own_place, f"manifest-{shard}-of-3.jsonl")]
        for shard in (1, 2, 3)
    ]
    assert lines == [[1, 4, 7], [2, 5], [3, 6]]
    assert len(list((own_place / "clips").glob("*.wav"))) == 7
    assert "7 skipped" in batch(path).err  # whoever runs next knows of all of them


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "1/"])
def test_shards_that_cannot_be_are_refused(batch, jobs, text):
    ran = batch(jobs(ROWS[0]), "--shard", text)
    assert ran.code == 2
    assert "--shard is I/N" in ran.err


def test_one_shard_is_all():
    assert shard_of(None) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no jobs"),
        ([ROWS[0], {"prompt": "y", "out": "a"}, {"prompt": "z", "out": "a.wav"}],
         "two rows would write the same file: a.wav, lines 2 and 3"),
        ([ROWS[1], ROWS[1]], "two rows would write the same file: short.flac, lines 1 and 2"),
    ],
)  # fmt: skip
def test_a_file_of_jobs_that_cannot_work_is_refused(batch, jobs, own_place, rows, message):
    ran = batch(jobs(*rows))
    assert ran.code == 2
    assert message in ran.err
    assert "seed" not in ran.err
    assert not (own_place / "clips").exists()
    ran = batch(jobs(*rows), "--shard", "1/2")
    assert (ran.code, message in ran.err) == (2, True)


def test_equal_rows_are_clips_of_their_own(batch, jobs, own_place):
    """Without a seed a row written twice asks for two variations, with one for the same twice."""
    free, seeded = {"prompt": "a", "seconds": 0.3}, {"prompt": "b", "seconds": 0.3, "seed": 1}
    path = jobs(free, seeded, free, seeded, free)
    ran = batch(path)
    assert (ran.code, "5 made" in ran.err) == (0, True)
    entries = {entry["line"]: entry for entry in manifest(own_place)}
    assert len({entry["file"] for entry in entries.values()}) == 5
    assert len({entries[line]["pcm_sha256"] for line in (1, 3, 5)}) == 3
    assert entries[2]["pcm_sha256"] == entries[4]["pcm_sha256"]
    (own_place / "clips" / entries[3]["file"]).unlink()
    assert "1 made, 4 skipped" in batch(path).err
    assert manifest(own_place)[-1]["line"] == 3
    assert manifest(own_place)[-1]["pcm_sha256"] == entries[3]["pcm_sha256"]


def test_rows_that_differ_in_their_name_are_variations_wherever_they_stand(batch, jobs, own_place):
    rows = [{"prompt": "a", "seconds": 0.3, "out": out} for out in ("x.wav", "y.wav")]
    rows.append({"prompt": "a", "seconds": 0.3})
    assert batch(jobs(*rows)).code == 0
    assert len({entry["pcm_sha256"] for entry in manifest(own_place)}) == 3
    assert "3 skipped" in batch(jobs(*reversed(rows))).err


def test_jobs_that_cannot_be_read_are_refused(batch, own_place):
    assert "the jobs cannot be read: nothing.jsonl: No such file" in batch("nothing.jsonl").err
    (own_place / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    assert "the jobs cannot be read" in batch("latin.jsonl").err


def test_a_file_that_is_not_ours_is_not_overwritten(batch, jobs, own_place):
    (own_place / "clips").mkdir()
    (own_place / "clips" / "mine.wav").write_bytes(b"mine")
    row = {"prompt": "x", "seconds": 0.2, "seed": 1, "out": "mine.wav"}
    ran = batch(jobs(row))
    assert ran.code == 6
    assert "another file is there already" in ran.err
    assert (own_place / "clips" / "mine.wav").read_bytes() == b"mine"
    assert batch(jobs(row), "--force").code == 0
    # a run killed between the file and the manifest: the file is ours
    (own_place / "clips" / "manifest.jsonl").unlink()
    assert batch(jobs(row)).code == 0


def test_settings_hold_where_a_row_says_nothing(batch, jobs, own_place, monkeypatch):
    monkeypatch.setenv("SA3_STEPS", "3")
    monkeypatch.setenv("SA3_SECONDS", "0.2")
    pcm = np.zeros((44_100, 2), np.int16)
    pcm[::7] = 1000
    (own_place / "in.wav").write_bytes(wav_bytes(pcm, 44_100))
    batch(
        jobs({"prompt": "a"}, {"prompt": "b", "steps": 4}, {"prompt": "c", "init_audio": "in.wav"})
    )
    requests = {entry["request"]["prompt"]: entry["request"] for entry in manifest(own_place)}
    assert (requests["a"]["steps"], requests["a"]["seconds"]) == (3, 0.2)
    assert requests["b"]["steps"] == 4
    assert requests["c"]["seconds"] == 1.0


def test_a_changed_source_is_another_job(own_place, jobs, stub):
    row = {"prompt": "c", "init_audio": "in.wav", "seed": 1}
    keys = []
    for step in (5, 7):
        pcm = np.zeros((4410, 2), np.int16)
        pcm[::step] = 1000
        (own_place / "in.wav").write_bytes(wav_bytes(pcm, 44_100))
        (job,) = read_jobs(str(jobs(row)), "m", None, {})
        keys.append(job.key)
    assert keys[0] != keys[1]


def test_separators_inside_a_prompt_do_not_split_a_row(own_place):
    (own_place / "jobs.jsonl").write_text(
        '{"prompt": "a\u2028b", "seed": 1}\n\n// a remark\n', "utf-8"
    )
    (job,) = read_jobs("jobs.jsonl", "m", None, {})
    assert job.request.prompt == "a\u2028b"


def test_dry_run_checks_every_row(batch, jobs, own_place):
    ran = batch(jobs(*ROWS), "--dry-run")
    assert (ran.code, ran.out) == (0, "3 rows to render, 0 broken\n")
    ran = batch(jobs(ROWS[0], "nonsense"), "--dry-run", "--json")
    assert (ran.code, ran.objects) == (6, [{"dry_run": True, "rows": 1, "broken": 1}])
    assert not (own_place / "clips").exists()


DOOMED = [
    ({"prompt": "x", "seconds": 500}, "its limit is 120 s"),
    ({"prompt": "x", "init_audio": "nothing.wav"}, "no such sound file"),
    ({"prompt": "x", "init_audio": "text.wav"}, "not a sound file"),
    ({"prompt": "x", "seconds": 1, "negative_prompt": "y"}, "no effect without guidance"),
    ({"prompt": "x", "seconds": 1, "limiter_ceiling": 0.5}, "fixed ceiling"),
    ({"prompt": "x", "seconds": 1, "sampler": "magic"}, "unknown sampler"),
    ({"prompt": "x", "seconds": 1, "schedule": "magic"}, "unknown schedule"),
    ({"prompt": "x", "seconds": 1, "out": "text.wav"}, "another file is there already"),
    ({"prompt": "x", "init_audio": "in.wav", "inpaint": [[1, 200]]}, "ends later than"),
]


@pytest.fixture
def sounds(own_place):
    (own_place / "clips").mkdir()
    for path in (own_place / "text.wav", own_place / "clips" / "text.wav"):
        path.write_text("no sound")
    (own_place / "in.wav").write_bytes(wav_bytes(np.zeros((44_100, 2), np.int16), 44_100))


def test_dry_run_refuses_what_a_run_would(batch, jobs, own_place, sounds, no_loading):
    path = jobs(*(row for row, _ in DOOMED), {"prompt": "x", "init_audio": "in.wav"})
    ran = batch(path, "--dry-run")
    assert (ran.code, ran.out) == (6, f"1 row to render, {len(DOOMED)} broken\n")
    for (_, message), line in zip(DOOMED, ran.err.splitlines(), strict=True):
        assert message in line
    assert [entry.name for entry in (own_place / "clips").iterdir()] == ["text.wav"]


def test_what_dry_run_refuses_fails(batch, jobs, sounds):
    ran = batch(jobs(*(row for row, _ in DOOMED), {"prompt": "x", "init_audio": "in.wav"}))
    assert f"1 made, 0 skipped, {len(DOOMED)} failed" in ran.err
    for _, message in DOOMED:
        assert message in ran.err


def test_dry_run_knows_what_is_done(batch, jobs):
    path = jobs(ROWS[1])
    batch(path)
    ran = batch(path, "--dry-run")
    assert (ran.code, ran.out) == (0, "0 rows to render, 0 broken\n")
    assert "1 row is done already" in ran.err
    assert batch(path, "--dry-run", "--force").out == "1 row to render, 0 broken\n"


def test_a_killed_run_goes_on_where_it_stopped(start, batch, jobs, own_place, stub):
    """CASES 28: interrupted in the middle: what is done stays, what is left is made."""
    rows = [{"prompt": "x", "seconds": 60, "steps": 100, "seed": seed} for seed in range(12)]
    path = jobs(*rows)
    words = ["batch", path, "-m", stub, "--out-dir", "clips"]
    process = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    clips = own_place / "clips"
    deadline = time.monotonic() + 30
    while len(list(clips.glob("*.wav"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait(60)
    ran = batch(path)
    assert ran.code == 0
    done = [entry for entry in manifest(own_place) if entry["status"] == "done"]
    assert sorted(entry["line"] for entry in done) == list(range(1, 13))
    assert "12 made" not in ran.err
    for entry in done:
        assert (clips / entry["file"]).stat().st_size == entry["bytes"]
