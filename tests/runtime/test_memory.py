"""Where buffers lie, and what a plan needs of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa3_models.stages import Port, StageIO
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.devices.cuda.layout import byte_size, lay_out
from sa3_runtime.devices.cuda.memory import GRAPH_BYTES, needs_of, refusal, window_for
from sa3_runtime.devices.null import NullDriver
from sa3_runtime.plan import Buffer, Combine, CopyOut, Plan, RunStage, touched

GIGABYTE = 1 << 30
MEGABYTE = 1 << 20


@dataclass
class Model:
    """A stage of a given weight that is never run."""

    weight_bytes: int
    per_latent: int = 0
    fixed: int = 0
    shares_scratch: bool = True
    io: StageIO = field(default_factory=lambda: StageIO((), ()))
    latent_range: tuple[int, int] = (1, 4096)
    description: str = "a stage"

    def scratch_bytes(self, latent_len: int) -> int:
        return self.fixed + self.per_latent * latent_len

    def load(self, latent_lens: Iterable[int]) -> None:
        raise AssertionError("planning must not load")

    def prepare(self, latent_len: int) -> object:
        raise AssertionError("planning must not prepare")

    def unload(self) -> None: ...


def latent(name: str, frames: int, kind: str = "work") -> Buffer:
    return Buffer(name, (1, 256, frames), "float32", kind)


def render_plan(frames: int, window: int | None = None) -> Plan:
    """Text, prepare, two steps, decode of one size; buffers as large as a medium model's."""
    coded = window or frames
    buffers = (
        Buffer("ids", (1, 256), "int64", "input"),
        Buffer("coefficients", (4,), "float32", "input"),
        Buffer("hidden", (1, 256, 768), "float32"),
        Buffer("local", (24, frames, 1536), "float16"),
        latent("x", frames),
        latent("velocity", frames),
        Buffer("audio", (1, coded * 4096, 2), "int32"),
        Buffer("pcm", (frames * 4096, 2), "int16", "output"),
    )
    step = RunStage("dit_step", (("x", "x"), ("l", "local")), (("v", "velocity"),), frames)
    update = Combine("x", ((0, "x"), (1, "velocity")))
    steps = (
        RunStage("t5gemma", (("input_ids", "ids"),), (("h", "hidden"),), frames),
        RunStage("dit_prepare", (("h", "hidden"),), (("l", "local"),), frames),
        *(step, update, step, update),
        RunStage("dec", (("latent", "x"),), (("pcm", "audio"),), coded),
    )
    return Plan(buffers, steps, frames, frames * 4096)


def medium() -> dict[str, Model]:
    """Weights of medium in half precision: text 0.57, DiT 3.0, decoder 0.85 GB."""
    return {
        "t5gemma": Model(570 * MEGABYTE, fixed=32 * MEGABYTE),
        "dit_prepare": Model(300 * MEGABYTE, fixed=16 * MEGABYTE, per_latent=64 << 10),
        "dit_step": Model(2_700 * MEGABYTE, fixed=64 * MEGABYTE, per_latent=192 << 10),
        "dec": Model(850 * MEGABYTE, fixed=64 * MEGABYTE, per_latent=1 << 20),
    }


# -- layout ---------------------------------------------------------------------------------------


def test_inputs_and_outputs_lie_together_and_everything_is_aligned():
    plan = render_plan(33)
    layout = lay_out(plan)
    assert layout.offsets["ids"] == 0
    start, end = layout.outputs
    assert start == layout.inputs == layout.offsets["pcm"]
    assert end - start >= byte_size(plan.buffer("pcm"))
    assert all(offset % 256 == 0 for offset in layout.offsets.values())


def test_buffers_that_are_never_alive_together_share_memory():
    plan = render_plan(1000)
    shared, apart = lay_out(plan), lay_out(plan, share=False)
    # what only the sampler needs makes room for the decoder's audio
    assert shared.total < apart.total - byte_size(plan.buffer("audio")) + (2 << 20)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_two_buffers_that_are_alive_together_overlap(data):
    names = [f"b{i}" for i in range(data.draw(st.integers(1, 9)))]
    buffers = tuple(
        Buffer(name, (data.draw(st.integers(1, 400)),), "float32") for name in names
    ) + (Buffer("coefficients", (1,), "float32", "input"), Buffer("o", (3,), "float32", "output"))
    pick = st.sampled_from(names)
    steps = tuple(
        Combine(data.draw(pick), ((0, data.draw(pick)),))
        for _ in range(data.draw(st.integers(1, 12)))
    ) + (CopyOut("o", names[0]),)
    layout = lay_out(Plan(buffers, steps, 1, 1))
    life: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for name in touched(step):
            life.setdefault(name, []).append(index)
    size = {buffer.name: byte_size(buffer) for buffer in buffers}
    for a in life:
        for b in life:
            if a >= b or not (life[a][0] <= life[b][-1] and life[b][0] <= life[a][-1]):
                continue
            low, high = sorted((a, b), key=layout.offsets.__getitem__)
            assert layout.offsets[low] + size[low] <= layout.offsets[high]
    assert all(layout.offsets[name] + size[name] <= layout.total for name in life)


