"""`sa3 doctor`: what works on this machine, what does not, and the repair of each.

Knows: what is installed and how to ask it. Doesn't know: how anything is repaired by itself; it
changes nothing. Every check survives a machine where nothing is installed, and no secret is shown:
tokens never, addresses without user and query.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import click

from sa3_models import __version__, catalogue, inventory
from sa3_models.errors import Sa3Error
from sa3_models.paths import cache_dir, project_root, sa3_home
from sa3_models.sidecar import Machine, check_engine
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.cli.machine import Gpus, find_gpus, installed
from sa3_runtime.view import View, size

__all__ = ["Check", "doctor", "examine"]

Status = Literal["OK", "WARN", "FAIL"]
_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
_DRIVER_OLDEST, _DRIVER_BEST = 525, 580
_DISK_WARN, _DISK_FAIL = 5e9, 5e8  # bytes
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
_CUDA = (
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)
_FLAVOURS = {  # package whose version is that of the library: flavour
    "tensorrt-cu13": "tensorrt",
    "tensorrt-cu12": "tensorrt",
    "tensorrt": "tensorrt",
    "tensorrt-rtx-cu13-bindings": "tensorrt-rtx",
    "tensorrt-rtx": "tensorrt-rtx",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, what was seen, what repairs it."""

    name: str
    status: Status
    said: str
    repair: str = ""


@click.command(cls=Command, examples=("sa3 doctor", "sa3 doctor --json > report.json"))
@option("--offline", is_flag=True, section="How", help="Leave the network out.")
@talkative
def doctor(offline: bool, view: View) -> int:
    """Look at this machine: each line is OK, WARN or FAIL, with its repair.

    Made to be put into a bug report: it shows no token, no password and no user of an address.
    """
    checks = []
    for check in examine(offline=offline):
        checks.append(check)
        if not view.json:
            _show(check, view)
    failed = sum(check.status == "FAIL" for check in checks)
    if view.json:
        view.object({"sa3": __version__, "checks": [asdict(check) for check in checks]})
    else:
        warned = sum(check.status == "WARN" for check in checks)
        view.note(f"{len(checks)} checks, {warned} warnings, {failed} failures")
    return 1 if failed else 0


def _show(check: Check, view: View) -> None:
    status = view.paint(f"{check.status:<4}", _COLOURS[check.status], sys.stdout)
    view.out(f"{status}  {check.name:<12} {check.said}")
    if check.repair:
        view.out(f"{'':<6}{'':<12} → {check.repair}")


def examine(*, offline: bool = False) -> Iterator[Check]:
    """All checks, in order; one that breaks becomes a warning of its own."""
    gpus = find_gpus()
    for name, look in _CHECKS.items():
        try:
            yield from look(gpus)
        except Exception as error:  # a diagnosis must not end at the first oddity
            yield Check(name, "WARN", f"could not be looked at: {type(error).__name__} {error}")
    if not offline:
        yield from _network()
    yield from _environment()


# --------------------------------------------------------------------------------- the machine


def _system(_: Gpus) -> Iterator[Check]:
    notes = [platform.platform(terse=True), platform.machine()]
    if "microsoft" in platform.release().lower():
        notes.append("WSL")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        notes.append("container")
    notes.append(f"{_cores():g} of {os.cpu_count()} cores")
    total, free = _memory()
    if total:
        notes.append(f"{size(free)} of {size(total)} memory free")
    yield Check("system", "OK", ", ".join(notes))


