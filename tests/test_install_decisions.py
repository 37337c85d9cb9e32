"""install.sh decides: a table of machines that are only stubs.

A machine is a folder that is the whole PATH: uname, df, nvidia-smi and pythons answer as those of
that machine would. Decisions are a function of such answers and of flags, so --dry-run tells all.
"""

from __future__ import annotations

import shutil
import subprocess
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = [
    "bash",
    "cat",
    "cksum",
    "cut",
    "dirname",
    "du",
    "env",
    "flock",
    "grep",
    "mkdir",
    "mktemp",
    "mv",
]
TOOLS += ["rm", "sort", "tail", "timeout", "touch", "tr"]


@dataclass(frozen=True)
class Box:
    """A machine. cards: lines of nvidia-smi; None: there is no nvidia-smi."""

    cards: tuple[str, ...] | None = None
    smi_exit: int = 0
    smi_old: bool = False  # the driver does not know the question for the capability
    kernel: str = "Linux"
    release: str = "6.8.0"
    machine: str = "x86_64"
    free_gb: float = 100
    pythons: tuple[str, ...] = ("3.12.3",)
    uv: bool = False
    musl: bool = False
    env: dict[str, str] = field(default_factory=dict)


def card(name: str, capability: str, driver: str, *, mig: str = "Disabled") -> str:
    return f"0, {name}, {capability}, {driver}, 24564, {mig}, GPU-{zlib.crc32(name.encode()):08x}-1"


def box(name: str, capability: str, driver: str, *, mig: str = "Disabled", **rest) -> Box:
    """A machine with one card."""
    return Box((card(name, capability, driver, mig=mig),), **rest)


H200 = card("NVIDIA H200", "9.0", "580.65.06")
BLACKWELL = card("NVIDIA GeForce RTX 5090", "12.0", "580.65.06", mig="[N/A]")
TURING = card("NVIDIA GeForce RTX 2080", "7.5", "580.65.06")
ADA = card("NVIDIA GeForce RTX 4090", "8.9", "581.15", mig="[N/A]")


def visible(devices: str, **env: str) -> Box:
    """A machine with an older card in its first slot and a newer one in its second."""
    return Box((TURING, BLACKWELL), env={"CUDA_VISIBLE_DEVICES": devices, **env})


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def make_path(folder: Path, box: Box) -> Path:
    """The folder that is the machine's PATH."""
    folder.mkdir(parents=True)
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    answers = f"-s) echo {box.kernel};; -m) echo {box.machine};; -r) echo {box.release};;"
    stub(folder, "uname", f"case $1 in {answers} esac")
    free = int(box.free_gb * 1024 * 1024)
    stub(folder, "df", f"echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'\n"
                       f"echo '/dev/sda1 999999999 1 {free} 1% /'")  # fmt: skip
    stub(folder, "ldd", "echo 'musl libc (x86_64)'" if box.musl else "echo 'ldd (GNU libc) 2.36'")
    for version in box.pythons:  # the last one is python3
        stub(folder, f"python{version.rpartition('.')[0]}", f"echo {version}")
        stub(folder, "python3", f"echo {version}")
    if box.uv:
        stub(folder, "uv", "echo uv 0.13.9")
    if box.cards is not None:
        lines = "\n".join(f"echo '{line}'" for line in box.cards)
        if box.smi_old:
            old = "\n".join(
                "echo '{}'".format(", ".join(line.split(", ")[i] for i in (0, 1, 3, 6)))
                for line in box.cards
            )
            body = (
                'if [[ "$1" == *compute_cap* ]]; then\n'
                """echo 'Field "compute_cap" is not a valid field to query.'; exit 2\nfi\n""" + old
            )
            stub(folder, "nvidia-smi", body)
        else:
            stub(folder, "nvidia-smi", f"{lines}\nexit {box.smi_exit}")
    return folder


