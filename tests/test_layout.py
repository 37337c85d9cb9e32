"""The layout: shelves shadow nothing, imports point one way, heavy packages stay out."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("models", "onnx", "build", "runtime")


def python(code: str) -> str:
    path = ":".join(str(ROOT / shelf) for shelf in SHELVES)
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    ).stdout


def test_shelves_shadow_nothing() -> None:
    import onnx

    for shelf in SHELVES:
        assert not (ROOT / shelf / "__init__.py").exists(), f"{shelf}/ must stay a plain folder"
    assert ROOT not in Path(onnx.__file__).parents or ".venv" in onnx.__file__
    assert version("onnx")


@pytest.mark.parametrize("folder", [ROOT, ROOT.parent])
def test_the_environment_knows_our_packages_and_takes_no_shelf_for_another(folder: Path) -> None:
    """What install.sh wrote into .venv, without PYTHONPATH, from the project folder and outside."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("these tests run in another environment than install.sh's")
    code = (
        "import sys, importlib.util, sa3_models, sa3_onnx, sa3_build, sa3_runtime, onnx\n"
        "print(sa3_runtime.__file__, onnx.__file__)\n"
        "build = importlib.util.find_spec('build')\n"
        "print(build is None or build.origin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    runtime, onnx_file, build = done.stdout.split()
    assert Path(runtime).parent == ROOT / "runtime" / "sa3_runtime"
    assert ".venv" in onnx_file
    assert build in ("True", "None") or ".venv" in build  # absent, or no package but a bare folder


def test_shelves_hold_nothing_but_their_package() -> None:
    for shelf in SHELVES:
        strangers = [p.name for p in (ROOT / shelf).glob("*.py")]
        assert not strangers, (
            f"{shelf}/ is an import path: {strangers} would become top-level names"
        )


@pytest.mark.parametrize("package", ["sa3_models", "sa3_runtime", "sa3_onnx", "sa3_build"])
def test_no_package_ever_imports_torch(package: str) -> None:
    code = (
        f"import pkgutil, importlib, sys, {package}\n"
        f"for m in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        "    if m.name.rsplit('.', 1)[-1] in ('__main__',): continue\n"
        "    try: importlib.import_module(m.name)\n"
        "    except ModuleNotFoundError as e:\n"
        "        assert e.name.split('.')[0] not in ('torch', 'transformers'), m.name\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')])"
    )
    assert python(code).strip() == ""


def test_the_runtime_imports_neither_exporters_nor_builders() -> None:
    code = (
        "import sys, sa3_runtime, sa3_runtime.request, sa3_runtime.session\n"
        "print(*{m.split('.')[0] for m in sys.modules} "
        "& {'onnx', 'onnx_graphsurgeon', 'sa3_onnx', 'sa3_build', 'polygraphy', 'tensorrt'})"
    )
    assert python(code).strip() == ""


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom sa3_runtime.__main__ import main\n"
        "sys.argv = ['sa3', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'tensorrt', 'cuda', 'huggingface_hub', 'torch'}\n"
        "print('LOADED', *heavy & set(sys.modules))"
    )
    assert python(code).rsplit("LOADED", 1)[1].strip() == ""


def test_files_stay_below_six_hundred_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines}"
        for shelf in (*SHELVES, "tests", "bench", "tools")
        for path in (ROOT / shelf).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 600
    ]
    assert not long


def test_the_architecture_page_lists_every_module_with_its_first_line() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for shelf in SHELVES:
        package = ROOT / shelf / f"sa3_{shelf}"
        for path in package.rglob("*.py"):
            if path.name.startswith("__") or "cli" in path.parts:
                continue
            name = ".".join(path.relative_to(package).with_suffix("").parts)
            first = path.read_text(encoding="utf-8").split("\n", 1)[0].strip('"').rstrip(".")
            assert f"| `.{name}` | {first} |" in page, f"{path.relative_to(ROOT)}"
