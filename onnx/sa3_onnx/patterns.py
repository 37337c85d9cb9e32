"""How norms, rotations, attention cores and PCM tails look in a graph, ours or foreign.

Knows: operators, number formats, what may stand between two of them. Doesn't know: what is allowed.
Weights are not read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from sa3_models.onnx_file import type_name

__all__ = ["FLOATS", "HALF", "Graph"]

HALF = ("float16", "bfloat16")
FLOATS = ("float32", *HALF, "float64", "float8e4m3fn")
_LINEAR = ("MatMul", "Gemm", "Conv")
_NORMS = ("RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization")
_REDUCE = ("ReduceMean", "ReduceSum")
# what may stand between a score and its softmax, or between weights and the second product
_SCORE = ("Add", "Sub", "Mul", "Div", "Where", "Tanh", "Cast", "Reshape", "Transpose", "Identity")
# what may stand between a table and the place where it is used
_MOVE = ("Cast", "Slice", "Gather", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose")
_TAIL = ("Round", "Clip", "Min", "Max", "Mul", "Where", "Transpose", "Reshape", "Identity", "Floor")
_INTEGERS = ("int16", "int32")


class Graph:
    """A loaded graph with its producers, consumers and formats."""

    def __init__(self, model: Any) -> None:
        import onnx

        # formats of intermediate tensors; what the file itself declares must do if it fails, and
        # operators of other domains stop it where they stand
        with contextlib.suppress(Exception):
            model = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False)
        graph = model.graph
        self.nodes = list(graph.node)
        self.by_output = {name: node for node in self.nodes for name in node.output}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.weights = {tensor.name for tensor in graph.initializer}
        self.formats = {t.name: type_name(t.data_type) for t in graph.initializer}
        for info in (*graph.value_info, *graph.input, *graph.output):
            if info.type.tensor_type.elem_type:
                self.formats[info.name] = type_name(info.type.tensor_type.elem_type)
        self.inputs = {info.name for info in graph.input}
        self.outputs = [info.name for info in graph.output]

    # -- moving about -------------------------------------------------------------------------

    def format(self, name: str) -> str:
        """The number format of a tensor, "unknown" behind foreign operators."""
        return self.formats.get(name, "unknown")

    def made(self, node: Any) -> str:
        """The format of what a node gives."""
        return self.format(node.output[0])

    def source(self, name: str, through: Iterable[str] = ("Cast",)) -> Any | None:
        """The node that makes a tensor, behind operators that only move or convert it."""
        node = self.by_output.get(name)
        while node is not None and node.op_type in through:
            node = self.by_output.get(node.input[0])
        return node

    def products_before(self, name: str, depth: int = 12) -> list[Any]:
        """MatMul nodes that a tensor comes from through score arithmetic."""
        node = self.by_output.get(name)
        if node is None or depth == 0:
            return []
        if node.op_type == "MatMul":
            return [] if self.weights & set(node.input) else [node]
        if node.op_type not in _SCORE:
            return []
        return [m for i in node.input for m in self.products_before(i, depth - 1)]

    def products_after(self, name: str, depth: int = 6) -> list[Any]:
        """MatMul nodes that a tensor goes into through score arithmetic."""
        found = []
        for node in self.consumers.get(name, []):
            if node.op_type == "MatMul":
                found.append(node)
            elif node.op_type in _SCORE and depth:
                found += self.products_after(node.output[0], depth - 1)
        return found

    # -- what there is --------------------------------------------------------------------------

    @cached_property
    def trunk(self) -> str:
        """The format of most linear layers, else of most products."""
        for nodes in (self.linears(), [n for n in self.nodes if n.op_type in _LINEAR]):
            kinds = Counter(self.made(node) for node in nodes if self.made(node) in FLOATS)
            if kinds:
                return kinds.most_common(1)[0][0]
        return "float32"

    def linears(self) -> list[Any]:
        """Layers with stored weights (also behind a conversion or a transposition)."""
        return [
            node
            for node in self.nodes
            if node.op_type in _LINEAR and any(self._is_stored(name) for name in node.input[1:2])
        ]

    def _is_stored(self, name: str) -> bool:
        through = (*_MOVE, "DequantizeLinear", "QuantizeLinear")
        while name not in self.weights:
            node = self.by_output.get(name)
            if node is None:
                return False
            if node.op_type == "Constant":
                return True
            if node.op_type not in through:
                return False
            name = node.input[0]
        return True

    def norms(self) -> Iterator[tuple[Any, str]]:
        """(node, format of the statistics) of every variance."""
        for node in self.nodes:
            if node.op_type in _NORMS:
                stash = next((a.i for a in node.attribute if a.name == "stash_type"), 1)
                yield node, type_name(stash)
            elif node.op_type in _REDUCE:
                square = self.source(node.input[0])
                if square is not None and _is_square(square):
                    kinds = [self.made(square), self.made(node)]
                    yield node, next((kind for kind in kinds if kind in HALF), kinds[-1])
            elif node.op_type in ("ReduceSumSquare", "ReduceL2"):
                yield node, self.made(node)

    def rotations(self) -> Iterator[tuple[Any, str]]:
        """(node, narrowest format involved) of every rotation of queries or keys."""
        for node in self.nodes:
            if node.op_type == "RotaryEmbedding":
                tables = [name for name in node.input[1:3] if name in self.formats]
                yield node, self._worst([node.output[0], *map(self._table, tables)])
                continue
            if node.op_type not in ("Add", "Concat"):
                continue
            if node.op_type == "Add":
                found, needed = [self.source(name) for name in node.input], 2
            else:
                found = [p for name in node.input[:2] for p in self._sum_of_products(name)]
                needed = 4
            terms = [term for term in found if term is not None and term.op_type == "Mul"]
            turns = _crossed(terms) if needed == 4 else any(map(self._of_swapped_halves, terms))
            if len(terms) == len(found) == needed and turns:
                tables = [self._table(name) for term in terms for name in term.input]
                yield node, self._worst([*(term.output[0] for term in terms), *tables])

    def _sum_of_products(self, name: str) -> list[Any]:
        node = self.source(name)
        if node is None or node.op_type not in ("Add", "Sub"):
            return []
        return [self.source(term) for term in node.input]

    def _of_swapped_halves(self, product: Any) -> bool:
        """One factor is concat(−second half, first half)."""
        for name in product.input:
            node = self.source(name)
            if node is not None and node.op_type == "Concat":
                parts = [self.source(part) for part in node.input]
                if any(part is not None and part.op_type == "Neg" for part in parts):
                    return True
        return False

    def _table(self, name: str) -> str:
        """The tensor in the narrowest format that a table comes through; else `name`."""
        at, node = name, self.by_output.get(name)
        while node is not None and node.op_type in _MOVE:
            at = node.input[0]
            node = self.by_output.get(at)
            if at in self.weights or (node is not None and node.op_type in ("Cos", "Sin")):
                return str(at)
        return name

    def _worst(self, names: Iterable[str]) -> str:
        kinds = [self.format(name) for name in names]
        return str(next((kind for kind in kinds if kind in HALF), kinds[0]))

    def angles(self) -> Iterator[tuple[Any, str]]:
        """(node, format) of every cosine whose argument also goes through a sine: an angle."""
        for node in self.nodes:
            if node.op_type == "Cos":
                yield node, self._worst([node.output[0], node.input[0]])

    def attention(self) -> Iterator[tuple[Any, tuple[str, str, str], bool]]:
        """(node, formats of scores, softmax and values, whether the scores are soft-capped)."""
        for node in self.nodes:
            if node.op_type in ("Attention", "MultiHeadAttention", "GroupQueryAttention"):
                kind = self.format(node.input[0])
                precise = next((a.i for a in node.attribute if a.name == "softmax_precision"), 0)
                yield node, (kind, type_name(precise) if precise else kind, kind), False
            elif node.op_type == "Softmax":
                before = self.products_before(node.input[0])
                after = self.products_after(node.output[0])
                if before and after:
                    kinds = (self.made(before[0]), self.made(node), self.made(after[0]))
                    yield node, kinds, self._capped(node.input[0])

    def _capped(self, name: str) -> bool:
        node = self.by_output.get(name)
        while node is not None and node.op_type in _SCORE:
            if node.op_type == "Tanh":
                return True
            node = next(
                (m for n in node.input if (m := self.by_output.get(n)) and m.op_type in _SCORE),
                None,
            )
        return False

    def tail(self) -> Iterator[tuple[Any, str]]:
        """(node, format) of the arithmetic before a float becomes PCM at an output."""
        todo = [name for name in self.outputs if self.format(name) in _INTEGERS]
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            node = self.by_output.get(name)
            if name in seen or node is None:
                continue
            seen.add(name)
            if node.op_type == "Cast" and self.format(name) in _INTEGERS:
                yield node, self.format(node.input[0])
                todo.append(node.input[0])
            elif node.op_type in _TAIL:
                if self.format(name) in FLOATS:
                    yield node, self.format(name)
                todo += node.input

    def islands(self) -> list[tuple[str, int]]:
        """(what it holds, nodes) of every group of FP32 nodes that hang together."""
        inside = {
            id(node): node
            for node in self.nodes
            if node.op_type != "Cast" and "float32" in map(self.format, node.output)
        }
        found = []
        while inside:
            _, first = inside.popitem()
            group, todo = [first], [first]
            while todo:
                node = todo.pop()
                near = [self.by_output.get(name) for name in node.input]
                near += [user for name in node.output for user in self.consumers.get(name, [])]
                for other in near:
                    if other is not None and id(other) in inside:
                        del inside[id(other)]
                        group.append(other)
                        todo.append(other)
            found.append((_holds({node.op_type for node in group}), len(group)))
        return found


def _holds(kinds: set[str]) -> str:
    """What an island is for, by the operators in it."""
    if kinds & {"Cos"}:
        return "time features and modulation"
    if kinds & {"Round", "MaxPool"}:
        return "limiter and PCM"
    if "Softmax" in kinds:
        return "softmax"
    rotates = "RotaryEmbedding" in kinds or {"Sub", "Concat"} <= kinds
    norm = kinds & {*_NORMS, "ReduceMean"}
    if norm:
        return "norm and rotation" if rotates else "norm"
    return "rotation" if rotates else "other"


def _is_square(node: Any) -> bool:
    return bool(node.op_type == "Pow" or (node.op_type == "Mul" and node.input[0] == node.input[1]))


def _crossed(products: list[Any]) -> bool:
    """Four products of two halves with two tables: (a·c, b·s), (b·c, a·s) in any order."""
    factors = Counter(name for product in products for name in product.input)
    return len(factors) == 4 and set(factors.values()) == {2}
