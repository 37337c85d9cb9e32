"""What is computed in which number format, on any finished graph, ours or foreign.

Knows: which of norms, rotations, attention cores and PCM tails must be in FP32 and which must not
(MODEL_SPEC §8). Doesn't know: what they look like (sa3_onnx.patterns), who wrote the graph.

A violation is one of: a variance, a rotation (its angle, table or product) or a PCM tail in half
precision; an attention core outside the trunk type, which costs the fused kernel. A softmax in
FP32 between two products of the trunk type is allowed where scores are soft-capped (T5Gemma).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa3_models.errors import ArtefactMissing, BuildFailed
from sa3_onnx.patterns import FLOATS, HALF, Graph

__all__ = ["Audit", "Core", "Violation", "audit"]


@dataclass(frozen=True)
class Violation:
    """Something in a format that breaks numbers or speed.

    kind: "variance", "rotation", "pcm" or "attention". node: name of an operator.
    """

    kind: str
    node: str
    detail: str


@dataclass(frozen=True)
class Core:
    """Attention cores of one kind: formats of q·kᵀ, softmax and p·v, and how many there are."""

    scores: str
    softmax: str
    values: str
    count: int


@dataclass(frozen=True)
class Audit:
    """The formats of a graph.

    trunk: format of most linear layers. casts: conversions of floats by target format.
    norms, rotations: how many by the format of their arithmetic (statistics in the stash type of
    fused operators). islands: groups of connected FP32 nodes in a half-precision graph, by what
    they hold; island_nodes: their nodes. fp32_linears: linear layers in FP32 there.
    unknown: tensors whose format could not be inferred (behind operators of other domains).
    """

    path: str
    trunk: str
    nodes: int
    casts: dict[str, int]
    linears: dict[str, int]
    norms: dict[str, int]
    rotations: dict[str, int]
    cores: tuple[Core, ...]
    islands: dict[str, int]
    island_nodes: int
    fp32_linears: int
    unknown: int
    violations: tuple[Violation, ...]

    @property
    def passed(self) -> bool:
        """No violation."""
        return not self.violations

    def text(self) -> str:
        """The report for people, several lines."""
        lines = [
            f"{Path(self.path).name}: trunk {self.trunk}, {self.nodes} nodes",
            f"  linear layers    {_counts(self.linears)}",
            f"  norms            {_counts(self.norms)}",
            f"  rotations        {_counts(self.rotations)}",
            *(
                f"  attention cores  {core.count} × scores {core.scores}, "
                f"softmax {core.softmax}, values {core.values}"
                for core in self.cores
            ),
            f"  casts            {_counts(self.casts)}",
            f"  FP32 islands     {_counts(self.islands)} ({self.island_nodes} nodes, "
            f"{self.fp32_linears} linear layers)",
        ]
        if self.unknown:
            lines.append(f"  unknown formats  {self.unknown} tensors")
        lines += [f"  VIOLATION {v.kind}: {v.node}: {v.detail}" for v in self.violations]
        if self.passed:
            lines.append("  no violations")
        return "\n".join(lines)


def audit(path: Path | str) -> Audit:
    """Report the formats of an ONNX file, ours or foreign; its weights are not needed.

    Raises:
        ArtefactMissing: there is no such file.
        BuildFailed: it is not an ONNX graph.
    """
    import onnx

    path = Path(path)
    if not path.is_file():
        raise ArtefactMissing(f"there is no file {path}")
    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.node:
            raise ValueError("it holds no operators")
    except Exception as error:  # protobuf and onnx raise types of their own
        raise BuildFailed(f"{path.name} is not an ONNX graph", found=str(error)[:100]) from error
    return _report(Graph(model), str(path))


def _report(graph: Graph, path: str) -> Audit:
    """Everything the patterns find, and what of it is a violation."""
    norms, rotations = list(graph.norms()), list(graph.rotations())
    cores, violations = Counter[tuple[str, str, str]](), []
    for node, kind in norms:
        if kind in HALF:
            violations.append(Violation("variance", _name(node), f"computed in {kind}"))
    for node, kind in (*rotations, *graph.angles()):
        if kind in HALF:
            what = "an angle or table" if node.op_type == "Cos" else "a table or product"
            violations.append(Violation("rotation", _name(node), f"{what} is in {kind}"))
    for node, kind in graph.tail():
        if kind in HALF:
            violations.append(Violation("pcm", _name(node), f"computed in {kind}"))
    for node, kinds, capped in graph.attention():
        cores[kinds] += 1
        allowed = {graph.trunk, "float32"} if capped else {graph.trunk}
        if kinds[0] != graph.trunk or kinds[2] != graph.trunk or kinds[1] not in allowed:
            detail = f"scores {kinds[0]}, softmax {kinds[1]}, values {kinds[2]}"
            violations.append(
                Violation("attention", _name(node), f"{detail} in a {graph.trunk} trunk")
            )
    islands = graph.islands() if graph.trunk in HALF else []
    fp32_linears = sum(graph.made(node) == "float32" for node in graph.linears())
    produced = [name for node in graph.nodes for name in node.output if name]
    return Audit(
        path=path,
        trunk=graph.trunk,
        nodes=len(graph.nodes),
        casts=dict(
            Counter(
                graph.made(node)
                for node in graph.nodes
                if node.op_type == "Cast" and graph.made(node) in FLOATS
            )
        ),
        linears=dict(Counter(graph.made(node) for node in graph.linears())),
        norms=dict(Counter(kind for _, kind in norms)),
        rotations=dict(Counter(kind for _, kind in rotations)),
        cores=tuple(Core(*kinds, count) for kinds, count in cores.most_common()),
        islands=dict(Counter(kind for kind, _ in islands)),
        island_nodes=sum(count for _, count in islands),
        fp32_linears=fp32_linears if graph.trunk in HALF else 0,
        unknown=sum(name not in graph.formats for name in produced),
        violations=tuple(violations),
    )


def _name(node: Any) -> str:
    return str(node.name) or f"{node.op_type} that makes '{node.output[0]}'"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
