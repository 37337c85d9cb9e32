"""Our calls against the real APIs of TensorRT 10.15, 11.4 and RTX 1.7.

tests/data/trt_api/*.json were read off the real bindings (tools/trt_api/dump.py). The code is
walked: every attribute of an object whose class the tables below name must exist there, and every
call must fit one of the signatures.
"""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = {
    name: json.loads((ROOT / f"tests/data/trt_api/{version}.json").read_text())
    for name, version in (
        ("10.15", "10.15.1.29"),
        ("11.4", "11.4.0.106"),
        ("rtx-1.7", "1.7.1.116"),
    )
}
BUILDER_OBJECTS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "parser.get_error()": "ParserError",
}


@dataclass(frozen=True)
class Use:
    """One place where our code touches the API. call: (positional arguments, keywords) or None."""

    kind: str  # class name, "" for the module
    member: str
    line: int
    call: tuple[int, tuple[str, ...]] | None = None

    def __str__(self) -> str:
        return f"{self.kind or 'trt'}.{self.member} (line {self.line})"


def uses(path: Path, objects: dict[str, str], module: str = "trt") -> list[Use]:
    """All API uses in a file. objects: variable name, or `self._name`, → class name."""
    tree = ast.parse(path.read_text())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = _name(node.value)
        call = calls.get(id(node))
        own = node.attr == "__init__"  # called through the class: the first argument is self
        shape = (
            (len(call.args) - own, tuple(k.arg or "**" for k in call.keywords)) if call else None
        )
        if owner == module:
            found.append(Use("", node.attr, node.lineno, shape))
        elif owner.startswith(f"{module}."):
            found.append(Use(owner.removeprefix(f"{module}."), node.attr, node.lineno, shape))
        elif owner in objects:
            found.append(Use(objects[owner], node.attr, node.lineno, shape))
    return found


