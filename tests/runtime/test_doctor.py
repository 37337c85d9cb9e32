"""`sa3 doctor`: every machine gets an answer, with the repair and without secrets."""

from __future__ import annotations

import json
import re

import pytest

from sa3_models import packages as packages_module
from sa3_runtime.cli import checks, checks_gpu, machine
from sa3_runtime.cli import doctor as doctor_module
from sa3_runtime.cli.app import main
from sa3_runtime.cli.doctor import examine
from sa3_runtime.cli.machine import Gpu, Gpus, find_gpus

SECRETS = ("hf_0123456789secret", "pass1234", "someone")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No GPU, an empty home, no network."""
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SA3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(doctor_module, "find_gpus", lambda: Gpus(trouble="no nvidia-smi"))


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that these cards are here, and that these packages are."""

    def pretend(*cards: Gpu, driver: str = "580.65.06", packages: dict[str, str] | None = None):
        found = Gpus(cards, driver, visible=tuple(card.architecture for card in cards))
        monkeypatch.setattr(doctor_module, "find_gpus", lambda: found)
        real = checks.installed
        table = packages or {}

        def installed(name: str) -> str | None:
            # the builder's TensorRT of a developer's environment is not part of the pretence
            return table.get(name) or (None if "tensorrt" in name else real(name))

        for module in (checks, checks_gpu, packages_module):
            monkeypatch.setattr(module, "installed", installed)

    return pretend


def told(name: str | None = None, **options):
    """The checks of that name as (status, said, repair)."""
    found = examine(**({"offline": True} | options))
    return [(c.status, c.said, c.repair) for c in found if name in (None, c.name)]


def test_a_machine_without_gpu_is_fine(capsys):
    assert main(["doctor", "--offline"]) == 0
    out = capsys.readouterr().out
    assert "everything runs on the CPU (no nvidia-smi)" in out
    assert "FAIL" not in out


def test_without_any_model_the_first_pull_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(checks_gpu.inventory, "holdings", tuple)
    (answer,) = told("models")
    assert answer == ("WARN", f"none in {tmp_path / 'home'}", "sa3 pull small-music")


