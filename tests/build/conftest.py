"""A small graph and a fake TensorRT for the builder's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture(scope="session")
def write_graph() -> Callable[..., Path]:
    """Write a decoder-like graph (`latent` → `pcm`, one MatMul) and return its path."""

    def write(
        path: Path,
        *,
        dtype: str = "float16",
        width: int = 8,
        domain: str = "",
        external: bool = False,
        seed: int = 0,
    ) -> Path:
        import ml_dtypes

        import onnx
        from onnx import TensorProto as T
        from onnx import helper

        kind = {"float16": T.FLOAT16, "bfloat16": T.BFLOAT16, "float32": T.FLOAT}[dtype]
        numpy_type = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        values = np.random.default_rng(seed).standard_normal((width, width)).astype(numpy_type)
        weight = helper.make_tensor("w", kind, values.shape, values.tobytes(), raw=True)
        nodes = [
            helper.make_node("Transpose", ["latent"], ["rows"], perm=[0, 2, 1]),
            helper.make_node("Cast", ["rows"], ["half"], to=kind),
            helper.make_node("MatMul", ["half", "w"], ["out"], domain=domain),
            helper.make_node("Cast", ["out"], ["pcm"], to=T.FLOAT),
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("latent", T.FLOAT, [1, width, "latent_len"])],
            [helper.make_tensor_value_info("pcm", T.FLOAT, [1, "latent_len", width])],
            [weight],
        )
        opsets = [helper.make_opsetid("", 20)]
        if domain:
            opsets.append(helper.make_opsetid(domain, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(
            model,
            path,
            save_as_external_data=external,
            location=f"{path.name}.data",
            size_threshold=0,
        )
        return path

    return write


@pytest.fixture
def fake_trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the fake TensorRT, importable in build processes too."""
    monkeypatch.syspath_prepend(str(FAKES))
    import fake_trt as module

    yield module
    sys.modules.pop("fake_trt", None)


@pytest.fixture
def order(fake_trt: Any, write_graph: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """Make an order for the small graph; keywords replace its parts, `ending` scripts the fake."""
    from sa3_build.architectures import parse_architectures
    from sa3_build.order import Order
    from sa3_build.recipes import RECIPES
    from sa3_models.onnx_file import read_onnx
    from sa3_models.stages import Stage

    def make(ending: str = "ok", **parts: Any) -> Order:
        path = tmp_path / "in" / "g.onnx"
        source = parts.pop("source", None) or write_graph(path)
        stage = parts.pop("stage", Stage.DECODER)
        targets = parts.pop("targets", ("sm_86", "sm_120"))
        made: dict[str, Any] = {
            "source": read_onnx(source),
            "stage": stage,
            "precision": "fp16",
            "ranges": RECIPES[stage].ranges,
            "flavour": fake_trt.FakeFlavour(tmp_path / "builds.log", ending),
            "targets": parse_architectures(targets),
            "home": tmp_path / "home",
            "stage_dir": "same-s",
        }
        return Order(**(made | parts))

    return make


@pytest.fixture(scope="session")
def rtx() -> Any:
    """The real TensorRT-RTX. Skips where its wheels are not installed, fails there in CI."""
    from sa3_build.flavours import FLAVOURS

    flavour = FLAVOURS["tensorrt-rtx"]
    if problem := flavour.missing(()):
        if os.environ.get("CI"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))
    return flavour