def _name(node: ast.expr) -> str:
    """`trt.BuilderFlag`, `self._engine`, `parser.get_error()`: dotted, arguments left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_name(node.func)}()"
    return ""


def problem(api: dict[str, Any], use: Use) -> str | None:
    """Why a use does not fit an API, or None."""
    if not use.kind:
        if use.member not in api["names"]:
            return f"{use}: no such name"
        described = api["classes"].get(use.member, {})
        signatures = described.get("methods", {}).get("__init__", [])
    else:
        described = api["classes"].get(use.kind)
        if described is None:
            return f"{use}: no such class"
        signatures = described.get("methods", {}).get(use.member, [])
        known = {*described.get("members", ()), *described.get("properties", ()), "__init__"}
        if use.member not in known and not signatures:
            return f"{use}: no such member"
    if use.call and signatures and not any(_fits(row, use.call) for row in signatures):
        return f"{use}: called with {use.call}, wants {signatures}"
    return None


def _fits(signature: dict[str, Any], call: tuple[int, tuple[str, ...]]) -> bool:
    positional, keywords = call
    names = [row["name"] for row in signature["parameters"]]
    required = {row["name"] for row in signature["parameters"] if "default" not in row}
    given = {*names[:positional], *keywords}
    return positional <= len(names) and required <= given <= set(names)


@pytest.mark.parametrize("version", API)
def test_every_call_of_the_builder_exists_with_its_signature(version):
    found = uses(ROOT / "build/sa3_build/engine.py", BUILDER_OBJECTS)
    assert {
        ("", "Builder"),
        ("", "OnnxParser"),
        ("Builder", "create_network"),
        ("Builder", "build_serialized_network"),
        ("OnnxParser", "parse_from_file"),
        ("ParserError", "desc"),
        ("IBuilderConfig", "add_optimization_profile"),
        ("IOptimizationProfile", "set_shape"),
    } <= {(use.kind, use.member) for use in found}
    assert [why for use in found if (why := problem(API[version], use))] == []


def test_targets_are_set_through_the_api_of_rtx():
    found = uses(ROOT / "build/sa3_build/flavours.py", {"config": "IBuilderConfig"})
    assert {"num_compute_capabilities", "set_compute_capability"} <= {row.member for row in found}
    assert [why for use in found if (why := problem(API["rtx-1.7"], use))] == []
    assert [why for use in found if (why := problem(API["10.15"], use))], "must differ there"


def test_every_architecture_of_rtx_is_named_by_its_api():
    from sa3_build.architectures import ARCHITECTURES

    named = set(API["rtx-1.7"]["classes"]["ComputeCapability"]["members"]) - {"NONE", "CURRENT"}
    ours = {f"SM{row.number}" for row in ARCHITECTURES.values() if "tensorrt-rtx" in row.flavours}
    assert ours == named


RUNTIME_OBJECTS = {
    "self._runtime": "Runtime",
    "engine": "ICudaEngine",
    "self._engine": "ICudaEngine",
    "context": "IExecutionContext",
    "self._context": "IExecutionContext",
    "config": "IRuntimeConfig",
    "self._runtime_cache": "IRuntimeCache",
}
# used behind `if flavour is RTX`: compiled kernels of a length are made ahead and kept
RTX_ONLY = {
    "DynamicShapesKernelSpecializationStrategy",
    "create_runtime_cache",
    "deserialize",
    "dynamic_shapes_kernel_specialization_strategy",
    "serialize",
    "set_runtime_cache",
}


@pytest.mark.parametrize("version", API)
def test_every_call_of_the_runtime_exists_with_its_signature(version):
    paths = sorted((ROOT / "runtime/sa3_runtime/stages").glob("tensorrt*.py"))
    found = [use for path in paths for use in uses(path, RUNTIME_OBJECTS)]
    found += [use for path in paths for use in uses(path, {}, module="self._trt")]
    assert {
        "Runtime",
        "create_execution_context",
        "deserialize_cuda_engine",
        "execute_async_v3",
        "get_device_memory_size_for_profile_v2",
        "set_device_memory",
        "set_input_shape",
        "set_optimization_profile_async",
        "set_tensor_address",
        "ExecutionContextAllocationStrategy",
    } <= {use.member for use in found}
    shared = [use for use in found if version == "rtx-1.7" or use.member not in RTX_ONLY]
    assert [why for use in shared if (why := problem(API[version], use))] == []


@pytest.mark.parametrize(
    ("use", "fits"),
    [
        (Use("IBuilderConfig", "no_such_thing", 1), False),
        (Use("IOptimizationProfile", "set_shape", 1, (4, ())), True),
        (Use("IOptimizationProfile", "set_shape", 1, (3, ())), False),
        (Use("IOptimizationProfile", "set_shape", 1, (3, ("max",))), True),
        (Use("IOptimizationProfile", "set_shape", 1, (3, ("most",))), False),
        (Use("BuilderFlag", "TF32", 1), True),
        (Use("BuilderFlag", "FP64", 1), False),
        (Use("NoClass", "x", 1), False),
        (Use("", "OnnxParser", 1, (2, ())), True),
        (Use("", "OnnxParser", 1, (1, ())), False),
    ],
)
def test_the_comparison_itself_can_fail(use, fits):
    assert (problem(API["11.4"], use) is None) is fits


@pytest.mark.rtx
def test_the_table_of_rtx_is_that_of_the_installed_bindings(rtx):
    """Live: the JSON that the tests above use says what the real bindings say."""
    import sys

    sys.path.insert(0, str(ROOT / "tools" / "trt_api"))
    try:
        import dump
    finally:
        sys.path.pop(0)
    assert dump.dump(rtx.load()) == API["rtx-1.7"]


def test_ci_has_the_rtx_wheels():
    """In CI the tests that build real engines must run, not skip."""
    from sa3_build.flavours import FLAVOURS

    if not os.environ.get("CI"):
        pytest.skip("only CI insists on requirements/tensorrt-rtx.txt")
    assert FLAVOURS["tensorrt-rtx"].missing(()) is None
