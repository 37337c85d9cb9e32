"""What `sa3 doctor` looks at apart from GPUs and models: system, packages, disk, network, settings.

Knows: where the system tells its facts. Doesn't know: how a report is shown. No secret is said:
tokens never, addresses without user and query.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sa3_models import __version__
from sa3_models.files import nearest_folder
from sa3_models.memory import available_memory, total_memory
from sa3_models.packages import installed
from sa3_models.paths import cache_dir, project_root, sa3_home
from sa3_runtime.cli.machine import Gpus
from sa3_runtime.stages.ort import allowed_threads
from sa3_runtime.view import size

__all__ = [
    "Check",
    "caches",
    "disk",
    "environment",
    "network",
    "packages",
    "python",
    "system",
]

Status = Literal["OK", "WARN", "FAIL"]
_DISK_WARN, _DISK_FAIL = 5e9, 5e8  # bytes
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, what was seen, what repairs it."""

    name: str
    status: Status
    said: str
    repair: str = ""


def system(_: Gpus) -> Iterator[Check]:
    """Operating system, cores and memory this process may use."""
    notes = [platform.platform(terse=True), platform.machine()]
    if "microsoft" in platform.release().lower():
        notes.append("WSL")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        notes.append("container")
    notes.append(f"{allowed_threads()} of {os.cpu_count()} cores")
    free, total = available_memory(swap=False), total_memory()
    if free is not None and total is not None:
        notes.append(f"{size(free)} of {size(total)} memory free")
    yield Check("system", "OK", ", ".join(notes))


def python(_: Gpus) -> Iterator[Check]:
    """The interpreter."""
    said = f"{platform.python_version()} in {sys.prefix}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Check("python", "OK", said)
    else:
        repair = "rm -rf .venv && ./install.sh with Python 3.11, 3.12 or 3.13 installed"
        yield Check("python", "WARN", f"{said}: tested with 3.11 to 3.13", repair)


def packages(_: Gpus) -> Iterator[Check]:
    """Installed packages against the pins."""
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


def disk(_: Gpus) -> Iterator[Check]:
    """Room for artefacts, and whether they may be written."""
    home = sa3_home()
    place = nearest_folder(home)
    free = shutil.disk_usage(place).free
    said = f"{size(free)} free in {home}"
    status: Status = "FAIL" if free < _DISK_FAIL else "WARN" if free < _DISK_WARN else "OK"
    repair = "" if status == "OK" else "make room, e.g. sa3 rm MODEL, or set SA3_HOME"
    if not os.access(place, os.W_OK):
        status, repair = "FAIL", "set SA3_HOME to a folder of yours"
        said += ", not writable"
    yield Check("disk", status, said, repair)


def caches(_: Gpus) -> Iterator[Check]:
    """Our cache and the hub's."""
    ours = cache_dir()
    used = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    hub = Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub")
    repos = len([*hub.glob("models--*")]) if hub.is_dir() else 0
    yield Check("caches", "OK", f"{size(used)} in {ours}; the hub's, {repos} models, in {hub}")


def _hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()


def network() -> Iterator[Check]:
    """Whether the hub answers within 5 s, and whether it accepts the token, if there is one."""
    try:
        from huggingface_hub import constants, get_session, get_token
    except ImportError:
        yield Check("network", "FAIL", "huggingface-hub is not installed", "./install.sh")
        return
    token, unreadable = None, None
    try:
        token = get_token()
    except OSError as error:
        said = f"the stored login can't be read: {error.filename}: {error.strerror}"
        unreadable = Check("token", "WARN", said, "set HF_HOME to a folder of yours, or HF_TOKEN")
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
    if unreadable:
        yield unreadable
    elif token:
        yield Check("token", "OK", f"there is one, from {source}")
    else:
        yield Check("token", "OK", "none; gated models need one: hf auth login")


def environment() -> Iterator[Check]:
    """Variables that change what we do."""
    prefixes = ("SA3_", "HF_", "CUDA_VISIBLE", "ORT_", "OMP_NUM")
    proxies = {"http_proxy", "https_proxy", "no_proxy", "all_proxy", "ssl_cert_file"}
    set_by_us = {"SA3_PROGRAM", "ORT_DISABLE_TELEMETRY"}
    seen = []
    for name, value in sorted(os.environ.items()):
        if name in set_by_us:
            continue
        if name.startswith(prefixes) or name.lower() in proxies:
            shown = "(hidden)" if _SECRET.search(name) else _without_user(value)
            seen.append(f"{name}={shown}")
    yield Check("variables", "OK", ", ".join(seen) or "none of ours is set")


def _without_user(address: str) -> str:
    """An address without user, password and query."""
    return re.sub(r"(//)[^/@\s]*@", r"\1", address).split("?")[0]
