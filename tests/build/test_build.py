"""Orders to engines, with a fake TensorRT: nothing twice, nothing half, every ending readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from filelock import FileLock

from sa3_build.build import build_all
from sa3_models.errors import BuildFailed
from sa3_models.sidecar import read_sidecar, sidecar_path

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("models", "onnx", "build")


def files_of(home: Path) -> set[str]:
    """Everything below `home` but locks."""
    return {
        path.relative_to(home).as_posix()
        for path in home.rglob("*")
        if path.is_file() and ".locks" not in path.parts
    }


def builds(order) -> int:
    log = order.flavour.log
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_one_build_fills_the_directory_of_every_target(order):
    wanted = order()
    lines: list[str] = []
    [(built, sidecar)] = build_all([wanted], say=lines.append)
    engines = [wanted.engine(target) for target in wanted.targets]
    assert builds(wanted) == 1
    assert engines[0].samefile(engines[1])
    for engine, target in zip(engines, ("sm_86", "sm_120"), strict=True):
        record = read_sidecar(engine)
        assert record.compute_capability == target
        assert record.targets == ("sm_86", "sm_120")
        assert record.engine_bytes == engine.stat().st_size == 5000
        assert [row.latent_len for row in record.profiles] == [(1, 256, 256), (1, 1024, 4096)]
        assert [row.scratch_bytes for row in record.profiles] == [1000, 2000]
        assert record.source == {"g.onnx": wanted.source.sources["g.onnx"]}
        assert record.peak_rss_bytes > 10_000_000
    assert sidecar.key == wanted.key(wanted.targets[0])
    assert built.name == "same-s/dec_fp16_chunkable_limiter"
    assert "scratch 0/0 MB" in lines[-1]
    assert "sm_86, sm_120" in lines[-1]
    assert files_of(wanted.home) == {
        f"{target}/same-s/dec_fp16_chunkable_limiter.{suffix}"
        for target in ("sm_86", "sm_120")
        for suffix in ("trt", "json")
    }


def test_a_second_run_builds_nothing_and_a_third_target_builds_alone(order):
    """CASES 44: the cache hits, whatever the folder or the time."""
    build_all([order(targets=("sm_86",))], say=lambda _: None)
    lines: list[str] = []
    [(_, sidecar)] = build_all([order(targets=("sm_86",))], say=lines.append)
    assert sidecar is None
    assert lines == ["same-s/dec_fp16_chunkable_limiter: up to date"]
    wanted = order(targets=("sm_86", "sm_89"))
    build_all([wanted], say=lambda _: None)
    assert wanted.flavour.log.read_text().split("\n") == ["sm_86", "sm_89", ""]


@pytest.mark.parametrize("damage", ["cut", "record gone", "record broken", "other key"])
def test_a_damaged_engine_is_built_again(order, damage):
    wanted = order(targets=("sm_86",))
    build_all([wanted], say=lambda _: None)
    engine = wanted.engine(wanted.targets[0])
    record = sidecar_path(engine)
    if damage == "cut":
        engine.write_bytes(engine.read_bytes()[:-1])
    elif damage == "record gone":
        record.unlink()
    elif damage == "record broken":
        record.write_text("{")
    else:
        record.write_text(record.read_text().replace(wanted.key(wanted.targets[0]), "0" * 64))
    build_all([wanted], say=lambda _: None)
    assert builds(wanted) == 2
    assert engine.stat().st_size == 5000
    assert read_sidecar(engine).key == wanted.key(wanted.targets[0])


def test_every_ingredient_changes_the_key_and_nothing_else_does(order, write_graph, tmp_path):
    """CASES 44: key = ONNX content, architecture, TensorRT, precision, profiles."""
    base = order()
    target = base.targets[0]
    moved = write_graph(tmp_path / "elsewhere" / "g.onnx")
    os.utime(moved, (1, 1))
    assert order(source=moved, home=tmp_path / "h2").key(target) == base.key(target)
    fake, log = type(base.flavour), base.flavour.log
    changed = {
        "source": order(source=write_graph(tmp_path / "other" / "g.onnx", seed=1)).key(target),
        "target": base.key(base.targets[1]),
        "version": order(flavour=fake(log, number="1.8.0.1")).key(target),
        "flavour": order(flavour=fake(log, name="tensorrt")).key(target),
        "precision": order(precision="bf16").key(target),
        "profiles": order(ranges=base.ranges[:1]).key(target),
    }
    assert len({base.key(target), *changed.values()}) == 1 + len(changed)


@pytest.mark.parametrize(
    ("ending", "what", "found"),
    [
        ("none", "the build failed", "no tactic for layer 17"),
        ("raise", "the build failed", "RuntimeError: the bindings said no"),
        ("oom", "the build failed", "OutOfMemory"),
        ("kill", "the build process was killed", "want of memory"),
        ("exit", "the build process died", "exit status 7"),
    ],
)
def test_a_failed_build_leaves_nothing_and_says_why(order, ending, what, found):
    """CASES 49."""
    wanted = order(ending)
    with pytest.raises(BuildFailed) as caught:
        build_all([wanted], say=lambda _: None)
    assert what in caught.value.what
    assert found in caught.value.found
    assert files_of(wanted.home) == set()
    if ending in ("oom", "kill"):
        assert "close other programs" in caught.value.hint
    good = order("ok")
    build_all([good], say=lambda _: None)
    assert len(files_of(good.home)) == 4


def test_one_failure_does_not_stop_the_others_and_a_rerun_builds_only_what_is_missing(order):
    bad, good = order("none", stage_dir="bad"), order("ok", stage_dir="good")
    with pytest.raises(BuildFailed, match="bad/"):
        build_all([bad, good], say=lambda _: None)
    assert {name.split("/")[1] for name in files_of(good.home)} == {"good"}
    repaired = order("ok", stage_dir="bad")
    results = build_all([repaired, good], say=lambda _: None)
    assert {row.stage_dir: sidecar is not None for row, sidecar in results} == {
        "bad": True,
        "good": False,
    }


def test_progress_is_told_while_a_build_is_quiet(order):
    lines: list[str] = []
    build_all([order("sleep:1.2")], say=lines.append, every=0.3)
    told = [line for line in lines if " of about " in line]
    assert 2 <= len(told) <= 5
    assert "compiling" in told[-1]
    assert "GB" in told[-1]


def test_with_two_jobs_the_second_starts_before_the_first_is_done(order):
    orders = [order("sleep:1.5", stage_dir=name) for name in ("a", "b")]
    running = most = 0

    def say(line: str) -> None:
        nonlocal running, most
        running += ("building" in line) - ("done" in line)
        most = max(most, running)

    build_all(orders, say=say, jobs=2)
    assert most == 2


def test_a_build_waits_for_another_of_the_same_target(order):
    """Another process holds the lock; as soon as it is done, its engine counts as ours."""
    wanted = order(targets=("sm_86",))
    build_all([wanted], say=lambda _: None)
    lock = FileLock(wanted.home / ".locks" / "sm_86-same-s-dec_fp16_chunkable_limiter.lock")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        lock.release()

    lock.acquire(timeout=0)
    build_all([wanted], say=say)
    assert "another build of it is under way" in lines[0]
    assert lines[1].endswith("up to date")
    assert builds(wanted) == 1


def test_strays_of_a_dead_build_are_removed(order):
    wanted = order(targets=("sm_86",))
    engine = wanted.engine(wanted.targets[0])
    engine.parent.mkdir(parents=True)
    stray = engine.with_name(f"{engine.name}.999.plan.part")
    stray.write_bytes(b"half")
    build_all([wanted], say=lambda _: None)
    assert not stray.exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_engine_and_no_process(order, tmp_path, sent):
    """Ctrl-C removes the half-written file too; after a kill -9 the worker ends by itself."""
    order()  # writes the graph
    script = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {[str(ROOT / name) for name in SHELVES]!r}
        sys.path.insert(0, {str(ROOT / "tests/build/fakes")!r})
        from pathlib import Path
        from fake_trt import FakeFlavour
        from sa3_build.architectures import parse_architectures
        from sa3_build.build import build_all
        from sa3_models.onnx_file import read_onnx
        from sa3_build.order import Order
        from sa3_build.recipes import RECIPES
        from sa3_models.stages import Stage

        if __name__ == "__main__":
            here = Path({str(tmp_path)!r})
            flavour = FakeFlavour(here / "builds.log", "sleep:60")
            source = read_onnx(here / "in/g.onnx")
            targets = parse_architectures(["sm_86"])
            ranges = RECIPES[Stage.DECODER].ranges
            home = here / "home"
            order = Order(source, Stage.DECODER, "fp16", ranges, flavour, targets, home, "d")
            build_all([order], say=lambda _: None)
        """
    )
    path = tmp_path / "run.py"
    path.write_text(script)
    with subprocess.Popen([sys.executable, path], stderr=subprocess.PIPE, text=True) as process:
        log = tmp_path / "builds.log"
        until = time.monotonic() + 60
        while not log.exists():
            assert time.monotonic() < until
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        children = _descendants(process.pid)
        assert children
        process.send_signal(sent)
        process.wait(timeout=20)
        until = time.monotonic() + 20
        while any(_alive(pid) for pid in children):
            assert time.monotonic() < until, "the build process outlived its parent"
            time.sleep(0.05)
    assert files_of(tmp_path / "home") == set()


def _descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in tasks]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_disk_that_is_full_is_told_and_leaves_nothing(order, monkeypatch):
    import sa3_build.build as build_module

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "link_or_copy", full)
    wanted = order()
    with pytest.raises(BuildFailed, match="No space left on device"):
        build_all([wanted], say=lambda _: None)
    assert files_of(wanted.home) == set()


def test_a_disk_that_fills_in_the_build_process_is_told_with_what_is_free(order, monkeypatch):
    import multiprocessing

    import sa3_build.worker as worker_module

    monkeypatch.setattr(worker_module.signal, "signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker_module.work(order(), Path("/dev/full"), theirs)
    reports = []
    while ours.poll():
        reports.append(ours.recv())
    failed = reports[-1]
    assert isinstance(failed, worker_module.Failed)
    assert "No space left on device" in failed.found
    assert "bytes are free" in failed.hint