def _cores() -> float:
    """Cores this process may use: affinity, and the quota of its control group."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, int(limit) / int(period))
    return cores


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and available, from the kernel and the control group; 0 if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0, 0
    facts = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    total, free = int(facts["MemTotal"]) * 1024, int(facts.get("MemAvailable", 0)) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (bound := limit.read_text().strip()).isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, int(bound)), min(free, int(bound) - used)
    return total, free


def _python(_: Gpus) -> Iterator[Check]:
    said = f"{platform.python_version()} in {sys.prefix}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Check("python", "OK", said)
    else:
        repair = "rm -rf .venv && ./install.sh with Python 3.11, 3.12 or 3.13 installed"
        yield Check("python", "WARN", f"{said}: tested with 3.11 to 3.13", repair)


def _packages(_: Gpus) -> Iterator[Check]:
    root = project_root()
    if root is None:
        yield Check("packages", "OK", f"sa3 {__version__}, installed as a package")
        return
    lines = (root / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    if installed("onnxruntime-gpu"):
        pins.pop("onnxruntime", None)
    wrong = {name: found for name, version in pins.items() if (found := installed(name)) != version}
    if not wrong:
        yield Check("packages", "OK", f"sa3 {__version__}, {len(pins)} pinned packages")
        return
    absent = [name for name, found in wrong.items() if found is None]
    other = [f"{name} {found} instead of {pins[name]}" for name, found in wrong.items() if found]
    said = "; ".join([*([f"missing: {', '.join(absent)}"] if absent else []), *other])
    yield Check("packages", "FAIL" if absent else "WARN", said, "./install.sh")


def _disk(_: Gpus) -> Iterator[Check]:
    home = sa3_home()
    place = home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    said = f"{size(free)} free in {home}"
    status: Status = "FAIL" if free < _DISK_FAIL else "WARN" if free < _DISK_WARN else "OK"
    repair = "" if status == "OK" else "make room, e.g. sa3 rm MODEL, or set SA3_HOME"
    if not os.access(place, os.W_OK):
        status, repair = "FAIL", "set SA3_HOME to a folder of yours"
        said += ", not writable"
    yield Check("disk", status, said, repair)


def _caches(_: Gpus) -> Iterator[Check]:
    ours = cache_dir()
    used = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    hub = Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub")
    repos = len([*hub.glob("models--*")]) if hub.is_dir() else 0
    yield Check("caches", "OK", f"{size(used)} in {ours}; the hub's, {repos} models, in {hub}")


def _hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()


# ------------------------------------------------------------------------------------- the GPU


def _driver(gpus: Gpus) -> Iterator[Check]:
    if not gpus.cards:
        yield Check("gpu", "OK", f"none: everything runs on the CPU ({gpus.trouble})")
        return
    major = int(gpus.driver.split(".")[0]) if gpus.driver[:1].isdigit() else 0
    side = " on the Windows side" if "microsoft" in platform.release().lower() else ""
    update = f"update the driver{side}: https://www.nvidia.com/drivers"
    if major < _DRIVER_OLDEST:
        said = f"{gpus.driver} is too old, {_DRIVER_OLDEST} is needed"
        yield Check("driver", "FAIL", said, update)
    elif major < _DRIVER_BEST:
        yield Check("driver", "WARN", f"{gpus.driver}: CUDA 12 only", f"for CUDA 13, {update}")
    else:
        yield Check("driver", "OK", gpus.driver)
    for index, card in enumerate(gpus.cards):
        said = f"{card.name}, {card.architecture or 'capability unknown'}"
        if card.total:
            said += f", {size(card.free)} of {size(card.total)} free"
        said += ", MIG is on" if card.mig else ""
        yield Check(f"gpu {index}", "OK", said)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        yield Check("gpu", "WARN", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it")


def _cuda(gpus: Gpus) -> Iterator[Check]:
    here = [f"{name} {found}" for name in _CUDA if (found := installed(name))]
    if not gpus.cards:
        if here:
            yield Check("cuda", "OK", f"{', '.join(here)}; no GPU to use them")
        return
    try:
        CDLL("libcuda.so.1")
    except OSError:
        said = "the driver's libcuda.so.1 is not found"
        yield Check("cuda", "FAIL", said, "in a container, start it with --gpus all")
    needed = ("cuda-bindings", "cuda-core")
    if all(installed(name) for name in needed) and any("nvrtc" in entry for entry in here):
        yield Check("cuda", "OK", ", ".join(here))
    else:
        said = f"packages of the GPU are missing (here: {', '.join(here) or 'none'})"
        yield Check("cuda", "WARN", said, "./install.sh")


def _tensorrt(gpus: Gpus) -> Iterator[Check]:
    found = _tensorrt_here()
    for flavour, version in found.items():
        said = f"{flavour} {version}"
        built_for = catalogue.catalogue().tensorrt
        if flavour == "tensorrt" and _minor(version) != _minor(built_for):
            said += f"; published engines are for {built_for} and do not load in it"
        yield Check("tensorrt", "OK", said)
    if not found and gpus.cards:
        yield Check(
            "tensorrt", "WARN", "none: models run through ONNX Runtime, more slowly", "./install.sh"
        )


def _tensorrt_here() -> dict[str, str]:
    found: dict[str, str] = {}
    for package, flavour in _FLAVOURS.items():
        if (version := installed(package)) and flavour not in found:
            found[flavour] = version
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _onnxruntime(gpus: Gpus) -> Iterator[Check]:
    names = ("onnxruntime", "onnxruntime-gpu")
    packages = [dist.name for dist in distributions() if dist.name in names]
    if not packages:
        yield Check("onnxruntime", "FAIL", "not installed", "./install.sh")
        return
    if len(packages) > 1:
        said = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other"
        yield Check("onnxruntime", "WARN", said, "rm -rf .venv && ./install.sh")
    import onnxruntime

    providers = [name.removesuffix("ExecutionProvider") for name in _providers(onnxruntime)]
    said = f"{onnxruntime.__version__}: {', '.join(providers)}"
    if gpus.cards and "CUDA" not in providers:
        yield Check(
            "onnxruntime", "WARN", f"{said}; no CUDA, though there is a GPU", "./install.sh"
        )
    else:
        yield Check("onnxruntime", "OK", said)


def _providers(runtime: object) -> list[str]:
    ask: Callable[[], list[str]] = runtime.get_available_providers  # type: ignore[attr-defined]
    return ask()


# ------------------------------------------------------------------------------------ the models


def _models(gpus: Gpus) -> Iterator[Check]:
    found = [holding for holding in inventory.holdings() if not holding.empty]
    if not found:
        yield Check("models", "WARN", f"none in {sa3_home()}", "sa3 pull small-music")
    machines = [
        Machine(flavour, version, architecture)
        for architecture in gpus.architectures
        for flavour, version in _tensorrt_here().items()
    ]
    for holding in found:
        model = holding.model
        parts = [f"checkpoint {holding.checkpoint}", f"{len(holding.exports)} exports"]
        parts += [f"{len(files)} engines for {arch}" for arch, files in holding.engines.items()]
        partial = holding.checkpoint == "partial" and not holding.engines
        yield Check(
            model.name,
            "WARN" if partial else "OK",
            f"{', '.join(parts)}, {size(holding.bytes)}",
            f"sa3 pull {model.name}" if partial else "",
        )
        for arch in gpus.architectures:
            if machines and arch not in holding.engines:
                said = f"no engines for {arch}: it runs through ONNX Runtime"
                yield Check(model.name, "WARN", said, f"sa3 build {model.name}")
            for engine in holding.engines.get(arch, ()):
                if problem := _refusals(engine, machines):
                    yield Check(model.name, "WARN", problem, f"sa3 build {model.name}")


def _refusals(engine: Path, machines: list[Machine]) -> str | None:
    """Why no TensorRT here loads an engine; None if one does, or if there is none to ask."""
    last = None
    for machine in machines:
        try:
            check_engine(engine, machine)
        except Sa3Error as error:
            last = f"{engine.name}: {error.what}" + (f" ({error.found})" if error.found else "")
        else:
            return None
    return last


# ---------------------------------------------------------------------------- network, settings


def _network() -> Iterator[Check]:
    try:
        from huggingface_hub import constants, get_session, get_token
    except ImportError:
        yield Check("network", "FAIL", "huggingface-hub is not installed", "./install.sh")
        return
    token = get_token()
    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the stored login"
    hub = _without_user(constants.ENDPOINT)
    if constants.is_offline_mode():
        yield Check("network", "OK", "HF_HUB_OFFLINE is set: nothing is asked of the hub")
    else:
        try:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            address = f"{constants.ENDPOINT}/api/{'whoami-v2' if token else 'models?limit=1'}"
            answer = get_session().get(address, headers=headers, timeout=5)
        except Exception as error:
            said = f"{hub} cannot be reached ({type(error).__name__}); what is here still works"
            yield Check("network", "WARN", said, "check the connection and HTTPS_PROXY")
        else:
            if token and answer.status_code == 401:
                yield Check("network", "OK", f"{hub} answers")
                said = f"the hub does not accept the one from {source}"
                yield Check("token", "WARN", said, "hf auth login, or renew HF_TOKEN")
                return
            status: Status = "OK" if answer.status_code < 400 else "WARN"
            yield Check("network", status, f"{hub} answers with {answer.status_code}")
    if token:
        yield Check("token", "OK", f"there is one, from {source}")
    else:
        yield Check("token", "OK", "none; gated models need one: hf auth login")


def _environment() -> Iterator[Check]:
    prefixes = ("SA3_", "HF_", "CUDA_VISIBLE", "ORT_", "OMP_NUM")
    proxies = {"http_proxy", "https_proxy", "no_proxy", "all_proxy", "ssl_cert_file"}
    seen = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes) or name.lower() in proxies:
            shown = "(hidden)" if _SECRET.search(name) else _without_user(value)
            seen.append(f"{name}={shown}")
    yield Check("variables", "OK", ", ".join(seen) or "none of ours is set")


def _without_user(address: str) -> str:
    """An address without user, password and query."""
    return re.sub(r"(//)[^/@\s]*@", r"\1", address).split("?")[0]


_CHECKS: dict[str, Callable[[Gpus], Iterator[Check]]] = {
    "system": _system,
    "python": _python,
    "packages": _packages,
    "disk": _disk,
    "caches": _caches,
    "gpu": _driver,
    "cuda": _cuda,
    "tensorrt": _tensorrt,
    "onnxruntime": _onnxruntime,
    "models": _models,
}
