"""The catalogue: names, near misses, directories, published files, places on the disk."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from sa3_models import paths
from sa3_models.catalogue import EMBEDDED, Model, catalogue, names, resolve
from sa3_models.errors import ArtefactMissing, CheckpointError, UsageError
from sa3_models.stages import Stage, stage_file

MANIFESTS = Path(__file__).parents[1] / "data" / "manifests"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("small-music", "small-music"),
        ("sm-music", "small-music"),
        ("SM-Music", "small-music"),
        ("sm-sfx", "small-sfx"),
        ("medium", "medium"),
        ("sm-music-base", "small-music-base"),
        ("stabilityai/stable-audio-3-medium", "medium"),
        ("stable-audio-3-small-sfx-base", "small-sfx-base"),
        ("SAME-L", "same-l"),
        ("demo", "demo"),
    ],
)
def test_every_spelling_of_the_published_tools_finds_its_model(word, name):
    assert resolve(word).name == name


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("smal-music", "small-music"),
        ("meduim", "medium"),
        ("sfx", "small-sfx"),
        ("same-x", "same-s"),
    ],
)
def test_a_near_miss_is_offered(word, offered):
    with pytest.raises(UsageError, match=f"no model '{word}'") as caught:
        resolve(word)
    assert caught.value.exit_code == 2
    assert f"did you mean {offered}" in caught.value.hint


def test_a_word_like_nothing_lists_what_there_is():
    with pytest.raises(UsageError) as caught:
        resolve("xyz")
    assert all(name in caught.value.hint for name in names())


def test_no_spelling_means_two_models():
    words = [
        word.lower()
        for model in catalogue().models.values()
        for word in {model.name.lower(), *(alias.lower() for alias in model.aliases)}
    ]
    assert len(words) == len(set(words))


def test_rows_fit_together():
    for model in catalogue().models.values():
        assert model.autoencoder in names()
        assert (model.repo is None) == (model.name == EMBEDDED) == model.embedded
        generator = model.kind == "generator"
        assert bool(model.text_dir) == bool(model.dit_dir) == bool(model.sampler) == generator
        assert model.summary
        assert model.licence
        if generator:
            assert model.steps == (50 if model.objective == "rectified_flow" else 8)
            assert model.cfg == (7 if model.objective == "rectified_flow" else 1)
    own = [model.dit_dir for model in catalogue().models.values() if model.dit_dir]
    assert len(own) == len(set(own))


@pytest.mark.parametrize("name", ["small-music", "medium"])
def test_limits_and_sizes_agree_with_the_published_configuration(name):
    """Against the configuration and the tensor list of the original."""
    config = json.loads((MANIFESTS / f"{name}.model_config.json").read_text())
    model = resolve(name)
    assert model.max_seconds == config["sample_size"] // 44_100
    assert model.objective == config["model"]["diffusion"]["diffusion_objective"]
    shapes = json.loads((MANIFESTS / f"{name}.json").read_text()).values()
    text_encoder = 1_180_000_000  # the whole T5Gemma in BF16
    tokenizer = 34_000_000
    expected = sum(map(math.prod, shapes)) * 4 + text_encoder + tokenizer
    assert model.checkpoint_bytes == pytest.approx(expected, rel=0.01)


def test_current_files_carry_the_names_that_builders_write():
    """The published layout is the one we build into."""
    for row in catalogue().engines:
        if row.state == "old":
            continue
        assert row.file == f"{stage_file(row.stage, row.precision)}.trt"


def test_published_bundles_are_complete():
    for name in ("small-music", "small-sfx", "medium"):
        rows = [row for row in catalogue().engines_of(resolve(name)) if row.state == "current"]
        stages = {Stage.TEXT, Stage.DIT, Stage.ENCODER, Stage.DECODER}
        assert {row.stage for row in rows} == stages
        assert len(rows) == 4
        assert sum(row.bytes for row in rows) == pytest.approx(resolve(name).engine_bytes, rel=0.15)


def test_what_a_file_may_declare_is_known():
    by_file = {f"{row.dir}/{row.file}": row for row in catalogue().engines}
    outputs = {port.outputs for port in by_file["same-s/dec_dynamic_bf16.trt"].ports}
    assert outputs == {("pcm_unbounded",), ("audio",)}
    assert by_file["same-s/dec_dynamic_bf16.trt"].latent_min == 32
    assert by_file["same-l/dec_fp16_chunkable_limiter.trt"].plugin
    assert "cond_gate" not in by_file["sa3-m/dit_fp16.trt"].ports[0].inputs
    assert any(row.noisy for row in catalogue().onnx if row.stage is Stage.DECODER)


# ------------------------------------------------------------------------------------ directories


def test_a_directory_is_a_model(tiny, tmp_path):
    """Its key follows the content, not the place."""
    model = resolve(tiny)
    assert re.fullmatch(rf"{tiny.name}-[0-9a-f]{{12}}", model.name)
    assert model.checkpoint == tiny.resolve()
    assert model.objective == "rf_denoiser"
    assert model.stage_dir(Stage.DIT_STEP) == model.stage_dir(Stage.TEXT) == model.name
    copy = tmp_path / tiny.name
    shutil.copytree(tiny, copy)
    assert resolve(str(copy)).name == model.name
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    assert resolve(str(copy)).name != model.name


def test_a_name_wins_over_a_folder_and_a_path_over_a_name(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, tmp_path / "medium")
    assert resolve("medium").repo
    assert resolve("./medium").repo is None
    assert resolve(Path("medium")).repo is None


def test_a_folder_without_configuration_and_one_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ArtefactMissing, match=r"no model_config\.json"):
        resolve(tmp_path)
    (tmp_path / "model_config.json").write_text('{"model_type": "diffusion_cond"}')
    with pytest.raises(CheckpointError, match=r"model_config\.json has no 'model'"):
        resolve(tmp_path)
    for text, said in (
        ("{", "cannot be read as JSON"),
        ("[]", "is no configuration of a model"),
        ('{"model_type": "autoencoder", "sample_size": null}', "is no configuration of a model"),
        ('{"model_type": "diffusion_cond", "model": 3}', "is no configuration of a model"),
    ):
        (tmp_path / "model_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=said):
            resolve(tmp_path)


# ----------------------------------------------------------------------------------------- places


def test_everything_lies_below_the_chosen_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "a b"))
    assert resolve("medium").checkpoint == tmp_path / "a b" / "checkpoints" / "medium"
    assert paths.export_dir("demo", "same-s") == tmp_path / "a b" / "onnx" / "demo" / "same-s"
    for spelling in ("sm_90", "sm90", "90", "9.0", "SM_90"):
        assert paths.engine_dir(spelling, "x") == tmp_path / "a b" / "sm_90" / "x"
    assert not resolve("demo").checkpoint.is_relative_to(tmp_path)
    monkeypatch.delenv("SA3_HOME")
    assert paths.sa3_home() == paths.project_root() / "models"


def test_a_model_is_a_value():
    assert resolve("sm-music") is resolve("small-music")
    with pytest.raises(AttributeError):
        resolve("sm-music").name = "x"
    assert isinstance(resolve("medium"), Model)
