"""The DiT's graphs against the reference's goldens and the float64 twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import onnx
from sa3_models.checkpoint import Checkpoint
from sa3_models.stages import Stage
from sa3_models.tiny import model_config, write_checkpoint
from sa3_onnx.dit import author_dit
from sa3_onnx.dit_part import fourier_frequencies
from sa3_onnx.emulate import emulated

from .twins import dit as twin
from .twins.layers import load

VELOCITY = 3e-5  # about ten times the reference's own noise floor at float32
LOWERINGS = ("primitives", "operators")
Arrays = dict[str, NDArray]


class Dit:
    """The three graphs of one DiT in ONNX Runtime."""

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, lowering: str, precision: str = "fp32"
    ) -> None:
        self.sessions = {}
        for stage in (Stage.DIT, Stage.DIT_PREPARE, Stage.DIT_STEP):
            path = folder / f"{stage.value}_{lowering}.onnx"
            author_dit(checkpoint, stage, precision=precision, lowering=lowering).save(path)
            onnx.checker.check_model(str(path), full_check=True)
            if precision != "fp32":
                model = emulated(onnx.load(str(path), load_external_data=False))
                onnx.save_model(model, str(path))
            self.sessions[stage] = ort.InferenceSession(str(path))

    def run(self, stage: Stage, inputs: Arrays) -> Arrays:
        session = self.sessions[stage]
        names = [port.name for port in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs), strict=True))

    def velocity(self, conditions: Arrays, moment: Arrays) -> NDArray:
        return self.run(Stage.DIT, {**conditions, **moment})["velocity"]

    def in_parts(self, conditions: Arrays, moment: Arrays) -> NDArray:
        prepared = self.run(Stage.DIT_PREPARE, conditions)
        return self.run(Stage.DIT_STEP, {**prepared, **moment})["velocity"]


def conditions(
    context: NDArray, local: NDArray, *, seconds: float = 30.0, gate: float = 1.0
) -> Arrays:
    """Inputs of prepare for a context [1, 257, c] whose prompt rows are already padded."""
    return {
        "t5_hidden": np.ascontiguousarray(context[:, :256]),
        "t5_mask": np.ones((1, 256), np.float32),
        "seconds_total": np.array([seconds], np.float32),
        "local_add_cond": local,
        "cond_gate": np.array([gate], np.float32),
    }


def moment(x: NDArray, t: float, valid: int | None = None) -> Arrays:
    """Inputs of step."""
    padding = np.ones((1, x.shape[2]), np.float32)
    padding[:, x.shape[2] if valid is None else valid :] = 0
    return {"x": x, "t": np.array([t], np.float32), "padding_mask": padding}


@pytest.fixture(scope="module", params=LOWERINGS)
def dit(
    tiny: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Dit:
    return Dit(Checkpoint(tiny), tmp_path_factory.mktemp("dit"), request.param)


def test_fourier_frequencies_are_the_references_to_the_bit(constants: Arrays) -> None:
    np.testing.assert_array_equal(fourier_frequencies(128), constants["expo_freqs_dim256"])


def test_other_counts_of_frequencies_follow_the_same_rule() -> None:
    table = fourier_frequencies(64)
    np.testing.assert_allclose(table, np.geomspace(0.5, 10_000, 64), rtol=2e-6)


def test_velocity_equals_the_reference_at_every_length_and_level(
    dit: Dit, golden: Callable[[str], Arrays]
) -> None:
    data = golden("dit")
    cases = [key for key in data if re.match(r"velocity\..*local_(zero|mask)$", key)]
    assert len(cases) >= 15
    for key in cases:
        length, t, kind = re.match(r"velocity\.L(\d+)\.t([\d.]+)\.local_(\w+)", key).groups()
        x = np.ascontiguousarray(data["x"][:, :, : int(length)])
        local = np.ascontiguousarray(data["local_add_cond"][:, :, : int(length)])
        inputs = conditions(data["cross_attn_cond"], local * (kind == "mask"))
        whole = dit.velocity(inputs, moment(x, float(t)))
        assert np.abs(whole - data[key]).max() <= VELOCITY, key
        parts = dit.in_parts(inputs, moment(x, float(t)))
        assert np.abs(parts - whole).max() <= 1e-6, key


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("precision", "cosine"), [("fp16", 0.999999), ("bf16", 0.9998)])
def test_half_precision_stays_close_in_both_lowerings(
    tiny: Path,
    golden: Callable[[str], Arrays],
    tmp_path: Path,
    lowering: str,
    precision: str,
    cosine: float,
) -> None:
    """With every rounding in place, which ONNX Runtime's CPU leaves out by itself."""
    data = golden("dit")
    dit = Dit(Checkpoint(tiny), tmp_path, lowering, precision)
    x, local = (np.ascontiguousarray(data[name][:, :, :64]) for name in ("x", "local_add_cond"))
    inputs = conditions(data["cross_attn_cond"], local * 0)
    for t in (0.02, 1.0):
        want = data[f"velocity.L64.t{t}.local_zero"].ravel()
        for got in (dit.velocity(inputs, moment(x, t)), dit.in_parts(inputs, moment(x, t))):
            likeness = got.ravel() @ want / np.linalg.norm(got) / np.linalg.norm(want)
            assert cosine <= likeness <= 1 - 1e-9