# -- what is needed -------------------------------------------------------------------------------


def test_shared_scratch_counts_once_and_own_scratch_for_each_stage():
    plan = render_plan(1000)
    stages = medium()
    needs = needs_of(plan, stages)
    assert needs.scratch == stages["dec"].scratch_bytes(1000)
    for stage in stages.values():
        stage.shares_scratch = False
    own = needs_of(plan, stages)
    assert own.scratch == 0
    assert sum(own.own.values()) == sum(s.scratch_bytes(1000) for s in stages.values())
    assert needs.peak == sum(needs.weights.values()) + needs.scratch + needs.buffers + GRAPH_BYTES


def test_freeing_models_needs_the_largest_stage_instead_of_all():
    plan, stages = render_plan(324), medium()
    kept, freed = needs_of(plan, stages), needs_of(plan, stages, free_models=True)
    others = sum(s.weight_bytes for n, s in stages.items() if n != "dit_step")
    assert kept.peak - freed.peak == others + GRAPH_BYTES


def test_the_table_names_every_part():
    text = needs_of(render_plan(324), medium()).table()
    for word in ("weights", "dit_step 2,700 MiB", "scratch", "buffers", "graph"):
        assert word in text


# -- a 6 GB card ----------------------------------------------------------------------------------

SIX = 6 * GIGABYTE - 600 * MEGABYTE  # after the driver's own context


def test_a_6_gb_card_renders_30_s_of_medium_as_it_is():
    assert refusal(render_plan(324), medium(), SIX, free_models=False, windows={"dec": 128}) is None


def test_a_6_gb_card_renders_120_s_of_medium_with_a_flag_and_says_which():
    plan = render_plan(1292)
    error = refusal(plan, medium(), SIX, free_models=False, windows={"dec": 128})
    assert isinstance(error, OutOfDeviceMemory)
    assert "MiB of GPU memory" in str(error)
    assert "--chunking on would make it fit" in str(error)
    windowed = render_plan(1292, window=128)
    assert refusal(windowed, medium(), SIX, free_models=False, windows={"dec": 128}) is None


def test_a_6_gb_card_renders_380_s_of_medium_with_freed_models():
    plan = render_plan(4096, window=128)
    error = refusal(plan, medium(), SIX, free_models=False, windows={"dec": 128})
    assert error is not None
    assert "--free-models would make it fit" in str(error)
    assert refusal(plan, medium(), SIX, free_models=True, windows={"dec": 128}) is None


def test_both_flags_are_named_where_both_are_needed():
    plan = render_plan(4096)
    available = 4 * GIGABYTE + 512 * MEGABYTE
    error = refusal(plan, medium(), available, free_models=False, windows={"dec": 128})
    assert error is not None
    assert "--chunking on and --free-models would make it fit" in str(error)


def test_what_never_fits_is_refused_without_a_promise():
    error = refusal(render_plan(4096), medium(), GIGABYTE, free_models=False, windows={})
    assert error is not None
    assert "would make it fit" not in str(error)
    assert "shorter clip" in str(error)
    assert error.exit_code == 1


# -- windows --------------------------------------------------------------------------------------


def decoder() -> Model:
    io = StageIO(
        (Port("latent", "float32", (1, 256, "latent_len")),),
        (Port("pcm", "int32", (1, "samples", 2)),),
    )
    return Model(850 * MEGABYTE, fixed=64 * MEGABYTE, per_latent=1 << 20, io=io)


@pytest.mark.parametrize(
    ("available", "window"),
    [
        (100 * GIGABYTE, 4096),
        (3 * GIGABYTE, 2048),
        (2 * GIGABYTE, 1024),
        (400 * MEGABYTE, 256),
        (0, 128),
    ],
)
def test_windows_are_as_long_as_memory_allows(available, window):
    assert window_for(decoder(), available) == window


def test_windows_stay_within_an_engines_profile():
    stage = decoder()
    stage.latent_range = (1, 256)
    assert window_for(stage, 100 * GIGABYTE) == 256


def test_windows_are_decided_once_so_that_a_request_keeps_its_plan():
    driver = NullDriver(4 * GIGABYTE)
    device = CudaDevice(driver, {"dec": decoder()})
    before = dict(device.window)
    driver.reserve(3 * GIGABYTE)
    assert dict(device.window) == before


def test_a_plan_is_refused_before_anything_is_allocated():
    driver = NullDriver(2 * GIGABYTE)
    device = CudaDevice(driver, medium(), kernels=lambda _: b"")
    with pytest.raises(OutOfDeviceMemory, match="are free"):
        device.run(render_plan(324), {})
    assert driver.held == {}
    assert driver.log == []
