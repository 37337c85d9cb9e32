"""A stub bundle: every stage as a tiny ONNX graph with the real ports, so that a whole render takes
a fraction of a second and can be made to fail in chosen ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import onnx
from onnx import TensorProto as Type
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from sa3_runtime import Session

C, H, D = 4, 8, 6  # latent channels, text width, trunk width
OPSET = 18


def _graph(path: Path, inputs: dict, outputs: dict, weights: dict, nodes: list) -> None:
    """Write a graph; shapes hold the names of dynamic axes."""
    graph = helper.make_graph(
        [
            helper.make_node(op, i.split(), o.split(), **attributes)
            for op, i, o, attributes in nodes
        ],
        "stub",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def _text(path: Path) -> None:
    table = np.random.default_rng(1).standard_normal((512, H)).astype(np.float32)
    _graph(
        path,
        {n: (Type.INT64, [1, 256]) for n in ("input_ids", "attention_mask")},
        {"hidden_states": (Type.FLOAT, [1, 256, H])},
        {"table": table, "axes": np.array([2])},
        [
            ("Gather", "table input_ids", "rows", {}),
            ("Cast", "attention_mask", "mask", {"to": Type.FLOAT}),
            ("Unsqueeze", "mask axes", "column", {}),
            ("Mul", "rows column", "hidden_states", {}),
        ],
    )


def _prepare(path: Path) -> None:
    rng = np.random.default_rng(2)
    _graph(
        path,
        {
            "t5_hidden": (Type.FLOAT, [1, 256, H]),
            "t5_mask": (Type.FLOAT, [1, 256]),
            "seconds_total": (Type.FLOAT, [1]),
            "local_add_cond": (Type.FLOAT, [1, C + 1, "latent_len"]),
            "cond_gate": (Type.FLOAT, [1]),
        },
        {
            "global_cond": (Type.FLOAT, [1, D]),
            "context_k.0": (Type.FLOAT, [1, C]),
            "local.0": (Type.FLOAT, [1, "latent_len", D]),
        },
        {
            "axes": np.array([2]),
            "one": np.array([1]),
            "to_global": rng.standard_normal((1, D)).astype(np.float32) / 30,
            "to_context": rng.standard_normal((H, C)).astype(np.float32),
            "to_local": rng.standard_normal((C + 1, D)).astype(np.float32),
            "row": np.array([1, 1]),
        },
        [
            ("Reshape", "seconds_total row", "seconds", {}),
            ("MatMul", "seconds to_global", "global_cond", {}),
            ("Unsqueeze", "t5_mask axes", "column", {}),
            ("Mul", "t5_hidden column", "masked", {}),
            ("ReduceMean", "masked one", "mean", {"keepdims": 0}),
            ("MatMul", "mean to_context", "open", {}),
            ("Mul", "open cond_gate", "context_k.0", {}),
            ("Transpose", "local_add_cond", "frames", {"perm": [0, 2, 1]}),
            ("MatMul", "frames to_local", "local.0", {}),
        ],
    )


def _step(path: Path) -> None:
    rng = np.random.default_rng(3)
    _graph(
        path,
        {
            "x": (Type.FLOAT, [1, C, "latent_len"]),
            "t": (Type.FLOAT, [1]),
            "padding_mask": (Type.FLOAT, [1, "latent_len"]),
            "global_cond": (Type.FLOAT, [1, D]),
            "context_k.0": (Type.FLOAT, [1, C]),
            "local.0": (Type.FLOAT, [1, "latent_len", D]),
        },
        {"velocity": (Type.FLOAT, [1, C, "latent_len"])},
        {
            "axes": np.array([2]),
            "one": np.array([1]),
            "mix": rng.standard_normal((D, C)).astype(np.float32) / 5,
            "tenth": np.float32(0.1),
        },
        [
            ("Unsqueeze", "global_cond one", "global_row", {}),
            ("Add", "local.0 global_row", "frames", {}),
            ("MatMul", "frames mix", "mixed", {}),
            ("Transpose", "mixed", "turned", {"perm": [0, 2, 1]}),
            ("Unsqueeze", "context_k.0 axes", "context", {}),
            ("Add", "turned context", "target", {}),
            ("Mul", "t tenth", "drift", {}),
            ("Add", "target drift", "drifted", {}),
            ("Sub", "x drifted", "whole", {}),
            ("Unsqueeze", "padding_mask one", "real", {}),
            ("Mul", "whole real", "velocity", {}),
        ],
    )


def _whole(path: Path) -> None:
    """The whole DiT as published: neither gate nor padding mask."""
    rng = np.random.default_rng(2)
    _graph(
        path,
        {
            "x": (Type.FLOAT, [1, C, "latent_len"]),
            "t": (Type.FLOAT, [1]),
            "t5_hidden": (Type.FLOAT, [1, 256, H]),
            "t5_mask": (Type.FLOAT, [1, 256]),
            "seconds_total": (Type.FLOAT, [1]),
            "local_add_cond": (Type.FLOAT, [1, C + 1, "latent_len"]),
        },
        {"velocity": (Type.FLOAT, [1, C, "latent_len"])},
        {
            "axes": np.array([2]),
            "one": np.array([1]),
            "to_context": rng.standard_normal((H, C)).astype(np.float32),
            "first": np.array([1]),
            "end": np.array([C + 1]),
            "little": np.float32(1e-3),
        },
        [
            ("Unsqueeze", "t5_mask axes", "column", {}),
            ("Mul", "t5_hidden column", "masked", {}),
            ("ReduceMean", "masked one", "mean", {"keepdims": 0}),
            ("MatMul", "mean to_context", "context", {}),
            ("Mul", "seconds_total little", "drift", {}),
            ("Add", "context drift", "drifted", {}),
            ("Unsqueeze", "drifted axes", "target", {}),
            ("Slice", "local_add_cond first end one", "local", {}),
            ("Add", "local target", "aim", {}),
            ("Sub", "x aim", "towards", {}),
            ("Mul", "towards t", "velocity", {}),
        ],
    )


def _encoder(path: Path) -> None:
    _graph(
        path,
        {"audio": (Type.FLOAT, [1, 2, "samples"])},
        {"latent": (Type.FLOAT, [1, C, "latent_len"])},
        {"shape": np.array([1, 2, -1, 4096]), "axes": np.array([3]), "four": np.float32(4)},
        [
            ("Reshape", "audio shape", "frames", {}),
            ("ReduceMean", "frames axes", "mean", {"keepdims": 0}),
            ("Mul", "mean four", "louder", {}),
            ("Neg", "louder", "other", {}),
            ("Concat", "louder other", "latent", {"axis": 1}),
        ],
    )


# what the decoder makes of a frame, before it is spread over 4,096 samples
DECODERS: dict[str, float | None] = {
    "frames": None,  # 8,000 times the first two channels of the latent
    "silence": 0.0,
    "constant": 0.25 * 32767,
    "nan": -(2.0**31),  # what a NaN becomes in an integer cast
    "huge": 40_000.0,
}


def _decoder(path: Path, kind: str, output: str = "pcm") -> None:
    """`output`: "pcm", or "pcm_unbounded" or "audio" as older published decoders have."""
    level = DECODERS[kind]
    gain, offset = (8000.0, 0.0) if level is None else (0.0, level)
    last = {
        "pcm": [
            ("Transpose", "channels", "rows", {"perm": [0, 2, 1]}),
            ("Round", "rows", "rounded", {}),
            ("Cast", "rounded", "pcm", {"to": Type.INT32}),
        ],
        "audio": [("Div", "channels full", "audio", {})],
    }
    last["pcm_unbounded"] = [*last["pcm"], ("Identity", "pcm", "pcm_unbounded", {})]
    _graph(
        path,
        {"latent": (Type.FLOAT, [1, C, "latent_len"])},
        {"audio": (Type.FLOAT, [1, 2, "samples"])}
        if output == "audio"
        else {output: (Type.INT32, [1, "samples", 2])},
        {
            "first": np.array([0]),
            "second": np.array([2]),
            "one": np.array([1]),
            "axes": np.array([3]),
            "spread": np.array([1, 1, 1, 4096]),
            "flat": np.array([1, 2, -1]),
            "gain": np.float32(gain),
            "offset": np.float32(offset),
            "full": np.float32(32767),
        },
        [
            ("Slice", "latent first second one", "two", {}),
            ("Mul", "two gain", "scaled", {}),
            ("Add", "scaled offset", "level", {}),
            ("Unsqueeze", "level axes", "column", {}),
            ("Expand", "column spread", "wide", {}),
            ("Reshape", "wide flat", "channels", {}),
            *last[output],
        ],
    )


@pytest.fixture(scope="session")
def make_stub(data: Path) -> Callable[..., Path]:
    """make_stub(directory, decoder="frames", output="pcm", whole=False, **config) writes a stub.

    whole: the published form of the DiT instead of our two parts; config: of its model_config.json.
    """
    from sa3_models.tiny import model_config

    def make(
        directory: Path,
        decoder: str = "frames",
        *,
        output: str = "pcm",
        whole: bool = False,
        **config: object,
    ) -> Path:
        text = directory / "t5gemma-b-b-ul2"
        text.mkdir(parents=True)
        values = model_config(latent_dim=C, **config)
        (directory / "model_config.json").write_text(json.dumps(values))
        shutil.copy(data / "tiny-music" / text.name / "tokenizer.json", text)
        onnx_dir = directory / "onnx"
        _text(onnx_dir / "t5gemma_fp32.onnx")
        if whole:
            _whole(onnx_dir / "dit_fp32.onnx")
        else:
            _prepare(onnx_dir / "dit_prepare_fp32.onnx")
            _step(onnx_dir / "dit_step_fp32.onnx")
        _encoder(onnx_dir / "enc_fp32_chunkable.onnx")
        _decoder(onnx_dir / "dec_fp32_chunkable_limiter.onnx", decoder, output)
        return directory

    return make


@pytest.fixture(scope="session")
def stub(make_stub: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stub model that works. Do not write into it."""
    return make_stub(tmp_path_factory.mktemp("models") / "stub")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An `SA3_HOME` that all workers of one test run share, for exports made on first use."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(shared / "sa3-home"))
        yield shared / "sa3-home"


@pytest.fixture(scope="session")
def session(tiny: Path, home: Path) -> Iterator[Session]:
    """A CPU session of each tiny checkpoint; its exports are made on first use.

    One thread: graphs this small gain nothing from two, and lose much when tests run in parallel.
    """
    from sa3_runtime import load

    with load(tiny, threads=1) as opened:
        yield opened


@pytest.fixture
def script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """script("print(1)", argument, …) runs Python code in a process that must end well."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return lambda code, *words: subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
