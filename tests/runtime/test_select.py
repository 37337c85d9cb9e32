"""Which file of a stage runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sa3_runtime.stages.ort_cuda as ort_cuda
import sa3_runtime.stages.tensorrt as tensorrt
from sa3_models import packages
from sa3_models.catalogue import resolve
from sa3_models.stages import DIT_PARTS, RENDER_STAGES, Stage, stage_file
from sa3_runtime.devices import DeviceOptions
from sa3_runtime.devices.cuda.select import engines_of, select_stages

MODEL = resolve("small-music")
DRIVER = SimpleNamespace(architecture="sm_86")
GRAPHS = {stage: Path(f"{stage.value}.onnx") for stage in (*RENDER_STAGES, Stage.DIT)}
BUNDLE: Any = SimpleNamespace(
    model=MODEL, onnx_files=lambda precision, stages: {stage: GRAPHS[stage] for stage in stages}
)


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """engines(stage, …, precision=…): put files in the place of sm_86 engines."""
    monkeypatch.setenv("SA3_HOME", str(tmp_path))

    def put(*stages: Stage, precision: str = "fp16") -> None:
        for stage in stages:
            name = f"{stage_file(stage, precision)}.trt"
            path = tmp_path / "sm_86" / MODEL.stage_dir(stage) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    return put


@pytest.fixture
def chosen(monkeypatch):
    """chosen(installed packages, options) → file name by stage; stages are (kind, path) here."""
    monkeypatch.setattr(tensorrt, "TensorRTStage", lambda stage, path, driver: path.name)
    monkeypatch.setattr(ort_cuda, "OrtCudaStage", lambda stage, path, driver: path.name)
    monkeypatch.setattr(ort_cuda, "onnx_runtime", lambda: None)

    def choose(here: dict[str, str], **options: Any) -> dict[str, str]:
        monkeypatch.setattr(packages, "installed", here.get)
        return select_stages(BUNDLE, DRIVER, DeviceOptions(**options))

    return choose


@pytest.mark.parametrize("package", ["tensorrt_cu13_bindings", packages.RTX_BINDINGS])
def test_either_tensorrt_runs_the_engines_that_are_there_and_graphs_fill_the_gaps(
    engines, chosen, package
):
    engines(*DIT_PARTS)
    files = chosen({package: "1"})
    engine = {stage.value: f"{stage_file(stage, 'fp16')}.trt" for stage in DIT_PARTS}
    rest = [stage for stage in RENDER_STAGES if stage not in DIT_PARTS]
    assert files == engine | {stage.value: GRAPHS[stage].name for stage in rest}


@pytest.mark.parametrize(
    ("here", "options"),
    [({}, {}), ({"tensorrt": "10.15.1.29"}, {"extra": {"engines": False}})],
    ids=["no TensorRT", "engines unwanted"],
)
def test_without_tensorrt_or_when_unwanted_engines_are_left_alone(engines, chosen, here, options):
    engines(*RENDER_STAGES)
    files = chosen(here, **options)
    assert files == {stage.value: GRAPHS[stage].name for stage in RENDER_STAGES}


def test_a_whole_dit_stands_in_only_while_a_part_is_missing(engines):
    engines(Stage.DIT, Stage.DIT_STEP)
    assert set(engines_of(BUNDLE, "sm_86", None)) == {Stage.DIT}
    engines(Stage.DIT_PREPARE)
    assert set(engines_of(BUNDLE, "sm_86", None)) == set(DIT_PARTS)


def test_the_best_precision_is_taken_or_the_one_that_is_asked_for(engines):
    for precision in ("bf16", "fp16", "fp8"):
        engines(*DIT_PARTS, precision=precision)
    best = engines_of(BUNDLE, "sm_86", None)[Stage.DIT_STEP]
    asked = engines_of(BUNDLE, "sm_86", "bf16")[Stage.DIT_STEP]
    assert (best.stem, asked.stem) == ("dit_step_fp8", "dit_step_bf16")
