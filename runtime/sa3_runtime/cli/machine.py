"""The graphics cards of this machine, for people: names, capabilities, memory, driver.

Knows: NVML through cuda-core, nvidia-smi. Doesn't know: CUDA contexts; nothing is allocated.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace

from sa3_models.gpus import DRIVER_LEAST, local_architectures
from sa3_models.packages import installed

__all__ = ["Gpu", "Gpus", "find_gpus"]

_FIELDS = "name,compute_cap,memory.total,memory.free,driver_version,mig.mode.current"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. architecture: "sm_86", "" if unknown; memory in bytes, 0 if unknown."""

    name: str
    architecture: str
    total: int
    free: int
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was found. driver: its version, "" without one. trouble: why nothing was found.

    cards: all there are. visible: architectures of those that a program may use, each once.
    """

    cards: tuple[Gpu, ...] = ()
    driver: str = ""
    trouble: str = ""
    visible: tuple[str, ...] = ()

    @property
    def too_old(self) -> bool:
        """Whether the driver is too old to render on a card; one that isn't told is, too."""
        major = self.driver.partition(".")[0]
        return not major.isdecimal() or int(major) < DRIVER_LEAST

    @property
    def usable(self) -> bool:
        """Whether clips can be rendered on one of the cards."""
        return bool(self.visible) and not self.too_old


def find_gpus() -> Gpus:
    """Ask NVML if cuda-core is installed, else nvidia-smi; never raises.

    Neither knows `CUDA_VISIBLE_DEVICES`, nor the order of CUDA's devices: the driver does.
    """
    found = Gpus()
    if installed("cuda-core"):
        found = _from_nvml()
    if not found.cards:
        found = _from_nvidia_smi()
    return replace(found, visible=local_architectures())


def _from_nvml() -> Gpus:
    try:
        from cuda.core import system

        cards = []
        for device in system.Device.get_all_devices():
            major, minor = device.cuda_compute_capability
            memory = device.memory_info
            cards.append(Gpu(device.name, f"sm_{major}{minor}", memory.total, memory.free))
        driver = ".".join(f"{part:02}" for part in system.get_kernel_mode_driver_version())
        return Gpus(tuple(cards), driver)
    except Exception as error:  # a diagnosis must survive every driver
        return Gpus(trouble=" ".join(str(error).split()))


def _from_nvidia_smi() -> Gpus:
    tool = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if not tool:
        return Gpus(trouble="no nvidia-smi: no NVIDIA GPU, or no driver for it")
    try:
        answer = subprocess.run(
            [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(trouble=f"nvidia-smi does not answer: {error}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS.split(","))]
    if answer.returncode or not rows:
        said = " ".join((answer.stdout + answer.stderr).split())[:200]
        return Gpus(trouble=f"nvidia-smi lists no card: {said or 'it says nothing'}")
    cards = tuple(
        Gpu(
            name,
            f"sm_{capability.replace('.', '')}" if capability[:1].isdigit() else "",
            _number(total) * _MIB,
            _number(free) * _MIB,
            mig == "Enabled",
        )
        for name, capability, total, free, _, mig in rows
    )
    return Gpus(cards, rows[0][4])


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