def test_guidance_branches_equal_the_reference(dit: Dit, golden: Callable[[str], Arrays]) -> None:
    data, cfg = golden("dit"), golden("cfg")
    for length in (5, 64):
        x = np.ascontiguousarray(data["x"][:, :, :length])
        local = np.zeros((1, x.shape[1] + 1, length), np.float32)
        for t in (0.5, 1.0):
            null = dit.velocity(conditions(data["cross_attn_cond"], local, gate=0), moment(x, t))
            assert np.abs(null - cfg[f"uncond.L{length}.t{t}"]).max() <= VELOCITY
            padded = dit.velocity(
                conditions(data["cross_attn_cond"], local),
                moment(x, t, int(cfg[f"padded.L{length}.valid"][0])),
            )
            assert np.abs(padded - cfg[f"padded.L{length}.t{t}.cfg1"]).max() <= VELOCITY


def test_a_guided_velocity_follows_from_both_branches(
    dit: Dit, golden: Callable[[str], Arrays]
) -> None:
    data, cfg, conditioner = golden("dit"), golden("cfg"), golden("conditioner")
    negative = conditioner["negative.cross_attn_cond"]
    length, t = 64, 0.5
    x = np.ascontiguousarray(data["x"][:, :, :length])
    local = np.zeros((1, x.shape[1] + 1, length), np.float32)
    positive = dit.velocity(conditions(data["cross_attn_cond"], local), moment(x, t))
    # a negative prompt passes with its blanked rows at zero, mask of ones, same seconds
    mask = conditioner["negative.cross_attn_mask"][0, :256]
    blanked = negative * np.append(mask, 1.0)[None, :, None].astype(np.float32)
    for name, inputs in (
        ("null", conditions(data["cross_attn_cond"], local, gate=0)),
        ("neg", conditions(blanked, local)),
    ):
        other = dit.velocity(inputs, moment(x, t))
        # without projection (apg 0) guidance is linear in the velocities
        guided = other + 3 * (positive - other)
        want = cfg[f"cfg3.L{length}.t{t}.apg0.0.{name}"]
        assert np.abs(guided - want).max() <= 5 * VELOCITY, name


def test_masked_prompt_rows_become_the_padding_embedding(
    dit: Dit, golden: Callable[[str], Arrays]
) -> None:
    data, conditioner = golden("dit"), golden("conditioner")
    x = np.ascontiguousarray(data["x"][:, :, :5])
    local = np.zeros((1, x.shape[1] + 1, 5), np.float32)
    context, mask = conditioner["case1.cross_attn_cond"], conditioner["case1.cross_attn_mask"]
    seconds = float(conditioner["case1.seconds"][0])
    padded = conditions(context, local, seconds=seconds)
    raw = {**padded, "t5_mask": np.ascontiguousarray(mask[:, :256])}
    # what the text encoder leaves at padded rows must not matter, be it NaN
    raw["t5_hidden"] = np.where(mask[:, :256, None] > 0, context[:, :256], np.nan)
    np.testing.assert_array_equal(
        dit.velocity(raw, moment(x, 0.5)), dit.velocity(padded, moment(x, 0.5))
    )


