"""A half-precision graph as the CPU can run it: float32 arithmetic, every result rounded.

Knows: which tensors of a graph are FP16 or BF16. Doesn't know: what it computes.

ONNX Runtime's CPU has few half-precision kernels: it computes such nodes in float32 and drops the
roundings between them, so a graph run as it is looks better than it is (and BF16 doesn't run at
all). Here each result of a half-precision operator is rounded to the format by explicit casts,
which is what a GPU does between kernels: it multiplies in half precision and adds up in float32.
"""

from __future__ import annotations

from typing import Any

__all__ = ["emulated", "has_half"]


def has_half(model: Any) -> bool:
    """Whether a model computes in half precision: whether it stores weights so."""
    import onnx

    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return any(tensor.data_type in half for tensor in model.graph.initializer)


def emulated(model: Any) -> Any:
    """A copy of a model with all half-precision tensors in float32 and rounded where they are made.

    Names stay, ports become float32, weights stay half on disk and are widened when loaded.

    Args:
        model: an `onnx.ModelProto`, its weights not loaded; intermediate tensors have their types
            (files of this project do).
    """
    import onnx

    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    wide = onnx.TensorProto.FLOAT
    out = onnx.ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    formats = {
        info.name: info.type.tensor_type.elem_type
        for info in (*graph.value_info, *graph.input, *graph.output)
    }
    declared = [info for info in graph.value_info if formats[info.name] not in half]
    declared = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in declared]
    del graph.value_info[:]
    graph.value_info.extend(declared)

    def declared_wide(name: str) -> None:
        graph.value_info.append(onnx.helper.make_tensor_value_info(name, wide, None))

    stored = {tensor.name for tensor in graph.initializer if tensor.data_type in half}
    for tensor in graph.initializer:
        if tensor.name in stored:
            tensor.name = f"{tensor.name}@stored"
    nodes = []
    widened: set[str] = set()
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in stored:
            # rows of a large table are widened, not the table
            rows = f"{node.output[0]}@rows"
            pick = onnx.helper.make_node(
                "Gather", [f"{node.input[0]}@stored", node.input[1]], [rows]
            )
            pick.attribute.extend(node.attribute)
            nodes += [pick, onnx.helper.make_node("Cast", [rows], [node.output[0]], to=wide)]
            declared_wide(node.output[0])
            continue
        for name in dict.fromkeys(node.input):
            if name in stored and name not in widened:
                # just before its first use, so that few are held at once
                widened.add(name)
                nodes.append(onnx.helper.make_node("Cast", [f"{name}@stored"], [name], to=wide))
                declared_wide(name)
        if node.op_type == "Cast" and node.attribute[0].i in half:
            node.attribute[0].i = wide
        rounded = [name for name in node.output if formats.get(name) in half]
        for i, name in enumerate(node.output):
            if name in rounded:
                node.output[i] = f"{name}@exact"
        nodes.append(node)
        for name in rounded:
            narrow = f"{name}@rounded"
            nodes += [
                onnx.helper.make_node("Cast", [f"{name}@exact"], [narrow], to=formats[name]),
                onnx.helper.make_node("Cast", [narrow], [name], to=wide),
            ]
            declared_wide(name)
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type in half:
            info.type.tensor_type.elem_type = wide
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return out
