"""Plans and reports as text.

Knows: words and columns. Doesn't know: how the facts came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sa3_build.wish import Plan, missing
from sa3_models.words import size

__all__ = ["lines", "plan_rows"]

Report = dict[str, Any]


def plan_rows(chosen: Plan) -> Iterator[tuple[Report, str]]:
    """What would be done for every stage: as data, and as a line."""
    orders = {order.name: order for order in chosen.ready()}
    targets = [target.name for target in chosen.targets]
    for piece in chosen.pieces:
        order = orders.get(piece.name)
        row: Report = {"stage": piece.name, "targets": targets, "flavour": chosen.flavour.name}
        if order is None:
            where = piece.model.checkpoint if piece.model else piece.graph
            yield row | {"do": "export and build"}, f"{piece.name}: export from {where}, then build"
            continue
        rest = missing([order])
        if not rest:
            yield row | {"do": "nothing"}, f"{piece.name}: up to date"
            continue
        seconds, memory = rest[0].estimate()
        row |= {"do": "build", "seconds": round(seconds), "memory_bytes": memory}
        row["disk_bytes"] = rest[0].disk_bytes()
        spans = " and ".join(str(span) for span, _ in order.profiles if span) or "fixed shapes"
        yield (
            row,
            f"{piece.name}: build for {', '.join(row.name for row in rest[0].targets)} "
            f"({spans}): about {seconds:.0f} s, {memory / 1e9:.1f} GB of memory, "
            f"{rest[0].disk_bytes() / 1e6:.0f} MB of disk",
        )


def lines(report: Report) -> Iterator[str]:
    """A report of `sa3_build.inspect` for people."""
    yield from _RENDER[report["kind"]](report)


def _directory(report: Report) -> Iterator[str]:
    for entry in report["entries"]:
        yield from lines(entry)
        yield ""


def _broken(report: Report) -> Iterator[str]:
    yield report["path"]
    yield f"  BROKEN    {report['error']}"


def _onnx(report: Report) -> Iterator[str]:
    data = ", ".join(f"{name} ({size(count)})" for name, count in report["data"].items())
    yield f"{report['path']}  ONNX opset {report['opset']}, {size(report['bytes'])}"
    if data:
        yield f"  data      {data}"
    yield from _ports(report["inputs"], "in")
    yield from _ports(report["outputs"], "out")
    yield f"  weights   {size(report['weight_bytes'])}"
    most = list(report["operators"].items())[:8]
    yield f"  nodes     {report['nodes']}: " + ", ".join(f"{count} {name}" for name, count in most)
    if report["foreign_operators"]:
        yield f"  PLUGINS   {', '.join(report['foreign_operators'])}"
    yield f"  types     {', '.join(report['dtypes'])}"
    yield from _audit(report["audit"])
    yield from _table("origin", {"producer": report["producer"]} | report["metadata"])


def _audit(audit: Report) -> Iterator[str]:
    """The precision audit: what is computed in which format, and what must not be."""
    yield f"  precision trunk {audit['trunk']}"
    for name in ("linears", "norms", "rotations", "casts", "islands"):
        counts = ", ".join(f"{count} {kind}" for kind, count in audit[name].items())
        yield f"            {name}: {counts or 'none'}"
    for core in audit["cores"]:
        yield (
            f"            attention cores: {core['count']}, scores {core['scores']}, "
            f"softmax {core['softmax']}, values {core['values']}"
        )
    for row in audit["violations"]:
        yield f"  VIOLATION {row['kind']}: {row['node']}: {row['detail']}"


def _engine(report: Report) -> Iterator[str]:
    record = report.get("record")
    yield f"{report['path']}  engine, {size(report['bytes'])}"
    if "error" in report:
        yield f"  BROKEN    {report['error']}"
    facts = record or report
    if "flavour" in facts:
        yield f"  built by  {facts['flavour']} {facts['version']}"
        yield f"  targets   {', '.join(facts['targets'])}"
    if record is None:
        yield "  record    none: ports and profiles are known only to TensorRT"
        return
    yield f"  stage     {record['stage']}, {record['precision']}"
    yield from _ports(record["inputs"], "in")
    yield from _ports(record["outputs"], "out")
    for profile in record["profiles"]:
        span = profile["latent_len"]
        length = "fixed shapes" if span is None else "{}…{}, tuned for {}".format(*_order(span))
        scratch = profile["scratch_bytes"]
        yield f"  profile   {length}: scratch {'unknown' if scratch is None else size(scratch)}"
    yield from _table("source", record["source"])
    yield from _table("origin", record["metadata"])
    yield (
        f"  built     {record['built']} in {record['seconds']} s, "
        f"peak memory {size(record['peak_rss_bytes'])}"
    )
    yield f"  sha256    {record['engine_sha256']}"


def _ports(ports: Sequence[Report], label: str) -> Iterator[str]:
    for index, port in enumerate(ports):
        if index == 12 and len(ports) > 14:
            yield f"            … and {len(ports) - index} more"
            return
        shape = ", ".join(map(str, port["shape"]))
        yield f"  {'' if index else label:<8}  {port['name']} {port['dtype']} [{shape}]"


def _table(label: str, table: Report) -> Iterator[str]:
    for index, (name, value) in enumerate((k, v) for k, v in table.items() if v not in ("", [])):
        yield f"  {'' if index else label:<8}  {name}: {value}"


def _order(span: Sequence[int]) -> tuple[int, int, int]:
    low, opt, high = span
    return low, high, opt


_RENDER = {"directory": _directory, "broken": _broken, "onnx": _onnx, "engine": _engine}
