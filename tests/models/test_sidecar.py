"""The check before an engine is loaded: every wrong file gets a sentence and a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sa3_models.errors import ArtefactMissing, MachineMismatch
from sa3_models.files import sha256_of
from sa3_models.sidecar import (
    BuiltProfile,
    Machine,
    PortRecord,
    Sidecar,
    check_engine,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)

HERE = Machine("tensorrt", "10.15.1.29", "sm_86")
PLAN = b"ftrt\x00\x01" + bytes(range(256)) * 4


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine with its record, built for this machine."""
    path = tmp_path / "sm_86" / "same-s" / "dec_bf16_chunkable_limiter.trt"
    path.parent.mkdir(parents=True)
    path.write_bytes(PLAN)
    record(path)
    return path


def record(path: Path, **changes) -> Sidecar:
    parts = {
        "stage": "dec",
        "precision": "bf16",
        "flavour": "tensorrt",
        "version": "10.15.1.29",
        "compute_capability": "sm_86",
        "targets": ("sm_86", "sm_120"),
        "profiles": (BuiltProfile((1, 256, 256), 100), BuiltProfile(None, None)),
        "inputs": (PortRecord("latent", "float32", (1, 256, "latent_len")),),
        "outputs": (PortRecord("pcm", "int32", (1, "samples", 2)),),
        "source": {"dec.onnx": "ab"},
        "metadata": {"facts": "{}"},
        "engine_sha256": sha256_of(path),
        "engine_bytes": path.stat().st_size,
        "key": "k",
        "built": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
        "peak_rss_bytes": 10,
    }
    sidecar = Sidecar(**(parts | changes))
    write_sidecar(path, sidecar)
    return sidecar


def test_a_record_survives_the_disk(engine):
    written = record(engine)
    assert read_sidecar(engine) == written
    assert sidecar_path(engine).name == "dec_bf16_chunkable_limiter.json"


def test_a_fitting_engine_is_accepted_with_its_record(engine):
    assert check_engine(engine, HERE, hashed=True).targets == ("sm_86", "sm_120")


def test_an_engine_without_a_record_is_accepted_on_its_own_ports(engine):
    sidecar_path(engine).unlink()
    assert check_engine(engine, HERE) is None


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine("tensorrt", "10.15.1.29", "sm_89"), ("sm_86, sm_120", "this GPU is sm_89")),
        (Machine("tensorrt", "10.16.0.1", "sm_86"), ("10.15.1.29", "tensorrt 10.16.0.1")),
        (Machine("tensorrt", "11.15.0.1", "sm_86"), ("10.15.1.29", "tensorrt 11.15.0.1")),
        (Machine("tensorrt-rtx", "10.15.1.29", "sm_86"), ("tensorrt 10", "has tensorrt-rtx")),
    ],
)
def test_another_machine_is_refused_with_both_sides_and_the_command(engine, machine, words):
    """CASES 02."""
    with pytest.raises(MachineMismatch) as caught:
        check_engine(engine, machine, repair="sa3 build small-music")
    assert all(word in str(caught.value) for word in words)
    assert caught.value.hint == "sa3 build small-music"
    assert caught.value.exit_code == 4


def test_a_patch_release_still_loads_it(engine):
    assert check_engine(engine, Machine("tensorrt", "10.15.2.1", "sm_120")) is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<html>404 not found</html>\n", "is a text file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "pointer to a large file"),
        (PLAN[:-1], "is not the engine its record describes"),
        (None, "there is no engine"),
    ],
)
def test_what_is_no_engine_is_refused_by_what_it_is(engine, content, words):
    """CASES 02: each wrong file has an error of its own, with the command that repairs it."""
    if content is None:
        engine.unlink()
    else:
        engine.write_bytes(content)
    with pytest.raises(ArtefactMissing) as caught:
        check_engine(engine, HERE)
    assert words in str(caught.value)
    assert "sa3 build same-s --arch sm_86" in caught.value.hint
    assert caught.value.exit_code == 3


def test_same_size_but_other_content_is_found_when_hashing(engine):
    engine.write_bytes(PLAN[:-1] + b"\x00")
    assert check_engine(engine, HERE) is not None
    with pytest.raises(ArtefactMissing, match="another sha256"):
        check_engine(engine, HERE, hashed=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', b"\xff\xfe\x00"])
def test_a_broken_record_is_refused_not_ignored(engine, text):
    path = sidecar_path(engine)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArtefactMissing, match="not a record of an engine"):
        check_engine(engine, HERE)


def test_a_record_of_another_format_is_refused(engine):
    record(engine, format=2)
    with pytest.raises(ArtefactMissing, match="format 2"):
        check_engine(engine, HERE)


def test_the_check_needs_neither_tensorrt_nor_the_builders():
    code = "import sys, sa3_models.sidecar; print(*sys.modules)"
    shelf = Path(__file__).resolve().parents[2] / "models"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(shelf)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(run.stdout.split())
    assert not {"tensorrt", "sa3_build", "sa3_onnx", "onnx", "numpy"} & loaded
