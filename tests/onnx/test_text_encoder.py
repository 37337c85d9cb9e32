"""The text encoder's graph against the reference's goldens and the float64 twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import onnx
from sa3_models.checkpoint import Checkpoint
from sa3_models.tiny import text_config, write_checkpoint
from sa3_onnx.emulate import emulated
from sa3_onnx.text_encoder import author_text_encoder

from .twins import text_encoder as twin
from .twins.layers import load

HIDDEN = 5e-5  # about eight times the reference's own noise floor at float32
LOWERINGS = ("primitives", "operators")
Arrays = dict[str, NDArray]


def session(
    checkpoint: Checkpoint, folder: Path, lowering: str, precision: str = "fp32"
) -> ort.InferenceSession:
    path = folder / f"t5_{lowering}_{precision}.onnx"
    author_text_encoder(checkpoint, precision=precision, lowering=lowering).save(path)
    onnx.checker.check_model(str(path), full_check=True)
    if precision != "fp32":
        model = emulated(onnx.load(str(path), load_external_data=False))
        onnx.save_model(model, str(path))
    return ort.InferenceSession(str(path))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_hidden_states_equal_the_reference_on_valid_tokens(
    tiny: Path, golden: Callable[[str], Arrays], tmp_path: Path, lowering: str
) -> None:
    """A normal prompt, the empty one, one cut at 256 tokens; F32 and BF16 files."""
    data = golden("t5")
    encoder = session(Checkpoint(tiny), tmp_path, lowering)
    for ids, mask, want in zip(
        data["input_ids"], data["attention_mask"], data["last_hidden_state"], strict=True
    ):
        (got,) = encoder.run(None, {"input_ids": ids[None], "attention_mask": mask[None]})
        assert np.isfinite(got).all()
        valid = mask == 1
        assert valid.sum() == 0 or np.abs(got[0][valid] - want[valid]).max() <= HIDDEN


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [({"hidden": 32, "layers": 1, "heads": 1}, 1), ({"hidden": 64, "layers": 3, "heads": 4}, 2)],
    ids=["one-head", "shared-keys"],
)
def test_any_configuration_equals_the_float64_twin(
    changes: dict, kv_heads: int, lowering: str, tmp_path: Path
) -> None:
    text = text_config(**changes)
    text["encoder"] |= {"num_key_value_heads": kv_heads, "attn_logit_softcapping": 2.0}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model", seed=5, text=text))
    weights = load(checkpoint.text)
    ids = np.random.default_rng(0).integers(0, 500, 256)
    mask = (np.arange(256) < 40).astype(np.int64)
    want = twin.hidden_states(weights, checkpoint.text_config, ids, mask)
    (got,) = session(checkpoint, tmp_path, lowering).run(
        None, {"input_ids": ids[None], "attention_mask": mask[None]}
    )
    assert np.abs(got[0, :40] - want[:40]).max() <= HIDDEN


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_half_precision_stays_close_for_every_token(
    tiny: Path, golden: Callable[[str], Arrays], tmp_path: Path, lowering: str
) -> None:
    """No token collapses: the worst cosine, not the mean, with every rounding in place."""
    data = golden("t5")
    encoder = session(Checkpoint(tiny), tmp_path, lowering, "fp16")
    feeds = {"input_ids": data["input_ids"][2:3], "attention_mask": data["attention_mask"][2:3]}
    (got,) = encoder.run(None, feeds)
    want = data["last_hidden_state"][2]
    norms = np.linalg.norm(got[0], axis=-1) * np.linalg.norm(want, axis=-1)
    assert ((got[0] * want).sum(-1) / norms).min() >= 0.9999


def test_a_prompt_without_tokens_gives_finite_numbers(tmp_path: Path, tiny: Path) -> None:
    """CASES: an empty prompt has no valid token; every key is hidden."""
    encoder = session(Checkpoint(tiny), tmp_path, "primitives", "fp16")
    nothing = np.zeros((1, 256), np.int64)
    (got,) = encoder.run(None, {"input_ids": nothing, "attention_mask": nothing})
    assert np.isfinite(got).all()
