"""The whole CUDA device on a machine without a GPU: layout, launches, recording, replay, cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sa3_models.errors import RunFailed, UsageError
from sa3_runtime.bundle import find_bundle
from sa3_runtime.devices import Progress
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.devices.null import HostCall, NullDriver, NullGraph, null_device
from sa3_runtime.request import Request
from sa3_runtime.session import Session, load

SOURCE = np.random.default_rng(7).uniform(-0.5, 0.5, (2, 50_000)).astype(np.float32)
EDIT = {"init_audio": "<array>"}
MODES: dict[str, dict] = {
    "text": {},
    "text in windows": {"seconds": 30.0, "chunking": "on", "steps": 2},
    "other samplers": {"sampler": "dpmpp", "steps": 4},
    "rk4": {"sampler": "rk4", "steps": 2},
    "guidance": {"cfg": 3.0},
    "guidance without apg": {"cfg": 3.0, "apg": 0.0},
    "guidance with rescale": {"cfg": 2.0, "apg": 0.5, "rescale": 0.7},
    "negative prompt": {"cfg": 4.0, "negative_prompt": "hiss"},
    "headroom": {"headroom": 6.0},
    "guidance with headroom": {"headroom": 6.0, "cfg": 3.0},
    "audio to audio": {**EDIT, "init_noise_level": 0.6},
    "inpainting": {**EDIT, "inpaint": ((0.3, 0.8),), "seconds": 2.0},
    "inpainting without paste": {**EDIT, "inpaint": ((0.3, 0.8),), "paste": False},
    "inpainting with guidance": {**EDIT, "inpaint": ((0.3, 0.8),), "cfg": 3.0},
}


def request_of(mode: str, **other: object) -> tuple[Request, np.ndarray | None]:
    options = {"seconds": 1.0, "seed": 11, "steps": 3, **MODES[mode], **other}
    return Request("a low hum", **options), SOURCE if "init_audio" in options else None


def open_null(directory: Path, **options: object) -> Session:
    bundle = find_bundle(directory, allow_export=False)
    return Session(bundle, null_device(bundle.onnx_files("fp32"), **options))


@pytest.fixture(scope="module")
def null(stub: Path) -> Iterator[Session]:
    with open_null(stub) as session:
        yield session


@pytest.fixture(scope="module")
def cpu(stub: Path) -> Iterator[Session]:
    with load(stub, threads=1) as session:
        yield session


@pytest.mark.parametrize("mode", MODES)
def test_a_recorded_render_equals_the_cpus_to_the_bit(mode, null, cpu):
    """Case 20 without a GPU: what the graph reads and writes is what the plan says."""
    request, source = request_of(mode)
    expected = cpu.render(request, source=source)
    for _ in range(2):  # the first run records, the second replays
        clip = null.render(request, source=source)
        np.testing.assert_array_equal(clip.latents, expected.latents)
        np.testing.assert_array_equal(clip.pcm, expected.pcm)
    assert np.abs(expected.pcm.astype(int)).max() > 100, "a silent clip proves nothing"


def recordings(session: Session) -> int:
    assert isinstance(session.device, CudaDevice)
    return len(session.device.recordings)


def test_another_prompt_seed_scale_level_or_source_replays_the_same_graph(stub, cpu):
    with open_null(stub) as session:
        base = {"cfg": 3.0, "seconds": 1.0, "steps": 3, "seed": 1, **EDIT}
        requests = [
            Request("one", **base),
            Request("another prompt", **base),
            Request("one", **{**base, "seed": 2}),
            Request("one", **{**base, "cfg": 5.5}),
            Request("one", **{**base, "apg": 0.2, "rescale": 0.4}),
            Request("one", **{**base, "init_noise_level": 0.9}),
            Request("one", **{**base, "schedule": "none"}),
            Request("one", **{**base, "seconds": 0.99}),
        ]
        for request in requests:
            clip = session.render(request, source=SOURCE)
            np.testing.assert_array_equal(clip.pcm, cpu.render(request, source=SOURCE).pcm)
        louder = session.render(requests[0], source=SOURCE / 2)
        np.testing.assert_array_equal(louder.pcm, cpu.render(requests[0], source=SOURCE / 2).pcm)
        # 0.99 s has the same latents and one sample count of its own
        assert recordings(session) == 2


def test_replays_interleaved_with_other_requests_stay_identical(null):
    """Case 20: buffers of a graph belong to it alone."""
    request, _ = request_of("guidance")
    first = null.render(request)
    for mode in ("text", "inpainting", "text in windows", "headroom"):
        other, source = request_of(mode)
        null.render(other, source=source)
        again = null.render(request)
        np.testing.assert_array_equal(again.pcm, first.pcm)
        np.testing.assert_array_equal(again.latents, first.latents)


def test_nothing_waits_or_allocates_while_a_graph_is_recorded(stub):
    with open_null(stub) as session:
        request, _ = request_of("guidance")
        session.render(request)
        device = session.device
        (recording,) = device.recordings
        driver = device._driver
        driver.log.clear()
        session.render(request)
        assert driver.log[0] == "graph"
        assert driver.log[-1] == "synchronize"
        assert driver.log.count("graph") == 1
        assert driver.log.count("synchronize") == 1
        # prompt and both contexts once, two velocities in each of three steps, one decode
        assert driver.log.count("stage") == 1 + 2 + 2 * 3 + 1
        assert recording.nodes["memcpy"] == 2, "one copy in, one out"
        driver.begin_capture()
        with pytest.raises(RunFailed, match="captured"):
            driver.synchronize()
        driver.abandon_capture()


def test_every_stage_is_warmed_up_once_before_it_is_recorded(stub):
    with open_null(stub) as session:
        request, _ = request_of("text")
        session.render(request)
        log = session.device._driver.log
        before = log[: log.index("synchronize")]
        assert before.count("stage") == 4  # text, prepare, step, decode: not 3 steps
        assert log.index("graph") > log.index("synchronize")


def test_a_byte_budget_drops_the_least_recently_used_graph(stub):
    with open_null(stub) as session:
        first, second, third = (request_of("text", seconds=s)[0] for s in (1.0, 2.0, 3.0))
        session.render(first)
        size = session.device.recordings[0].bytes
        session.device._budget = 5 * size
        held = set(session.device._driver.held)
        session.render(second)
        session.render(first)  # now the second is the oldest
        session.render(third)
        kept = [recording.plan.latent_len for recording in session.device.recordings]
        assert kept == [11, 33]
        assert held < set(session.device._driver.held)


def test_memory_returns_to_a_plateau_after_many_lengths(stub):
    """Case 48: lengths 5, 30, 5, 60, 5 s in one process."""
    with open_null(stub) as session:
        session.device._budget = 1
        seen = []
        for seconds in (5, 30, 5, 20, 5, 30, 5):
            session.render(request_of("text", seconds=float(seconds))[0])
            seen.append((seconds, sum(session.device._driver.held.values())))
        fives = {size for seconds, size in seen if seconds == 5}
        assert len(session.device.recordings) == 1
        # shared scratch may have grown once; after that nothing does
        assert len({size for seconds, size in seen[2:] if seconds == 5}) == 1, fives


def test_closing_gives_everything_back(stub):
    session = open_null(stub)
    session.render(request_of("text")[0])
    driver = session.device._driver
    session.close()
    assert driver.held == {}
    assert driver.closed


@pytest.mark.parametrize("fail_at", range(8))
def test_running_out_of_memory_anywhere_leaks_nothing_and_leaves_the_session_usable(
    stub, fail_at, monkeypatch
):
    """Case: CUDA out of memory at each stage."""
    with open_null(stub) as session:
        device, request = session.device, request_of("text")[0]
        driver = device._driver
        calls = 0

        def failing(original: Callable[..., int]) -> Callable[..., int]:
            def wrapper(*arguments: int) -> int:
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:
                    raise OutOfDeviceMemory("allocating: the GPU is out of memory")
                return original(*arguments)

            return wrapper

        for name in ("allocate", "allocate_host", "reserve"):
            monkeypatch.setattr(driver, name, failing(getattr(driver, name)))
        try:
            expected_failure = False
            session.render(request)
        except OutOfDeviceMemory:
            expected_failure = True
            weights = sum(device._stages[name].weight_bytes for name in device._loaded)
            scratch = device._scratch.size if device._scratch else 0
            assert sum(driver.held.values()) == weights + scratch
        assert expected_failure == (fail_at < 7), "four stages, buffers, host memory, scratch"
        assert len(session.render(request).pcm) == 44_100


def fail_at(driver: NullDriver, device: CudaDevice, place: str, patch: pytest.MonkeyPatch) -> None:
    """Let the GPU run out of memory at one place of a render."""

    def refuse(*_: object, **__: object) -> None:
        raise OutOfDeviceMemory("the GPU is out of memory")

    kind, _, name = place.partition(" ")
    if kind == "load" and name:
        patch.setattr(device._stages[name], "load", refuse)
    elif kind == "prepare":
        patch.setattr(device._stages[name], "prepare", refuse)
    elif kind == "run":  # the first, which warms up
        runner = HostCall.enqueue

        def enqueue(self: HostCall, *arguments: object, **named: object) -> None:
            if self._runner is device._stages[name]._runner:
                refuse()
            runner(self, *arguments, **named)

        patch.setattr(HostCall, "enqueue", enqueue)
    elif kind == "capturing":
        runner = HostCall.enqueue

        def enqueue_in_capture(self: HostCall, *arguments: object, **named: object) -> None:
            if driver.recording is not None and self._runner is device._stages[name]._runner:
                refuse()
            runner(self, *arguments, **named)

        patch.setattr(HostCall, "enqueue", enqueue_in_capture)
    elif kind == "instantiate":
        patch.setattr(driver, "end_capture", refuse)
    elif kind == "replay":
        patch.setattr(NullGraph, "launch", refuse)
    else:
        patch.setattr(driver, kind, refuse)


STAGES = ("t5gemma", "dit_prepare", "dit_step", "dec")
PLACES = [
    *(f"{what} {stage}" for what in ("load", "prepare", "run", "capturing") for stage in STAGES),
    *("allocate", "allocate_host", "begin_capture", "instantiate", "replay"),
    *("load", "synchronize"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first render", "with a graph kept"])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_at_each_place_leaks_nothing_and_a_smaller_request_works(
    stub, cpu, monkeypatch, place, warm
):
    """Case: CUDA out of memory at each stage."""
    small, large = request_of("text")[0], request_of("text", seconds=20.0)[0]
    session = open_null(stub)
    device = session.device
    driver = device._driver
    if warm:
        session.render(small)
    with monkeypatch.context() as patch:
        fail_at(driver, device, place, patch)
        if warm and place.startswith("load"):
            patch.undo()  # all of it is loaded already
        else:
            with pytest.raises(OutOfDeviceMemory):
                session.render(large)
            for recording in device.recordings:
                assert recording._graph is not None, "only whole recordings are kept"
    assert driver.recording is None, "the stream is not left capturing"
    weights = sum(device._stages[name].weight_bytes for name in device._loaded)
    scratch = {id(m): m.size for r in device.recordings for m in r._scratch}
    if device._scratch is not None:
        scratch[id(device._scratch)] = device._scratch.size
    kept = sum(recording._memory.size for recording in device.recordings)
    assert sum(driver.held.values()) == weights + kept + sum(scratch.values())
    for request in (small, large, small):
        np.testing.assert_array_equal(session.render(request).pcm, cpu.render(request).pcm)
    session.close()
    assert driver.held == {}
    assert driver._memory == {}


def test_a_stage_that_fails_while_recording_leaves_the_stream_usable(stub, monkeypatch):
    with open_null(stub) as session:
        original, request = HostCall.enqueue, request_of("text")[0]

        def failing(self: HostCall, *arguments: object, **named: object) -> None:
            if self._driver.recording is not None:
                raise RunFailed("refused")
            original(self, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(HostCall, "enqueue", failing)
            with pytest.raises(RunFailed, match="refused"):
                session.render(request)
        assert session.device.recordings == ()
        assert len(session.render(request).pcm) == 44_100


def test_freeing_models_holds_one_stage_at_a_time(stub, cpu):
    with open_null(stub, free_models=True) as session:
        device, most = session.device, 0
        original = device._loader.load

        def load_and_count(name: str, lengths: Iterable[int]) -> None:
            nonlocal most
            original(name, lengths)
            most = max(most, len(device._loaded))

        device._loader.load = load_and_count
        request, source = request_of("inpainting with guidance")
        clip = session.render(request, source=source)
        np.testing.assert_array_equal(clip.pcm, cpu.render(request, source=source).pcm)
        assert device._loaded == set()
        assert device.recordings == ()
        # the text encoder's last use comes before the encoder's first, and so on
        assert most == 1
        weights = sum(stage.weight_bytes for stage in device._stages.values())
        assert device._driver.free_bytes() > device._driver.total_bytes - weights - (1 << 22)


def test_threads_queue_up_and_get_their_own_clips(null, cpu):
    requests = [request_of(mode, seed=s)[0] for mode in ("text", "guidance") for s in (1, 2, 3)]
    plans = [null.plan(request)[1] for request in requests]
    expected = [cpu.device.run(p.plan, p.inputs).outputs["pcm"].copy() for p in plans]
    found: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        planned = plans[index]
        for _ in range(3):
            found[index] = null.device.run(planned.plan, planned.inputs).outputs["pcm"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, pcm in enumerate(expected):
        np.testing.assert_array_equal(found[index], pcm)


def test_progress_names_stages_in_order_and_ends_with_the_last_one(stub):
    told = []
    with open_null(stub) as session:
        session._progress = told.append
        session.render(request_of("text")[0])
        session.render(request_of("text")[0])
    assert told[0].stage == "load"
    assert told[-1].stage == "dec"
    assert told[-1].done == told[-1].total == 1


def test_seconds_are_told_by_stage(null):
    clip = null.render(request_of("guidance")[0])
    assert {"t5gemma", "dit_prepare", "dit_step", "dec", "copy", "total"} <= set(clip.timing)
    assert all(seconds > 0 for seconds in clip.timing.values())


@pytest.mark.parametrize("when", ["load", "dec"])
def test_an_interrupt_ends_a_render_and_the_session_goes_on(stub, cpu, when):
    def stop(event: Progress) -> None:
        if event.stage == when:
            raise KeyboardInterrupt

    with open_null(stub) as session:
        request = request_of("text")[0]
        session._progress = stop
        with pytest.raises(KeyboardInterrupt):
            session.render(request)
        session._progress = None
        for _ in range(2):
            np.testing.assert_array_equal(session.render(request).pcm, cpu.render(request).pcm)
        device = session.device
        driver = device._driver
        device.drop_recordings()
        weights = sum(device._stages[name].weight_bytes for name in device._loaded)
        assert sum(driver.held.values()) == weights + device._scratch.size


def test_the_first_run_of_a_plan_tells_what_making_it_took(stub):
    made = {"load", "warm up", "capture"}
    with open_null(stub) as session:
        first, second = (session.render(request_of("text")[0]).timing for _ in range(2))
    assert made <= set(first)
    assert all(first[name] > 0 for name in made)
    assert sum(first[name] for name in made) < first["total"]
    assert not made & set(second)


def test_a_length_beyond_an_engines_profile_is_refused_with_those_that_fit(stub):
    with open_null(stub) as session:
        session.device._stages["dit_step"].latent_range = (5, 64)
        with pytest.raises(UsageError, match=r"323 latents, it takes 5 to 64.*5\.94 s fit") as told:
            session.render(request_of("text", seconds=30.0)[0])
        assert told.value.exit_code == 2
        with pytest.raises(UsageError, match="dit_step file of this model can't take"):
            session.render(request_of("text", seconds=0.2)[0])
        assert session.device._loaded == set(), "refused before anything is loaded"
        assert len(session.render(request_of("text")[0]).pcm) == 44_100


def test_an_input_that_does_not_fit_is_named(null):
    planned = null.plan(request_of("text")[0])[1]
    inputs = {**planned.inputs, "seed": planned.inputs["seed"][:1]}
    with pytest.raises(RunFailed, match="input seed"):
        null.device.run(planned.plan, inputs)
    del inputs["seed"]
    with pytest.raises(RunFailed, match=r"input seed.*missing"):
        null.device.run(planned.plan, inputs)


def test_what_every_render_needs_is_loaded_ahead(stub, cpu):
    with open_null(stub) as session:
        device = session.device
        device.load_ahead()
        device._wait_for_loading()
        assert device._loaded == {"t5gemma", "dit_prepare", "dit_step"}
        request = request_of("text")[0]
        np.testing.assert_array_equal(session.render(request).pcm, cpu.render(request).pcm)


def test_nothing_is_loaded_ahead_where_memory_is_tight_or_models_are_freed(stub):
    with open_null(stub, free_models=True) as session:
        session.device.load_ahead()
        assert session.device._loader._ahead is None
    with open_null(stub, total_bytes=20_000) as session:
        session.device.load_ahead()
        assert session.device._loader._ahead is None


def test_a_failure_while_loading_ahead_is_told_by_the_first_render(stub, monkeypatch):
    from sa3_runtime.devices.null import HostStage

    def failing(self: HostStage, latent_lens: Iterable[int]) -> None:
        raise RunFailed("the file is damaged")

    with open_null(stub) as session:
        with monkeypatch.context() as patch:
            patch.setattr(HostStage, "load", failing)
            session.device.load_ahead()
            with pytest.raises(RunFailed, match="damaged"):
                session.render(request_of("text")[0])
        assert len(session.render(request_of("text")[0]).pcm) == 44_100
