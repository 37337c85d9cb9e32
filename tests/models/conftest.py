"""Fixtures around the fake hub: a hub with small repositories, and a store that talks to it."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MUSIC = "stabilityai/stable-audio-3-small-music"
PUBLISHED = "stabilityai/stable-audio-3-optimized"
WEIGHTS = 300_000  # bytes of the fake model.safetensors


@pytest.fixture(scope="session")
def fake_hub() -> ModuleType:
    """The module `fake_hub` beside this file."""
    spec = importlib.util.spec_from_file_location(
        "fake_hub", Path(__file__).with_name("fake_hub.py")
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_hub"] = module
    spec.loader.exec_module(module)
    return module


def _bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def _checkpoint(seed: int) -> dict[str, bytes]:
    config = {
        "model_type": "diffusion_cond_inpaint",
        "sample_size": 5_292_032,
        "model": {"diffusion": {"diffusion_objective": "rf_denoiser"}},
    }
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# model card",
        "model_config.json": json.dumps(config).encode(),
        "model.safetensors": _bytes(WEIGHTS, seed),
        "t5gemma-b-b-ul2/config.json": b'{"hidden_size": 8}',
        "t5gemma-b-b-ul2/model.safetensors": _bytes(50_000, seed + 1),
        "t5gemma-b-b-ul2/tokenizer.json": _bytes(20_000, seed + 2),
        "t5gemma-b-b-ul2/tokenizer_config.json": b"{}",
    }


def _published() -> dict[str, bytes]:
    files = {}
    for arch in ("sm_90", "sm_120"):
        for index, path in enumerate(
            (
                "t5gemma/t5gemma_fp16.trt",
                "t5gemma/t5gemma_fp16mixed.trt",
                "sa3-sm-music/dit_fp16.trt",
                "sa3-sm-music/dit_fp8.trt",
                "sa3-m/dit_fp16.trt",
                "same-s/enc_bf16_chunkable.trt",
                "same-s/dec_bf16_chunkable_limiter.trt",
                "same-l/enc_fp16_chunkable.trt",
                "same-l/dec_fp16_chunkable_limiter.trt",
            )
        ):
            files[f"tensorRT/{arch}/{path}"] = _bytes(3_000 + index, index)
    files |= {
        "onnx/t5gemma/encoder.onnx": _bytes(2_000, 90),
        "onnx/sa3-sm-music/dit.onnx": _bytes(2_000, 91),
        "onnx/sa3-sm-music/dit.onnx.data": _bytes(9_000, 92),
        "onnx/sa3-m/dit.onnx": _bytes(2_000, 93),
        "onnx/sa3-m/dit.onnx.data": _bytes(9_000, 94),
        "onnx/sa3-m/dit_fp8.onnx": _bytes(2_000, 95),
        "onnx/sa3-m/dit_fp8lin.onnx.data": _bytes(9_000, 96),
        "onnx/same-s/enc_dynamic_bf16.onnx": _bytes(2_000, 97),
        "onnx/same-s/dec_dynamic_bf16.onnx": _bytes(2_000, 98),
    }
    return files


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SA3_HOME, its path with a space and a letter outside ASCII."""
    place = tmp_path / "my möbel"
    monkeypatch.setenv("SA3_HOME", str(place))
    return place


@pytest.fixture
def hub(
    fake_hub: ModuleType, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A running fake hub that this process, and processes it starts, take for the real one."""
    from huggingface_hub import constants

    with fake_hub.FakeHub() as server:
        server.repos[MUSIC] = _checkpoint(1)
        server.repos[PUBLISHED] = _published()
        cache = tmp_path / "hf"
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(cache))
        monkeypatch.setenv("SA3_PATIENCE", "0.5")
        # huggingface-hub read its environment when it was imported
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        yield server


@pytest.fixture
def files_in() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder but records, by its relative name."""

    def look(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".pulled.json"
        }

    return look
