"""What would stop a build is found before its first minute, in one sentence."""

from __future__ import annotations

import pytest

import sa3_build.flavours as flavours_module
import sa3_build.preflight as preflight_module
from sa3_build.architectures import ARCHITECTURES, parse_architectures
from sa3_build.flavours import FLAVOURS
from sa3_build.preflight import check_formats, check_orders, check_targets
from sa3_models import packages
from sa3_models.errors import BuildFailed, UsageError

TENSORRT, RTX = FLAVOURS["tensorrt"], FLAVOURS["tensorrt-rtx"]


@pytest.fixture
def machine(monkeypatch):
    """Pretend: which packages are installed, whether they load, which GPUs are here."""

    def pretend(versions=(), gpus=(), loads=True):
        table = dict(versions)
        monkeypatch.setattr(packages, "installed", table.get)
        monkeypatch.setattr(flavours_module, "local_architectures", lambda: gpus)

        def load(name):
            if not loads:
                raise ImportError("libnvinfer.so.10: cannot open shared object file")
            return object()

        monkeypatch.setattr(packages.importlib, "import_module", load)

    return pretend


def test_without_tensorrt_and_gpu_one_sentence_names_both_and_how_to_get_them(machine):
    machine()
    with pytest.raises(BuildFailed) as caught:
        check_targets(TENSORRT, parse_architectures(["sm_86"]))
    assert "its package (pip install" in caught.value.what
    assert "and an NVIDIA GPU" in caught.value.what
    assert "tensorrt-cu13.txt" in caught.value.what
    assert "tensorrt-rtx builds without a GPU" in caught.value.hint


def test_bindings_without_libraries_are_told_apart(machine):
    machine({"tensorrt_cu13_bindings": "10.15.1.29"}, gpus=("sm_86",), loads=False)
    with pytest.raises(BuildFailed) as caught:
        check_targets(TENSORRT, parse_architectures(["sm_86"]))
    assert "its libraries (libnvinfer.so.10" in caught.value.what
    assert "NVIDIA GPU" not in caught.value.what


def test_tensorrt_builds_only_for_a_gpu_of_this_machine(machine):
    machine({"tensorrt": "10.15.1.29"}, gpus=("sm_86",))
    check_targets(TENSORRT, parse_architectures(["sm_86"]))
    with pytest.raises(BuildFailed, match=r"\(sm_86\), not for sm_89"):
        check_targets(TENSORRT, parse_architectures(["sm_86,sm_89"]))


@pytest.mark.parametrize(
    "missing", ["tensorrt_rtx_cu13_bindings", "onnxruntime-ep-nv-tensorrt-rtx-cu13"]
)
def test_rtx_names_the_wheel_that_is_missing(machine, missing):
    both = {
        "tensorrt_rtx_cu13_bindings": "1.7.1.116",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13": "0.5.0",
    }
    machine({name: number for name, number in both.items() if name != missing})
    with pytest.raises(BuildFailed) as caught:
        check_targets(RTX, parse_architectures(["sm_86"]))
    assert f"{missing} is not installed" in caught.value.what
    assert "./install.sh --arch sm_86" in caught.value.hint
    assert "requirements/tensorrt-rtx.txt" in caught.value.hint
    machine(both)
    check_targets(RTX, parse_architectures(["sm_75,sm_80,sm_86,sm_89,sm_120,sm_121"]))


@pytest.mark.parametrize(
    "name", [name for name, row in ARCHITECTURES.items() if "tensorrt-rtx" not in row.flavours]
)
def test_rtx_has_no_data_centre_targets_and_says_which_flavour_has(machine, name):
    machine()
    with pytest.raises(UsageError) as caught:
        check_targets(RTX, parse_architectures([name]))
    assert name in caught.value.what
    assert "--flavour tensorrt does" in caught.value.hint


@pytest.mark.parametrize(
    ("dtype", "targets", "lacking"),
    [
        ("bfloat16", "sm_75,sm_86", "sm_75"),
        ("bfloat16", "sm_80,sm_120", None),
        ("float8e4m3fn", "sm_75,sm_86,sm_89", "sm_75, sm_86"),
        ("float8e4m3fn", "sm_89,sm_120", None),
        ("float16", "sm_75", None),
    ],
)
def test_a_format_that_a_target_lacks_is_refused(dtype, targets, lacking):
    rows = parse_architectures([targets])
    if lacking is None:
        check_formats("x", {"float32", dtype}, rows)
        return
    with pytest.raises(UsageError, match=f"which {lacking} does not have"):
        check_formats("x", {"float32", dtype}, rows)


def test_the_graph_itself_is_asked_for_its_formats(order, write_graph, tmp_path):
    graph = write_graph(tmp_path / "b.onnx", dtype="bfloat16")
    with pytest.raises(UsageError, match="sm_75"):
        check_orders([order(source=graph, precision="fp16", targets=("sm_75",))])


def test_a_plugin_operator_stops_the_build_before_it_starts(order, write_graph, tmp_path):
    """CASES 07."""
    graph = write_graph(tmp_path / "p.onnx", domain="samel")
    with pytest.raises(BuildFailed, match="samel::MatMul"):
        check_orders([order(source=graph)])


def test_an_operator_that_the_parser_lacks_is_named(order, fake_trt, tmp_path):
    flavour = fake_trt.FakeFlavour(tmp_path / "log", operators=("MatMul",))
    with pytest.raises(BuildFailed, match="MatMul"):
        check_orders([order(flavour=flavour)])


def test_too_little_disk_is_told_with_both_sizes(order, monkeypatch):
    monkeypatch.setattr(
        preflight_module.shutil,
        "disk_usage",
        lambda path: type("Usage", (), {"free": 1_000_000})(),
    )
    with pytest.raises(BuildFailed, match=r"0\.0 GB of disk: 0\.0 GB are free"):
        check_orders([order()])


def test_a_folder_that_cannot_be_written_is_told(order, monkeypatch):
    monkeypatch.setattr(preflight_module.os, "access", lambda path, mode: False)
    with pytest.raises(BuildFailed, match="nothing can be written"):
        check_orders([order()])


def test_too_little_memory_counts_the_jobs_that_run_at_once(order, monkeypatch):
    wanted = order()
    one = wanted.estimate()[1]
    monkeypatch.setattr(preflight_module, "available_memory", lambda: round(1.5 * one))
    check_orders([wanted, wanted], jobs=1)
    with pytest.raises(BuildFailed, match="--jobs 1 instead of 2"):
        check_orders([wanted, wanted], jobs=2)


def test_a_good_order_passes(order):
    check_orders([order()])
    check_orders([])
