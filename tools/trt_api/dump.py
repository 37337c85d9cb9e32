"""Write down the part of a TensorRT Python API that this project may use, from the real bindings.

    python tools/trt_api/dump.py 10.15.1.29 11.4.0.106 rtx

For a TensorRT version the bindings wheel (1.2 MB) is downloaded without its libraries (gigabytes),
and imported over three stub libraries made with the C compiler. `rtx` reads the installed
TensorRT-RTX. The result goes to tests/data/trt_api/<version>.json: per class its properties and the
signatures of its methods, per enum its members, as tests/build/test_trt_api.py reads them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "tests" / "data" / "trt_api"
CLASSES = (
    "Builder",
    "BuilderFlag",
    "DataType",
    "EngineCapability",
    "EngineInspector",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "IBuilderConfig",
    "ICudaEngine",
    "IErrorRecorder",
    "IExecutionContext",
    "IGpuAllocator",
    "IHostMemory",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IOutputAllocator",
    "IProgressMonitor",
    "IRuntimeConfig",
    "ITensor",
    "LayerInformationFormat",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "OnnxParserFlag",
    "ParserError",
    "ProfilingVerbosity",
    "Runtime",
    "SerializationFlag",
    "TensorFormat",
    "TensorIOMode",
    "TensorLocation",
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "IRuntimeCache",
)
SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+)\((.*)\) -> (.+)$", re.MULTILINE)
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")


def signatures(doc: str, name: str) -> list[dict[str, Any]]:
    """The overloads in a pybind11 docstring, `self` left out."""
    found = []
    for called, inside, returns in SIGNATURE.findall(doc):
        if called != name:
            continue
        parameters = []
        for text in split(inside):
            label, _, rest = text.partition(":")
            kind, equals, default = rest.partition(" = ")
            if label.strip() == "self" or not label.strip():
                continue
            row = {"name": label.strip(), "type": short(kind)}
            if equals:
                row["default"] = default.strip()
            parameters.append(row)
        found.append({"parameters": parameters, "returns": short(returns)})
    return found


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, last = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append(text[last:index])
            last = index + 1
    return [*parts, text[last:]]


def short(name: str) -> str:
    """A type without the name of the binding's module."""
    return re.sub(r"\btensorrt(_rtx)?_bindings\.tensorrt(_rtx)?\.", "", name).strip()


def describe(kind: Any) -> dict[str, Any]:
    """Members of an enum, or properties and methods of a class."""
    if hasattr(kind, "__members__"):
        return {"members": sorted(kind.__members__)}
    properties, methods = [], {}
    for name in dir(kind):
        value = getattr(kind, name)
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property):
            properties.append(name)
        elif not isinstance(value, type) and (found := signatures(value.__doc__ or "", name)):
            methods[name] = found
    return {"properties": properties, "methods": methods}


def dump(trt: Any) -> dict[str, Any]:
    """The whole table of one API module."""
    return {
        "version": trt.__version__,
        "names": sorted(name for name in dir(trt) if not name.startswith("_")),
        "classes": {name: describe(getattr(trt, name)) for name in CLASSES if hasattr(trt, name)},
    }


def write(table: dict[str, Any]) -> None:
    """tests/data/trt_api/<version>.json."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{table['version']}.json"
    path.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    print(path.name, path.stat().st_size, "bytes")


def dump_wheel(version: str) -> None:
    """Fetch the bindings of one TensorRT version and dump them in a process with stub libraries."""
    major = version.split(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
            + [f"tensorrt_cu13_bindings=={version}"],
            check=True,
        )
        for name in LIBRARIES:
            library = f"{name}.so.{major}"
            subprocess.run(
                ["cc", "-shared", "-fPIC", HERE / "stub.c", f"-Wl,-soname,{library}"]
                + ["-o", Path(folder) / library],
                check=True,
            )
        subprocess.run(
            [sys.executable, __file__, "--here", "tensorrt_bindings"],
            env={**os.environ, "LD_LIBRARY_PATH": folder, "PYTHONPATH": folder},
            check=True,
        )


def main(words: list[str]) -> None:
    """Dump every version named."""
    if words[:1] == ["--here"]:
        write(dump(__import__(words[1])))
        return
    for word in words:
        if word == "rtx":
            sys.path[:0] = [str(HERE.parents[1] / name) for name in ("models", "build")]
            from sa3_build.flavours import FLAVOURS

            write(dump(FLAVOURS["tensorrt-rtx"].load()))
        else:
            dump_wheel(word)


if __name__ == "__main__":
    main(sys.argv[1:])