def test_the_report_is_one_object_with_every_check(capsys):
    assert main(["doctor", "--offline", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    for name in ("system", "python", "packages", "disk", "caches", "gpu", "onnxruntime", "demo"):
        assert name in names
    assert {check["status"] for check in report["checks"]} <= {"OK", "WARN", "FAIL"}
    assert all(check["repair"] for check in report["checks"] if check["status"] != "OK")


def test_no_secret_reaches_the_report(monkeypatch, capsys):
    token, password, user = SECRETS
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("SA3_API_KEY", password)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{user}:{password}@127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", f"https://{user}:{password}@127.0.0.1:9/?key={token}")
    main(["doctor", "--json"])
    main(["doctor", "--verbose"])
    out, err = capsys.readouterr()
    assert "HF_TOKEN=(hidden)" in out
    assert "HTTPS_PROXY=http://127.0.0.1:9" in out
    assert not [secret for secret in SECRETS if secret in out + err]


def test_a_hub_that_does_not_answer_is_a_warning(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    [(status, said, repair)] = told("network", offline=False)
    assert status == "WARN"
    assert "what is here still works" in said
    assert "HTTPS_PROXY" in repair


@pytest.mark.parametrize(
    ("driver", "status", "said"),
    [
        ("470.256.02", "WARN", "580 is needed: everything runs on the CPU"),
        ("550.54.15", "WARN", "580 is needed: everything runs on the CPU"),
        ("580.65.06", "OK", "580.65.06"),
    ],
)
def test_a_driver_is_held_against_what_is_needed(driver, status, said, gpus, capsys):
    """CASES 17."""
    gpus(Gpu("RTX 3090", "sm_86", 24 << 30, 20 << 30), driver=driver)
    [(found, text, repair)] = told("driver")
    assert found == status
    assert said in text
    assert bool(repair) == (status != "OK")
    failed = {check[1] for check in told() if check[0] == "FAIL"}
    assert failed <= {"the driver's libcuda.so.1 is not found"}
    assert main(["doctor", "--offline"]) == len(failed)
    capsys.readouterr()


@pytest.mark.parametrize(("driver", "visible"), [("550.54.15", ("sm_86",)), ("580.1", ())])
def test_a_card_that_may_not_be_used_needs_no_packages(driver, visible, monkeypatch):
    """Hidden, or its driver is too old: what is missing for it is no warning."""
    monkeypatch.setattr(checks_gpu, "CDLL", lambda _: None)
    here = Gpus((Gpu("RTX 3090", "sm_86", 1, 1),), driver, visible=visible)
    monkeypatch.setattr(doctor_module, "find_gpus", lambda: here)
    for name in ("cuda", "tensorrt", "onnxruntime"):
        assert not [entry for entry in told(name) if entry[0] != "OK"]
    assert not [said for _, said, _ in told("demo") if "no engines" in said]


def test_a_card_says_its_memory_and_partition(gpus):
    gpus(Gpu("NVIDIA H200", "sm_90", 141_000_000_000, 100_000_000_000, mig=True))
    [(_, said, _)] = told("gpu 0")
    assert said == "NVIDIA H200, sm_90, 100 GB of 141 GB free, MIG is on"


def test_hidden_cards_are_told(monkeypatch):
    """CASES 29."""
    for chosen, visible, wanted in (("", (), 1), ("7", (), 1), ("1", ("sm_120",), 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        card = Gpu("GPU", "sm_86", 1, 1)
        here = Gpus((card, Gpu("GPU", "sm_120", 1, 1)), "580.1", visible=visible)
        monkeypatch.setattr(doctor_module, "find_gpus", lambda here=here: here)
        hidden = [said for _, said, _ in told("gpu")]
        assert hidden == [f"CUDA_VISIBLE_DEVICES='{chosen}' hides every GPU"] * wanted


def test_another_tensorrt_than_the_published_engines_need_is_told(gpus):
    gpus(Gpu("H200", "sm_90", 1, 1), packages={"tensorrt-cu13": "11.4.0.106"})
    [(_, said, _)] = told("tensorrt")
    assert "published engines are for 10.15.1.29 and do not load in it" in said
    gpus(Gpu("H200", "sm_90", 1, 1), packages={"tensorrt-cu13": "10.15.1.29"})
    [(_, said, _)] = told("tensorrt")
    assert said == "tensorrt 10.15.1.29"


def test_engines_are_matched_to_the_card(gpus, tmp_path):
    """CASES 02: another version is seen before anything is loaded, and what repairs it."""
    from sa3_models.sidecar import Sidecar, write_sidecar

    engine = tmp_path / "home" / "sm_90" / "sa3-sm-music" / "dit_fp16.trt"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(b"\0ftrt" * 80)
    write_sidecar(
        engine,
        Sidecar(
            stage="dit", precision="fp16", flavour="tensorrt", version="10.14.1.48",
            compute_capability="sm_90", targets=("sm_90",), profiles=(), inputs=(), outputs=(),
            source={}, metadata={}, engine_sha256="0", engine_bytes=400, key="k", built="now",
            seconds=1.0, peak_rss_bytes=1,
        ),
    )  # fmt: skip
    gpus(Gpu("H200", "sm_90", 1, 1), packages={"tensorrt-cu13": "10.15.1.29"})
    warnings = [entry for entry in told("small-music") if entry[0] == "WARN"]
    assert any("dit_fp16.trt" in said and "10.14.1.48" in said for _, said, _ in warnings)
    assert all(repair.startswith("sa3 ") for _, _, repair in warnings)


def test_damaged_files_are_told_with_what_repairs_them(monkeypatch, tmp_path):
    """As the runtime sees them: a name alone is no export."""
    assert [status for status, _, _ in told("demo")] == ["OK"]
    export = tmp_path / "home" / "onnx" / "demo" / "demo" / "dit_step_fp32.onnx"
    export.parent.mkdir(parents=True)
    export.write_bytes(b"x" * 1000)
    bad = checks_gpu.checking.Problem(tmp_path / "model.safetensors", "it is cut short")
    glance = checks_gpu.checking.glance
    monkeypatch.setattr(checks_gpu.checking, "glance", lambda model: (bad, *glance(model)))
    (_, summary, _), weights, graph = told("demo")
    assert "checkpoint damaged, 1 exports" in summary
    assert weights[:2] == ("FAIL", "it is cut short")
    assert "git checkout" in weights[2]
    assert (graph[0], graph[2]) == ("WARN", "sa3 export demo --force")
    assert "dit_step_fp32.onnx is not an ONNX model" in graph[1]


def test_a_card_without_engines_is_told_the_build(gpus, tmp_path):
    graph = tmp_path / "home" / "onnx" / "small-music" / "same-s" / "dec_fp16.onnx"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"x")
    gpus(Gpu("RTX 4090", "sm_89", 1, 1), packages={"tensorrt-rtx-cu13-bindings": "1.7.1.116"})
    assert (
        "WARN",
        "no engines for sm_89: it runs through ONNX Runtime",
        "sa3 build small-music",
    ) in (told("small-music"))


def test_a_login_that_cannot_be_read_is_a_warning(monkeypatch):
    def unreadable():
        raise NotADirectoryError(20, "Not a directory", "/dev/null/token")

    # the library reads HF_HUB_OFFLINE when it is imported, which another test may have done
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    monkeypatch.setattr("huggingface_hub.get_token", unreadable)
    found = {check.name: check for check in checks.network()}
    assert found["token"].status == "WARN"
    assert "/dev/null/token: Not a directory" in found["token"].said
    assert found["network"].status == "OK"


def test_a_check_that_breaks_does_not_end_the_report(monkeypatch):
    def broken(_):
        raise OSError("odd machine")

    monkeypatch.setitem(doctor_module._CHECKS, "disk", broken)
    seen = told()
    assert any("could not be looked at: OSError odd machine" in said for _, said, _ in seen)
    assert len(seen) > 6


def test_a_home_that_cannot_be_written_fails(monkeypatch):
    monkeypatch.setattr(checks.os, "access", lambda *_: False)
    [(status, said, repair)] = told("disk")
    assert (status, "not writable" in said, "SA3_HOME" in repair) == ("FAIL", True, True)


# ------------------------------------------------------------------------------------ the cards


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """A stub nvidia-smi that prints this and ends with that."""
    monkeypatch.setattr(machine, "installed", lambda _: None)

    def install(text: str, code: int = 0) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        (tool.parent / "text").write_text(text)
        tool.write_text(f"#!/bin/sh\n/bin/cat {tool.parent}/text\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent))

    return install


def test_cards_are_read_from_nvidia_smi(smi):
    smi(
        "NVIDIA H200, 9.0, 143771, 143000, 580.65.06, Enabled\n"
        "GPU, [N/A], [N/A], [N/A], 580.65.06, [N/A]\n"
    )
    found = find_gpus()
    assert found.driver == "580.65.06"
    assert found.visible == ()  # nvidia-smi lists cards that no program may use: the driver knows
    assert found.cards[0] == Gpu("NVIDIA H200", "sm_90", 143771 << 20, 143000 << 20, mig=True)
    assert found.cards[1] == Gpu("GPU", "", 0, 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [("No devices were found\n", 6), ("couldn't communicate with the driver", 9), ("", 0)],
)
def test_a_driver_in_trouble_is_quoted(smi, text, code):
    """CASES 17."""
    smi(text, code)
    found = find_gpus()
    assert found.cards == ()
    assert (text.strip() or "it says nothing") in found.trouble


def test_no_driver_at_all_is_no_trouble(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda _: None)
    monkeypatch.setenv("PATH", "")
    assert re.match("no nvidia-smi", find_gpus().trouble)