def test_seconds_are_embedded_like_the_reference(
    tiny: Path, dit: Dit, golden: Callable[[str], Arrays]
) -> None:
    """Through the projection that prepare applies to them: it has no other output of theirs."""
    conditioner = golden("conditioner")
    weights = load(Checkpoint(tiny).dit)
    config = Checkpoint(tiny).config.dit
    local = np.zeros((1, config.latent_dim + 1, 1), np.float32)
    context = np.zeros((1, 257, config.cond_dim), np.float32)
    for seconds, embedding in zip(
        conditioner["seconds"], conditioner["seconds_embedding"][:, 0], strict=True
    ):
        prepared = dit.run(Stage.DIT_PREPARE, conditions(context, local, seconds=float(seconds)))
        want = twin.mlp(weights, "to_global_embed", embedding.astype(np.float64))
        assert np.abs(prepared["global_cond"][0] - want).max() <= 2e-6


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 1, "dim": 64, "heads": 1, "memory_tokens": 0},
        {"depth": 3, "dim": 192, "heads": 3, "memory_tokens": 16, "latent_dim": 16},
        {"depth": 2, "dim": 128, "heads": 4, "memory_tokens": 64, "differential": True},
        {"depth": 1, "dim": 96, "heads": 2, "memory_tokens": 0, "differential": True},
    ],
    ids=lambda changes: "-".join(f"{k}{v}" for k, v in changes.items()),
)
def test_any_configuration_equals_the_float64_twin(
    changes: dict, lowering: str, tmp_path: Path, constants: Arrays
) -> None:
    checkpoint = Checkpoint(
        write_checkpoint(tmp_path / "model", seed=3, config=model_config(**changes))
    )
    config, weights = checkpoint.config.dit, load(checkpoint.dit)
    rng = np.random.default_rng(0)
    length, t, seconds = 7, 0.37, 12.5
    x = rng.standard_normal((1, config.latent_dim, length), np.float32)
    local = rng.standard_normal((1, config.latent_dim + 1, length), np.float32)
    hidden = rng.standard_normal((1, 256, config.cond_dim), np.float32)
    mask = (np.arange(256) < 9).astype(np.float32)
    token = twin.seconds_embedding(weights, config, seconds, constants["expo_freqs_dim256"])
    dit = Dit(checkpoint, tmp_path, lowering)
    for gate, valid in ((1.0, 7), (0.0, 7), (1.0, 4)):
        tokens = twin.context(weights, hidden[0].astype(np.float64), mask, token, gate=gate)
        want = twin.velocity(
            weights,
            config,
            constants["expo_freqs_dim256"],
            x=x[0].astype(np.float64),
            t=t,
            tokens=tokens,
            seconds_token=token,
            local=local[0].astype(np.float64),
            valid=(np.arange(length) < valid).astype(np.float64),
        )
        inputs = conditions(
            np.zeros((1, 257, config.cond_dim), np.float32), local, seconds=seconds, gate=gate
        )
        inputs |= {"t5_hidden": hidden, "t5_mask": mask[None]}
        got = dit.in_parts(inputs, moment(x, t, valid))
        assert np.abs(got[0] - want).max() <= VELOCITY * max(1, np.abs(want).max() / 4)


def test_the_longest_clip_equals_the_float64_twin(tmp_path: Path, constants: Arrays) -> None:
    """Angles reach 4,159 rad there: tables computed in float32 would be off by 2e-4."""
    changes = {"depth": 1, "dim": 64, "heads": 1, "latent_dim": 8}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model", config=model_config(**changes)))
    config, weights = checkpoint.config.dit, load(checkpoint.dit)
    x = np.random.default_rng(0).standard_normal((1, 8, 4096), np.float32)
    local = np.zeros((1, 9, 4096), np.float32)
    context = np.zeros((1, 257, config.cond_dim), np.float32)
    token = twin.seconds_embedding(weights, config, 380, constants["expo_freqs_dim256"])
    want = twin.velocity(
        weights,
        config,
        constants["expo_freqs_dim256"],
        x=x[0].astype(np.float64),
        t=0.5,
        tokens=twin.context(weights, context[0, :256].astype(np.float64), np.ones(256), token),
        seconds_token=token,
        local=local[0].astype(np.float64),
    )
    got = Dit(checkpoint, tmp_path, "operators").in_parts(
        conditions(context, local, seconds=380), moment(x, 0.5)
    )
    assert np.abs(got[0] - want).max() <= VELOCITY
