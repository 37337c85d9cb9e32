"""Is a finished file right? The standard's checker, shape inference, and one run.

Knows: the ONNX checker, ONNX Runtime on the CPU, random inputs for a stage's ports. Doesn't know:
checkpoints, what the outputs should be beyond finite.

A graph of any size is run within a bound of memory: it is cut into pieces of consecutive nodes
whose weights fit the bound, and each piece runs in a session of its own. Half precision is run with
its roundings emulated (sa3_onnx.emulate), so that an overflow shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.errors import BuildFailed, first_line
from sa3_models.geometry import SAMPLES_PER_LATENT
from sa3_onnx.emulate import emulated, has_half

__all__ = ["CheckReport", "check", "random_inputs", "run_in_pieces"]

RUN_LATENTS = 3  # odd, so that both autoencoders pad
PIECE_BYTES = 256 << 20  # weights held by one piece of a run
_QUIET = 4  # ONNX Runtime log severity: fatal


@dataclass(frozen=True)
class CheckReport:
    """What was checked.

    nodes: operators in the graph. emulated: whether half precision was emulated in its run.
    """

    nodes: int
    emulated: bool


def check(path: Path) -> CheckReport:
    """Check a file: structure and types, shape inference, one run at a small length.

    Raises:
        BuildFailed: it isn't a valid graph, doesn't run, or gives values that aren't finite.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker has several unrelated exception types
        raise BuildFailed(f"{path.name} is not a valid graph", found=first_line(error)) from error
    model = onnx.load(str(path), load_external_data=False)
    nodes, half = len(model.graph.node), has_half(model)
    if half:
        model = emulated(model)
    outputs = run_in_pieces(model, path, random_inputs(model, RUN_LATENTS))
    for name, values in outputs.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise BuildFailed(
                f"{path.name} gives values that are not finite",
                found=f"{int((~np.isfinite(values)).sum())} of {values.size} in '{name}'",
                hint="the weights are out of range for this precision, or damaged",
            )
    return CheckReport(nodes, half)


def random_inputs(model: Any, latent_len: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Plausible inputs for a model's ports at a length: noise, ones for masks and gates, ids 0–99.

    Args:
        model: an `onnx.ModelProto`; its dynamic axes are `latent_len` and `samples`.
        latent_len: L.
        seed: of the noise.
    """
    import onnx

    rng = np.random.default_rng(seed)
    sizes = {"latent_len": latent_len, "samples": latent_len * SAMPLES_PER_LATENT}
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs: dict[str, NDArray[Any]] = {}
    for info in model.graph.input:
        if info.name in stored:
            continue
        tensor = info.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if info.name == "input_ids":
            inputs[info.name] = rng.integers(0, 100, shape).astype(dtype)
        elif info.name.endswith(("mask", "gate")):
            inputs[info.name] = np.ones(shape, dtype)
        elif info.name in ("t", "limiter_ceiling"):
            inputs[info.name] = np.full(shape, 0.5, dtype)
        elif info.name == "seconds_total":
            inputs[info.name] = np.full(shape, 30, dtype)
        else:
            inputs[info.name] = rng.standard_normal(shape).astype(dtype)
    return inputs


def run_in_pieces(
    model: Any, path: Path, inputs: dict[str, NDArray[Any]], *, piece_bytes: int = PIECE_BYTES
) -> dict[str, NDArray[Any]]:
    """Run a graph with at most about `piece_bytes` of its weights in memory.

    Nodes run as they are written, without any optimisation.

    Args:
        model: an `onnx.ModelProto`, its weights not loaded.
        path: the file it comes from, beside which its data lies.
        inputs: by port name.
        piece_bytes: the bound.

    Returns:
        The outputs by name.

    Raises:
        BuildFailed: ONNX Runtime refuses a node.
    """
    import onnxruntime as ort

    import onnx

    outputs = [info.name for info in model.graph.output]
    values = dict(inputs)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.log_severity_level = _QUIET
    options.add_session_config_entry("session.disable_prepacking", "1")
    piece_path = path.with_name(f"{path.name}.{os.getpid()}.check.part")
    try:
        for piece in _pieces(model, piece_bytes):
            onnx.save_model(piece, str(piece_path))
            session = ort.InferenceSession(
                str(piece_path), options, providers=["CPUExecutionProvider"]
            )
            wanted = [info.name for info in piece.graph.input]
            names = [info.name for info in piece.graph.output]
            results = session.run(names, {name: values[name] for name in wanted})
            values.update(zip(names, results, strict=True))
    except Exception as error:  # ONNX Runtime has no common base class
        raise BuildFailed(f"{path.name} does not run", found=first_line(error)) from error
    finally:
        piece_path.unlink(missing_ok=True)
    return {name: values[name] for name in outputs}


def _pieces(model: Any, piece_bytes: int) -> Iterator[Any]:
    """Cut a model into models of consecutive nodes that follow each other."""
    import onnx

    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    types = {info.name: info for info in (*graph.value_info, *graph.input, *graph.output)}
    cuts: list[list[Any]] = [[]]
    held = 0
    for node in graph.node:
        size = sum(_size(weights[name]) for name in node.input if name in weights)
        if size and held + size > piece_bytes and cuts[-1]:
            cuts.append([])
            held = 0
        cuts[-1].append(node)
        held += size
    wanted_later = [info.name for info in graph.output]
    needs: list[set[str]] = []  # what the pieces after each one read
    for nodes in reversed(cuts):
        needs.append(set(wanted_later))
        wanted_later = [*wanted_later, *(name for node in nodes for name in node.input)]
    for nodes, needed in zip(cuts, reversed(needs), strict=True):
        made = {name for node in nodes for name in node.output}
        read = dict.fromkeys(name for node in nodes for name in node.input if name)
        piece = onnx.helper.make_graph(
            nodes,
            graph.name,
            [types[name] for name in read if name not in made and name not in weights],
            [types[name] for name in made if name in needed],
            [weights[name] for name in read if name in weights],
        )
        yield onnx.helper.make_model(
            piece, opset_imports=model.opset_import, ir_version=model.ir_version
        )


def _size(tensor: Any) -> int:
    import onnx

    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    elements = int(np.prod(tensor.dims, dtype=np.int64))
    return elements * int(dtype.itemsize)
