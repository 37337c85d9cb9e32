"""install.sh does: real installations from the package index this machine has.

Its decisions on other machines are in test_install_decisions.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    "install.sh",
    "bootstrap.sh",
    "sa3",
    "script/setup",
    "script/test",
    "script/lint",
    "script/bench",
]


def test_the_index_of_requirements_is_complete_and_pinned():
    """Every line is an exact version, no package twice with different ones."""
    seen: dict[str, str] = {}
    for path in [ROOT / "requirements.txt", *sorted((ROOT / "requirements").glob("*.txt"))]:
        for line in path.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            name, _, version = line.partition("==")
            assert version, f"{path.name}: {line}"
            if "cu12" not in path.stem and "onnxruntime-gpu" not in name:
                assert seen.setdefault(name, version) == version
    assert not {"torch", "torchaudio", "transformers", "triton"} & set(seen)
    assert not {"rich", "uv"} & {
        line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
    }


def test_shell_scripts_are_clean():
    beside = Path(sys.executable).with_name("shellcheck")
    checker = str(beside) if beside.exists() else shutil.which("shellcheck")
    if not checker:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        [checker, "--external-sources", "--check-sourced", *SCRIPTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


# ----------------------------------------------------------------------------- real installations


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git would give, in a folder with a space; the working tree's version of it."""
    target = tmp_path / "my project"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "install.sh", "sa3", "requirements*", "models/sa3_models",
         "runtime/sa3_runtime", "script"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("git is not there, or this is no clone")
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run(clone: Path, *flags: str, script: str = "install.sh", **options):
    home = clone.parent / "ho me"
    home.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTHON"))}
    env |= {"HOME": str(home)} | options.pop("env", {})
    return subprocess.run(
        [str(clone / script), *flags],
        env=env,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def on_terminal(clone: Path, answer: str, *, env: dict[str, str]) -> tuple[int, str]:
    """`install.sh --cpu` on a pseudo-terminal, with one line typed: (exit code, what it showed)."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(clone / "install.sh", ["install.sh", "--cpu"], os.environ | env)
    os.write(terminal, f"{answer}\n".encode())
    shown = b""
    try:
        while block := os.read(terminal, 4096):
            shown += block
    except OSError:
        pass  # the other end is gone
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.fixture
def no_vendor() -> dict[str, str]:
    """NVIDIA's index at a closed port."""
    return {"SA3_NVIDIA_INDEX": "http://127.0.0.1:9"}


@pytest.mark.slow
def test_a_fresh_cpu_installation_works_is_small_and_is_quick_the_second_time(clone, no_vendor):
    """CASES 08: --cpu with the vendor's index unreachable; HOME and project with spaces, no tty."""
    begun = time.monotonic()
    done = run(clone, "--cpu", "-y", env=no_vendor)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 90
    venv = clone / ".venv"
    size = sum(path.lstat().st_size for path in venv.rglob("*"))
    assert size < 450e6
    begun = time.monotonic()
    again = run(clone, "--cpu", "-y", env=no_vendor)
    assert again.returncode == 0
    assert "packages: complete" in again.stderr
    assert time.monotonic() - begun < 5
    listed = run(clone, "list", script="sa3")
    assert listed.returncode == 0, listed.stderr
    assert "small-music" in listed.stdout

    # the launcher is found through a link, from anywhere
    link = clone.parent / "sa3 link"
    link.symlink_to(os.path.relpath(clone / "sa3", link.parent))
    linked = subprocess.run(
        ["bash", link.name, "--version"],
        cwd=link.parent, env=os.environ | {"CDPATH": "/tmp"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert linked.stdout.startswith("sa3 "), linked.stderr

    # the environment's Python finds the packages from anywhere, also where the folder was moved
    moved = clone.rename(clone.with_name("moved"))
    found = subprocess.run(
        [moved / ".venv/bin/python", "-c", "import sa3_runtime; print(sa3_runtime.__file__)"],
        cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout.strip() == f"{moved}/runtime/sa3_runtime/__init__.py", found.stderr
    moved.rename(clone)

    # a package is damaged, another is gone, a third is older: the next run repairs them
    site = next(venv.glob("lib/python3*/site-packages"))
    (site / "click" / "core.py").unlink()
    shutil.rmtree(next(site.glob("tqdm-*.dist-info")))
    (venv / ".sa3").unlink()
    repaired = run(clone, "--cpu", "-y", env=no_vendor)
    assert repaired.returncode == 0, repaired.stderr
    assert "installing 2 packages" in repaired.stderr
    assert (site / "click" / "core.py").exists()

    # on a terminal it asks which models; the exit code of a pull that fails is its own
    code, shown = on_terminal(clone, "1;2\n5", env=no_vendor)
    assert (code, "Which models?" in shown) == (0, True), shown
    assert "'1;2' is no choice" in shown
    assert "sm-music   3.5 GB" in shown  # no GPU: the checkpoint
    code, shown = on_terminal(clone, "1", env=no_vendor | {"HF_HUB_OFFLINE": "1"})
    assert code == 3, shown
    assert "offline" in shown

    # the GPU's packages are wanted, and the vendor's index is not there: it stops and says so
    smi = clone.parent / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 9.0, 580.65.06, 143771, Disabled'\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    stopped = run(clone, "-y", env=no_vendor | {"PATH": path})
    assert stopped.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in stopped.stderr
    assert "--cpu" in stopped.stderr
    assert not (venv / ".sa3").exists()
    assert run(clone, "--cpu", env=no_vendor).returncode == 0


@pytest.mark.slow
def test_killed_at_any_moment_the_next_run_ends_well(clone, no_vendor):
    """CASES 32."""
    chance = random.Random(32)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VIRTUAL_ENV")}
    for _ in range(5):
        child = subprocess.Popen(
            [clone / "install.sh", "--cpu", "-y"],
            env=environment | no_vendor,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            child.wait(chance.uniform(0.3, 5.0))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    done = run(clone, "--cpu", "-y", env=no_vendor)
    assert done.returncode == 0, done.stderr
    assert run(clone, "list", script="sa3").returncode == 0


@pytest.mark.slow
def test_two_first_runs_at_once_share_one_installation(clone):
    """Two ./sa3 on a fresh clone: one installs, the other waits."""
    children = [
        subprocess.Popen(
            [clone / "sa3", "list"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    assert sum("installing" in err for _, err in told) == 1
    assert all("small-music" in out for out, _ in told)

    # CASES 32: the Python it was made with was removed or upgraded away
    python = clone / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    mended = run(clone, "--version", script="sa3")
    assert mended.stdout.startswith("sa3 "), mended.stderr


def test_half_an_environment_is_not_taken_for_whole(clone, no_vendor):
    """CASES 32: a .venv without a python that works; offline, the missing packages are named."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text("")
    done = run(clone, "--cpu", "--offline", env=no_vendor | {"UV_CACHE_DIR": str(clone / "none")})
    assert done.returncode == 3, done.stderr
    assert "offline" in done.stderr
    assert "numpy==" in done.stderr
    assert "pip download" in done.stderr
    assert not (clone / ".venv" / ".sa3").exists()


def test_a_piped_installer_asks_nothing(clone, no_vendor):
    """CASES 32: stdin is a pipe with more script in it, as under `curl … | bash`."""
    done = subprocess.run(
        ["bash", "-c", "cat - | ./install.sh --cpu --dry-run"],
        cwd=clone,
        input="rest of a script\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "nobody to ask" in done.stdout


# --------------------------------------------------------------------------------------- bootstrap


def bootstrap(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Pipe bootstrap.sh into bash in an empty folder, as `curl … | bash -s -- FLAGS` does."""
    return subprocess.run(
        ["bash", "-s", "--", *flags],
        cwd=folder,
        env=os.environ | env,
        input=(ROOT / "bootstrap.sh").read_text(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("way", ["git", "archive"])
def test_bootstrap_fetches_the_project_and_passes_its_flags_on(way, clone, tmp_path):
    """CASES 32: the question is not read from the pipe that the script came through."""
    source = tmp_path / "source.tar.gz"
    if way == "git":
        source = clone
        for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "x"]):
            who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
            subprocess.run(["git", *who, *command], cwd=clone, check=True)
    else:
        subprocess.run(["tar", "-czf", source, "-C", clone.parent, clone.name], check=True)
    folder = tmp_path / "some where"
    folder.mkdir()
    done = bootstrap(folder, "--cpu", "--dry-run", SA3_SOURCE=source.as_uri())
    assert done.returncode == 0, done.stderr
    assert "packages  core – --cpu" in done.stdout
    assert (folder / "sa3-trt" / "sa3").exists()
    assert [path.name for path in folder.iterdir()] == ["sa3-trt"]
    again = bootstrap(folder, "--cpu", "--dry-run")
    assert again.returncode == 0
    assert "there already" in again.stderr


def test_bootstrap_leaves_nothing_behind_when_the_source_is_wrong(tmp_path):
    done = bootstrap(tmp_path, SA3_SOURCE="file:///nowhere/x.tar.gz")
    assert done.returncode != 0
    assert not (tmp_path / "sa3-trt").exists()
    assert bootstrap(tmp_path).returncode == 2


def test_a_script_cut_off_in_the_pipe_does_nothing(tmp_path):
    text = (ROOT / "bootstrap.sh").read_text()
    done = subprocess.run(
        ["bash", "-s"],
        cwd=tmp_path,
        input=text[: text.index('main "$@"')],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())
