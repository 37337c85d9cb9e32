"""Which file of a stage runs on this GPU: an engine where there is one, else an ONNX graph.

Knows: where engines and graphs lie, which library runs them. Doesn't know: how.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sa3_models.packages import tensorrt_version
from sa3_models.paths import engine_dir
from sa3_models.stages import DIT_PARTS, RENDER_STAGES, Stage, stage_file

if TYPE_CHECKING:
    from sa3_runtime.bundle import Bundle
    from sa3_runtime.devices import DeviceOptions
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import CudaStage

__all__ = ["engines_of", "select_stages"]

ENGINE_PRECISIONS = ("fp8", "fp16", "bf16")  # best first


def select_stages(bundle: Bundle, driver: Driver, options: DeviceOptions) -> dict[str, CudaStage]:
    """The stages of a bundle on a GPU, none of them loaded.

    Engines of this architecture come first, if a TensorRT is installed; what has none is run from
    its ONNX graph. `options.extra["engines"] = False` leaves engines out.

    Raises:
        ArtefactMissing: a stage has neither, and can't be exported.
        MachineMismatch: an engine isn't for this machine, or ONNX Runtime has no CUDA.
    """
    stages: dict[str, CudaStage] = {}
    engines: dict[Stage, Path] = {}
    installed = tensorrt_version("tensorrt") or tensorrt_version("tensorrt-rtx")
    if options.extra.get("engines", True) and installed:
        engines = engines_of(bundle, driver.architecture, options.precision)
    if engines:
        from sa3_runtime.stages.tensorrt import TensorRTStage

        stages |= {
            stage.value: TensorRTStage(stage, path, driver) for stage, path in engines.items()
        }
    rest = [stage for stage in RENDER_STAGES if stage not in engines]
    if Stage.DIT in engines:
        rest = [stage for stage in rest if stage not in DIT_PARTS]
    if rest:
        from sa3_runtime.stages.ort_cuda import OrtCudaStage, onnx_runtime

        # before an export takes minutes, and before threads load stages: its import is Python's
        # work, which would wait for a tokenizer that is being read
        onnx_runtime()
        files = bundle.onnx_files(options.precision or "fp16", rest)
        stages |= {stage.value: OrtCudaStage(stage, path, driver) for stage, path in files.items()}
    return stages


def engines_of(bundle: Bundle, architecture: str, precision: str | None) -> dict[Stage, Path]:
    """The engine files of an architecture, by stage; the DiT in two parts rather than whole."""
    found: dict[Stage, Path] = {}
    for stage in (*RENDER_STAGES, Stage.DIT):
        folder = engine_dir(architecture, bundle.model.stage_dir(stage))
        for kind in ENGINE_PRECISIONS if precision is None else (precision,):
            path = folder / f"{stage_file(stage, kind)}.trt"
            if path.is_file():
                found.setdefault(stage, path)
    if all(part in found for part in DIT_PARTS):
        found.pop(Stage.DIT, None)
    else:
        for part in DIT_PARTS:
            found.pop(part, None)
    return found