def decide(tmp_path: Path, box: Box, *flags: str) -> subprocess.CompletedProcess[str]:
    """install.sh --dry-run on a fresh clone on that machine."""
    clone = tmp_path / "a clone"
    if not clone.exists():
        (clone / "models" / "sa3_models").mkdir(parents=True)
        for name in ("install.sh", "sa3", "requirements.txt"):
            shutil.copy(ROOT / name, clone / name)
        for folder in ("requirements", "script/install"):
            shutil.copytree(ROOT / folder, clone / folder)
        shutil.copy(ROOT / "models/sa3_models/catalogue.toml", clone / "models/sa3_models")
    path = make_path(tmp_path / f"bin-{len(list(tmp_path.iterdir()))}", box)
    home = tmp_path / "ho me"
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [str(path / "bash"), str(clone / "install.sh"), "--dry-run", *flags],
        env={"PATH": str(path), "HOME": str(home), "LANG": "C.UTF-8", **box.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


RTX = "core gpu-cu13 tensorrt-rtx"
TRT12 = "core gpu-cu12 tensorrt-cu12"
TRT13 = "core gpu-cu13 tensorrt-cu13"
WSL = "5.15.0-microsoft-standard-WSL2"
BROKEN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
NO_CARD = "no nvidia-smi|this container sees no GPU"  # the tests may themselves run in a container

MACHINES = {
    # name: (machine, packages, words of the plan, "a|b" is either)
    "no card": (Box(), "core", NO_CARD),
    "H200": (Box((H200,)), TRT13, "engines for sm_90 are published"),
    "RTX 5090": (Box((BLACKWELL,)), TRT13, "engines for sm_120 are published"),
    "RTX 4090": (Box((ADA,)), RTX, "no engines are published for sm_89: TensorRT-RTX builds"),
    "RTX 3090": (box("RTX 3090", "8.6", "590.10"), RTX, "sm_86"),
    "A100": (box("A100-SXM4", "8.0", "580.1"), RTX, "sm_80"),
    "T4": (box("Tesla T4", "7.5", "580.1"), RTX, "sm_75"),
    "B200": (box("NVIDIA B200", "10.0", "580.1"), TRT13, "no engines are published for sm_100"),
    "V100": (box("Tesla V100", "7.0", "550.54"), "core gpu-cu12", "rendered on the CPU with it"),
    "V100, CUDA 13": (
        box("Tesla V100", "7.0", "580.1"),
        "core gpu-cu12",
        "not support it any more",
    ),
    "GTX 1080": (box("GTX 1080", "6.1", "550.54"), "core", "6.1 is below 7.0"),
    "H200, CUDA 12": (box("NVIDIA H200", "9.0", "550.54.15"), TRT12, "allows CUDA 12, clips"),
    "RTX 4090, CUDA 12": (box("RTX 4090", "8.9", "535.183.01"), TRT12, "580 or newer (CUDA"),
    "old driver": (box("RTX 3090", "8.6", "470.256.02"), "core", "580 or newer brings it"),
    "very old driver": (box("K80", "x", "418.87", smi_old=True), "core", "418.87 is too old"),
    "driver N/A": (box("GPU", "8.6", "[N/A]"), "core", "does not tell the driver's version"),
    "capability N/A": (box("GPU", "[N/A]", "580.1"), "core", "give it with --arch"),
    "driver not running": (Box((BROKEN,), smi_exit=9), "core", "the driver is not running"),
    "driver mismatch": (Box((MISMATCH,), smi_exit=18), "core", "version mismatch"),
    "no devices": (Box(("No devices were found",)), "core", "lists no card"),
    "nvidia-smi says nothing": (Box(()), "core", "lists no card"),
    "two equal cards": (Box((H200, H200)), TRT13, "2 cards"),
    "two different cards": (Box((TURING, BLACKWELL)), TRT13, "2 cards of sm_120 sm_75"),
    "the better card decides": (Box((TURING, BLACKWELL)), TRT13, "5090, compute capability 12.0"),
    "MIG": (box("NVIDIA H200", "9.0", "580.1", mig="Enabled"), TRT13, "MIG is on"),
    "hidden cards": (visible(""), "core", "hides every GPU"),
    "hidden by -1": (visible("-1"), "core", "hides every GPU"),
    "hidden by a slip": (visible("7"), "core", "CUDA_VISIBLE_DEVICES='7' hides every GPU"),
    "hidden by a repetition": (visible("0,0"), "core", "'0,0' hides every GPU"),
    "two slices of one card": (
        Box((H200.replace("Disabled", "Enabled"),), env={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}),
        TRT13,
        "MIG is on",
    ),
    "the second is visible": (visible("1"), RTX, "2080, compute capability 7.5"),
    "both, turned": (visible("1,0"), RTX, "2 cards of sm_75 sm_120"),
    "by slot": (visible("1", CUDA_DEVICE_ORDER="PCI_BUS_ID"), TRT13, "5090"),
    "by UUID": (visible(TURING.rpartition(", ")[2]), RTX, "2080, compute capability 7.5"),
    "by half a UUID": (visible(TURING.rpartition(", ")[2][:9]), RTX, "2080"),
    "up to the first slip": (visible("1,9,0"), RTX, "2080, compute capability 7.5, driver"),
    "WSL without a card": (Box(release=WSL), "core", "driver on the Windows side"),
    "WSL with a card": (Box((ADA,), release=WSL), RTX, "Linux x86_64, WSL"),
    "WSL, old driver": (box("RTX 3080", "8.6", "471.11", release=WSL), "core", "Windows side"),
    "container without --gpus": (Box(env={"container": "podman"}), "core", "--gpus all"),
    "ARM with a card": (Box((H200,), machine="aarch64"), "core", "for x86_64 only"),
    "ARM": (Box(machine="aarch64"), "core", "Linux aarch64"),
    "Mac": (Box(kernel="Darwin", machine="arm64"), "core", "a Mac"),
    "no room for TensorRT": (Box((H200,), free_gb=8), "core gpu-cu13", "11500 MB needed with it"),
    "no room for the GPU": (Box((ADA,), free_gb=3), "core", "nothing of the GPU"),
    "3.11, old python3": (Box(pythons=("3.11.9", "3.9.2")), "core", "python    3.11.9"),
    "only 3.13": (Box(pythons=("3.13.1",)), "core", "python    3.13.1"),
    "3.14 beside uv": (Box(pythons=("3.14.0",), uv=True), "core", "3.12, brought by uv"),
}
ASKED = {
    # name: (machine, flags, packages, words)
    "--cpu": (Box((H200,)), ("--cpu",), "core", "--cpu"),
    "--dev": (Box(), ("--dev",), "core tensorrt-rtx dev", NO_CARD),
    "--keep": (Box((H200,)), ("--keep",), "core", "H200"),
    "the capability is told": (box("GPU", "[N/A]", "580.1"), ("--arch", "sm_86"), RTX, "sm_86"),
    "for another card": (Box(), ("--arch", "8.6"), "core tensorrt-rtx", "built ahead of time"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gets_its_packages_and_the_reason(name, tmp_path):
    """CASES 08, 17."""
    machine, packages, words = MACHINES[name]
    check_plan(tmp_path, decide(tmp_path, machine), packages, words)


@pytest.mark.parametrize("name", ASKED)
def test_a_flag_changes_the_decision(name, tmp_path):
    machine, flags, packages, words = ASKED[name]
    check_plan(tmp_path, decide(tmp_path, machine, *flags), packages, words)


def check_plan(tmp_path, done, packages, words):
    assert done.returncode == 0, done.stderr
    plan = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert plan["packages"].split(" – ")[0] == packages
    assert any(part in done.stdout for part in words.split("|")), done.stdout
    assert not (tmp_path / "a clone" / ".venv").exists()


def test_what_stays_installed_beside_the_chosen_packages_is_told(tmp_path):
    assert "kept" not in decide(tmp_path, Box(), "--cpu").stdout
    site = tmp_path / "a clone/.venv/lib/python3.12/site-packages"
    for name in ("tensorrt_rtx_cu13_bindings-1.7.1.116", "nvidia_cudnn_cu13-9.28.1.4"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    plan = decide(tmp_path, Box(), "--cpu").stdout
    assert "\npackages  core – --cpu\nkept      gpu-cu13 tensorrt-rtx – installed before" in plan
    assert "kept" not in decide(tmp_path, Box((ADA,))).stdout


REFUSED = {
    "no fitting python": (Box(pythons=("3.14.0",)), "3.11, 3.12 or 3.13 is needed, found: 3.14.0"),
    "no python": (Box(pythons=()), "found: none"),
    "Alpine": (Box(musl=True), "musl"),
    "Git Bash": (Box(kernel="MINGW64_NT-10.0"), "install WSL"),
    "32 bit": (Box(machine="i686"), "no packages for i686"),
    "Intel Mac": (Box(kernel="Darwin"), "no packages for x86_64 processors on Darwin"),
    "FreeBSD": (Box(kernel="FreeBSD"), "FreeBSD is not supported"),
    "full disk": (Box(free_gb=0.3), "the disk is too full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_machine_that_cannot_is_told_why(name, tmp_path):
    box, said = REFUSED[name]
    done = decide(tmp_path, box)
    assert done.returncode == 1
    assert said in done.stderr


SMALL, MEDIUM = ("--engines", "sm-music"), ("--engines", "medium")
ENGINES = {
    "published": (Box((H200,)), SMALL, "sm-music for sm_90: download"),
    "not published, unattended": (Box((ADA,)), MEDIUM, "skip – none published; unattended"),
    "not published, -y": (
        Box((ADA,)),
        (*MEDIUM, "-y"),
        "sm_89: build – none published, -y; checkpoints of 10.4",
    ),
    "another card": (Box((ADA,)), ("--engines=all", "--arch=90"), "all for sm_90: download"),
    "no card": (Box(), SMALL, "of sm-music (3.5 GB, exports beside them) are pulled"),
    "no card, all": (Box(), ("--engines", "all"), "(17.4 GB, exports"),
    "two names": (Box((H200,)), ("--engines", "small-sfx,medium"), "download – 8.3 GB"),
    "CUDA 12": (box("H200", "9.0", "550.54"), (*SMALL, "-y"), "exported for the CPU"),
    "none": (Box((H200,)), ("--engines", "none"), "none – --engines none"),
    "nobody to ask": (Box((H200,)), (), "nobody to ask"),
    "no way": (Box(), (*MEDIUM, "--arch", "sm_87", "-y"), "no TensorRT here to build them"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_downloaded_built_or_left(name, tmp_path):
    box, flags, said = ENGINES[name]
    done = decide(tmp_path, box, *flags)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("engines")]
    assert said in line


@pytest.mark.parametrize(
    ("answer", "means"),
    [
        ("1", "sm-music"),
        ("1 2", "sm-music,sm-sfx"),
        (" 3 , 1,", "medium,sm-music"),
        ("4", "sm-music,sm-sfx,medium"),
        ("5", "none"),
        ("medium", "medium"),
        *((nonsense, None) for nonsense in ("", "12", "6", "1,5", "y", "*", "1;2")),
    ],
)
def test_an_answer_is_understood_or_asked_for_again(answer, means):
    script = '. "$1"; chosen_models "$2"'
    done = subprocess.run(
        ["bash", "-uec", script, "bash", ROOT / "script/install/decide.sh", answer],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ((means, 0) if means else ("", 1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--engine", "x"), "unknown option --engine"),
        (("--engines",), "needs a list"),
        (("--engines", "larg"), "does not know 'larg'"),
        (("--arch", "ampere"), "is no architecture"),
    ],
)
def test_a_slip_is_usage(flags, said, tmp_path):
    done = decide(tmp_path, Box(), *flags)
    assert done.returncode == 2
    assert said in done.stderr
