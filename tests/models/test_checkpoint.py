"""Checkpoints: every tensor is used or ignored with a reason, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes  # teaches NumPy the name "bfloat16", which safetensors asks for
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sa3_models.checkpoint import Checkpoint
from sa3_models.config_file import read_model_config, read_text_config
from sa3_models.errors import CheckpointError
from sa3_models.manifest import IGNORED, model_tensors, text_tensors
from sa3_models.safetensors_file import read_rows, scan
from sa3_models.tiny import model_config, write_checkpoint

REAL = ("small-music", "medium", "same-s", "same-l")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "modèle 1"))


def rewrite(directory: Path, edit) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def config_of(name: str, data: Path, tmp_path: Path):
    shutil.copy(data / "manifests" / f"{name}.model_config.json", tmp_path / "model_config.json")
    return read_model_config(tmp_path)


@pytest.mark.parametrize("name", REAL)
def test_every_tensor_of_the_real_checkpoints_is_expected_or_ignored(
    name: str, data: Path, tmp_path: Path
) -> None:
    real = json.loads((data / "manifests" / f"{name}.json").read_text())
    expected = model_tensors(config_of(name, data, tmp_path))
    ignored = {n for n in real if any(n.endswith(pattern) for pattern, _ in IGNORED)}
    assert set(real) - ignored == set(expected)
    assert ignored == {n for n in real if n.endswith("noise_scaling_factor")}
    for tensor, shape in expected.items():
        fits = [want in (None, have) for want, have in zip(shape, real[tensor], strict=True)]
        assert all(fits), tensor


def test_every_tensor_of_the_real_text_encoder_is_expected(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "manifests" / "t5gemma-encoder.model_config.json", tmp_path / "config.json")
    real = json.loads((data / "manifests" / "t5gemma-encoder.json").read_text())
    expected = text_tensors(read_text_config(tmp_path))
    assert {f"model.encoder.{n}": list(s) for n, s in expected.items()} == real


def test_all_parts_open_and_equal_the_file(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    stored = load_file(tiny / "model.safetensors")
    for part, prefix in (("dit", "model.model."), ("autoencoder", "pretransform.model.")):
        tensors = getattr(checkpoint, part)
        for name in tensors:
            full = (
                f"conditioner.conditioners.{name.removeprefix('conditioner.')}"
                if name.startswith("conditioner.")
                else prefix + name
            )
            np.testing.assert_array_equal(tensors.read(name), stored[full].astype(np.float32))
    assert checkpoint.text.read("norm.weight").dtype == np.float32


def test_bf16_is_widened_exactly(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3.0e38], [1e-40, 0.0, -0.0]], ml_dtypes.bfloat16)
    save_file({"a": values}, tmp_path / "x.safetensors")
    entry = scan(tmp_path / "x.safetensors")["a"]
    np.testing.assert_array_equal(read_rows(entry), values.astype(np.float32))
    np.testing.assert_array_equal(read_rows(entry, 1, 2), values[1:2].astype(np.float32))


def test_zero_element_and_scalar_tensors(tmp_path: Path) -> None:
    save_file(
        {"none": np.zeros((1, 0, 1), np.float32), "one": np.array(3.0, np.float32)},
        tmp_path / "x.safetensors",
    )
    entries = scan(tmp_path / "x.safetensors")
    assert read_rows(entries["none"]).shape == (1, 0, 1)
    assert read_rows(entries["one"]) == 3.0


def test_shards_and_newer_weight_norm_spelling(copy: Path) -> None:
    whole = Checkpoint(copy)
    want = whole.autoencoder.weight_norm("encoder.layers.0.mapping")
    tensors = load_file(copy / "model.safetensors")
    renamed = {
        name.replace(".weight_g", ".parametrizations.weight.original0").replace(
            ".weight_v", ".parametrizations.weight.original1"
        ): values
        for name, values in tensors.items()
    }
    names = sorted(renamed)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: renamed[name] for name in members}, copy / file)
    (copy / "model.safetensors").unlink()
    index = {name: file for file, members in shards.items() for name in members}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = Checkpoint(copy)
    np.testing.assert_array_equal(sharded.autoencoder.weight_norm("encoder.layers.0.mapping"), want)
    sharded.dit  # noqa: B018  every part opens


@pytest.mark.parametrize("prefix", ["model.encoder.", "encoder.", ""])
def test_text_encoder_prefixes(copy: Path, prefix: str) -> None:
    path = copy / "t5gemma-b-b-ul2" / "model.safetensors"
    tensors = {
        prefix + name.removeprefix("model.encoder."): values
        for name, values in load_file(path).items()
        if name.startswith("model.encoder.")
    }
    if prefix:
        tensors["lm_head.out_proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, path)
    assert "layers.0.mlp.up_proj.weight" in Checkpoint(copy).text


def test_missing_extra_misshaped_and_nan_tensors_are_named(copy: Path) -> None:
    name = "model.model.transformer.layers.1.ff.ff.2.bias"
    rewrite(copy, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.1\.ff\.ff\.2\.bias"):
        Checkpoint(copy).dit  # noqa: B018
    rewrite(copy, lambda t: t.update({name: np.zeros(7, np.float32)}))
    with pytest.raises(CheckpointError, match=r"ff\.2\.bias is \[7\], expected \[128\]"):
        Checkpoint(copy).dit  # noqa: B018
    bad = np.zeros(128, np.float32)
    bad[3] = np.nan
    rewrite(copy, lambda t: t.update({name: bad}))
    with pytest.raises(CheckpointError, match="1 of 128"):
        Checkpoint(copy).dit.read("transformer.layers.1.ff.ff.2.bias")
    rewrite(copy, lambda t: t.update({"model.model.surprise": bad}))
    with pytest.raises(CheckpointError, match="surprise"):
        Checkpoint(copy).dit  # noqa: B018


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing there"):
        Checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no model_config\.json"):
        Checkpoint(tmp_path / "empty")
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut short"):
        Checkpoint(copy).dit  # noqa: B018
    weights.write_bytes(b"<html>404</html>")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(copy).dit  # noqa: B018
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="is a pointer to the file, not the file"):
        Checkpoint(copy).dit  # noqa: B018
    weights.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint(copy).dit  # noqa: B018
    (copy / "model_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        Checkpoint(copy)


def test_a_broken_header_of_weights_is_said_so(tmp_path: Path) -> None:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = tmp_path / "x.safetensors"
    for broken in (
        [1],
        {"a": 5},
        {"a": {"dtype": "F32"}},
        {"a": whole | {"data_offsets": [-8, 0]}},
        {"a": whole | {"data_offsets": [4, 0]}},
        {"a": whole | {"data_offsets": ["0", "8"]}},
        {"a": whole | {"shape": [3]}},
        {"a": whole | {"shape": [-2, -1]}},
    ):
        header = json.dumps(broken).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointError, match=r"x\.safetensors has a broken header"):
            scan(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (("sample_rate",), 48_000, "'sample_rate'"),
        (("model_type",), "lm", "'model_type'"),
        (("model", "diffusion", "config", "norm_type"), "layer", "'norm_type'"),
        (("model", "diffusion", "config", "num_heads"), 3, "multiple of 'num_heads'"),
        (("model", "diffusion", "diffusion_objective"), "v", "'diffusion.diffusion_objective'"),
        (("model", "pretransform", "config", "bottleneck", "type"), "vae", "'bottleneck.type'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, key: tuple[str, ...], value: object, said: str
) -> None:
    config = model_config()
    node = config
    for part in key[:-1]:
        node = node[part]
    node[key[-1]] = value
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        read_model_config(tmp_path)


def test_random_checkpoints_are_complete_and_repeatable(tmp_path: Path) -> None:
    first = Checkpoint(write_checkpoint(tmp_path / "a", seed=7))
    again = Checkpoint(write_checkpoint(tmp_path / "b", seed=7))
    other = Checkpoint(write_checkpoint(tmp_path / "c", seed=8))
    for part in (first.dit, first.autoencoder, first.text):
        for name in part:
            part.read(name)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_the_fingerprint_sees_weights_configuration_and_tokenizer(copy: Path) -> None:
    before = Checkpoint(copy).fingerprint
    rewrite(copy, lambda t: t.update({k: v * 2 for k, v in t.items() if k.endswith("gamma")}))
    changed = Checkpoint(copy).fingerprint
    with (copy / "t5gemma-b-b-ul2" / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert len({before, changed, Checkpoint(copy).fingerprint}) == 3


def test_decode_margins_follow_the_configuration(data: Path, tmp_path: Path) -> None:
    small = config_of("small-music", data, tmp_path).autoencoder
    large = config_of("medium", data, tmp_path).autoencoder
    assert (small.decode_margin(), small.encode_margin()) == (3, 2)
    assert (large.decode_margin(), large.encode_margin()) == (13, 12)
