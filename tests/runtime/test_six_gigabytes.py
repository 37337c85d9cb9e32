"""What the planner says about the published medium model on a card of 6 GB.

Its ports and weights are those of the real model (half precision, from the manifest), its plans
come from the planner, its scratch is what ONNX Runtime stages declare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sa3_models.catalogue import resolve
from sa3_models.config import ModelConfig
from sa3_models.config_file import read_model_config
from sa3_models.stages import Port, Stage, StageIO
from sa3_runtime.coding import WINDOW
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.devices.cuda.memory import needs_of, refusal
from sa3_runtime.devices.null import NullDriver
from sa3_runtime.plan import Plan
from sa3_runtime.planner import Planner
from sa3_runtime.request import Limits, Request
from sa3_runtime.stages.ort_cuda import OrtCudaStage
from sa3_runtime.tokenizer import Tokens

GIGABYTE = 1 << 30
SIX = 6 * GIGABYTE - (600 << 20)  # after the driver's own context
BLOCKS, WIDTH = 24, 1536
WINDOWS = {"enc": WINDOW, "dec": WINDOW}


def ports(**shapes: tuple[str, tuple[Any, ...]]) -> tuple[Port, ...]:
    return tuple(Port(name, dtype, shape) for name, (dtype, shape) in shapes.items())


def medium_ports() -> dict[str, StageIO]:
    f32, f16, n = "float32", "float16", "latent_len"
    per_block = {
        f"{name}.{i}": (f16, (1, 257, WIDTH))
        for i in range(BLOCKS)
        for name in ("context_k", "context_v", "context_k2")
    }
    local = {f"local.{i}": (f16, (1, n, WIDTH)) for i in range(BLOCKS)}
    prepared = ports(global_cond=(f32, (1, WIDTH)), **per_block, **local)
    text = dict.fromkeys(("input_ids", "attention_mask"), ("int64", (1, 256)))
    return {
        "t5gemma": StageIO(ports(**text), ports(hidden_states=(f32, (1, 256, 768)))),
        "dit_prepare": StageIO(
            ports(
                t5_hidden=(f32, (1, 256, 768)),
                t5_mask=(f32, (1, 256)),
                seconds_total=(f32, (1,)),
                local_add_cond=(f32, (1, 257, n)),
                cond_gate=(f32, (1,)),
            ),
            prepared,
        ),
        "dit_step": StageIO(
            ports(x=(f32, (1, 256, n)), t=(f32, (1,)), padding_mask=(f32, (1, n))) + prepared,
            ports(velocity=(f32, (1, 256, n))),
        ),
        "enc": StageIO(ports(audio=(f32, (1, 2, "samples"))), ports(latent=(f32, (1, 256, n)))),
        "dec": StageIO(ports(latent=(f32, (1, 256, n))), ports(pcm=("int32", (1, "samples", 2)))),
    }


def medium_weights(data: Path) -> dict[str, int]:
    """Bytes by stage at two a number; the DiT as a whole counts for its step, where most is."""
    manifests = data / "manifests"
    model = json.loads((manifests / "medium.json").read_text())
    text = json.loads((manifests / "t5gemma-encoder.json").read_text())
    size = dict.fromkeys(("t5gemma", "dit_prepare", "dit_step", "enc", "dec"), 0)
    for name, shape in {**model, **{f"t5gemma.{n}": s for n, s in text.items()}}.items():
        words = name.split(".")
        if name.startswith("t5gemma"):
            stage = "t5gemma"
        elif name.startswith("pretransform"):
            stage = "enc" if "encoder" in words else "dec"
        else:
            stage = "dit_step"
        size[stage] += 2 * math.prod(shape)
    return size


class Declared(OrtCudaStage):
    """What a stage declares, without its file."""

    def __init__(self, stage: Stage, io: StageIO, weight_bytes: int) -> None:
        self.io, self.weight_bytes, self._stage = io, weight_bytes, stage
        self.latent_range, self.description = (1, 4096), "ONNX Runtime"


@pytest.fixture(scope="module")
def stages(data: Path) -> dict[str, Declared]:
    weights = medium_weights(data)
    return {n: Declared(Stage(n), io, weights[n]) for n, io in medium_ports().items()}


@pytest.fixture(scope="module")
def config(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("medium")
    text = (data / "manifests" / "medium.model_config.json").read_text()
    (folder / "model_config.json").write_text(text)
    return read_model_config(folder)


def plan_of(
    config: ModelConfig, stages: Mapping[str, Declared], seconds: float, chunking: str
) -> Plan:
    request = Request("x", seconds=seconds, seed=1, chunking=chunking)
    coder = config.autoencoder
    planner = Planner(
        request.resolve(Limits.of(resolve("medium")), source_seconds=None),
        lambda stage: stages[stage].io if stage in stages else None,
        shift=config.shift,
        trained_latents=config.trained_latents,
        margins={"enc": coder.encode_margin(), "dec": coder.decode_margin()},
        windows=WINDOWS if chunking == "on" else {"enc": 4096, "dec": 4096},
    )
    ids = np.zeros((1, 256), np.int64)
    return planner.plan(Tokens(ids, ids, 1, "")).plan


def test_the_weights_are_those_of_the_model(stages):
    total = sum(stage.weight_bytes for stage in stages.values())
    assert 5.1e9 < total < 5.4e9, "5.22 GB are exported"


@pytest.mark.parametrize(
    ("seconds", "chunking", "flag"),
    [
        (30, "on", None),
        (30, "off", "--chunking on"),
        (120, "on", None),
        (120, "off", "--chunking on"),
        (380, "on", "--free-models"),
        (380, "off", "--chunking on and --free-models"),
    ],
)
def test_every_length_renders_with_the_flag_that_is_named(config, stages, seconds, chunking, flag):
    plan = plan_of(config, stages, seconds, chunking)
    error = refusal(plan, stages, SIX, free_models=False, windows=WINDOWS)
    if flag is None:
        assert error is None
        return
    assert isinstance(error, OutOfDeviceMemory)
    assert f"– {flag} would make it fit" in str(error)
    coded = "on" if "chunking" in flag else chunking
    helped = plan_of(config, stages, seconds, coded)
    freed = "free-models" in flag
    assert refusal(helped, stages, SIX, free_models=freed, windows=WINDOWS) is None


def test_the_device_chooses_windows_that_fit(config, stages):
    """`--chunking auto`: what a person gets who gives no flag."""
    device = CudaDevice(NullDriver(SIX), stages)
    assert device.window["dec"] == WINDOW
    plan = plan_of(config, stages, 30, "on")
    assert refusal(plan, stages, SIX, free_models=False, windows=WINDOWS) is None


class Running(Declared):
    """A stage that takes the memory it declares and computes nothing."""

    def __init__(self, declared: Declared, driver: NullDriver) -> None:
        super().__init__(declared._stage, declared.io, declared.weight_bytes)
        self.driver, self.pool = driver, 0
        self.taken: list[int] = []

    def load(self, latent_lens: Iterable[int]) -> None:
        if not self.taken:
            self.taken.append(self.driver.reserve(self.weight_bytes))

    def prepare(self, latent_len: int) -> Any:
        needed = self.scratch_bytes(latent_len)
        if needed > self.pool:
            self.taken.append(self.driver.reserve(needed - self.pool))
            self.pool = needed
        return SimpleNamespace(scratch_bytes=0, held_bytes=0, enqueue=lambda *_, **__: None)

    def unload(self) -> None:
        while self.taken:
            self.driver.release(self.taken.pop())


def test_another_length_is_admitted_where_it_fits_though_pools_are_taken(config, stages):
    driver = NullDriver(SIX)
    running = {name: Running(stage, driver) for name, stage in stages.items()}
    device = CudaDevice(driver, running, kernels=lambda _: b"")
    for seconds in (30, 20, 25, 30):
        plan = plan_of(config, stages, seconds, "on")
        inputs = {b.name: np.zeros(b.shape, b.dtype) for b in plan.of_kind("input")}
        device.run(plan, inputs)
    with pytest.raises(OutOfDeviceMemory, match="are free"):
        device.run(plan_of(config, stages, 380, "on"), {})
    device.close()
    assert driver.held == {}


def test_the_parts_are_told(config, stages):
    needs = needs_of(plan_of(config, stages, 380, "on"), stages)
    assert needs.own["dec"] > sum(size for name, size in needs.own.items() if name != "dec") / 2
    assert needs.weights["dit_step"] > sum(needs.weights.values()) / 2
    assert needs.buffers < 512 << 20
