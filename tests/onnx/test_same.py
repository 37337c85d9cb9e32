"""The autoencoders' graphs against the reference's goldens and the float64 twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import onnx
from sa3_models.checkpoint import Checkpoint
from sa3_models.errors import CheckpointError
from sa3_models.geometry import LATENT_LEN_MAX, SAMPLES_PER_LATENT
from sa3_models.tiny import model_config, write_checkpoint
from sa3_onnx.author import Author
from sa3_onnx.emulate import emulated
from sa3_onnx.heads import neighbours
from sa3_onnx.same import author_decoder, author_encoder
from sa3_onnx.same_attention import GROUP, Rows, Windows, aligned_block, whole_groups
from sa3_onnx.same_blocks import _Norm
from sa3_onnx.vocabulary import axis_length, reshape, rotary, rotary_tables, slice_axis, transpose

from .twins import layers
from .twins import limiter as limiter_twin
from .twins import same as twin

AUDIO = 2e-5  # about ten times the reference's own noise floor at float32
LOWERINGS = ("primitives", "operators")
Arrays = dict[str, NDArray]
Run = Callable[[NDArray], NDArray]


def runner(g: Author, folder: Path, *, emulate: bool = False) -> Run:
    """Save, check and load a graph of one input; its first output as a function of it."""
    path = folder / f"{g.graph.name}.onnx"
    g.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    model: Any = str(path)
    if emulate:
        model = emulated(onnx.load(str(path))).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # the graphs are tiny
    session = ort.InferenceSession(model, options)
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]


def coder(checkpoint: Checkpoint, folder: Path, lowering: str = "primitives") -> tuple[Run, Run]:
    """The encoder, and the decoder without its limiter."""
    options: dict[str, Any] = {"precision": "fp32", "lowering": lowering}
    return (
        runner(author_encoder(checkpoint, **options), folder),
        runner(author_decoder(checkpoint, limiter=False, **options), folder),
    )


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def close(got: NDArray, want: NDArray, tolerance: float) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.fixture(scope="module", params=LOWERINGS)
def lowering(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def coders(tiny: Path, lowering: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    return coder(Checkpoint(tiny), tmp_path_factory.mktemp("same"), lowering)


def test_sound_equals_the_reference_at_every_length(
    coders: tuple[Run, Run], golden: Callable[[str], Arrays]
) -> None:
    ae = golden("ae")
    for length in (1, 2, 33):
        got = coders[1](np.ascontiguousarray(ae["latents"][:, :, :length]))
        assert got.shape == (1, 2, length * SAMPLES_PER_LATENT), "an odd length must not grow"
        if length == 33:
            got = got[:, :, ::11]
            want = ae["decode.L33.audio.stride11"]
        else:
            want = ae[f"decode.L{length}.audio"]
        close(got, want[:, :, : got.shape[2]], AUDIO)


def test_latents_equal_the_reference_at_every_length(
    coders: tuple[Run, Run], golden: Callable[[str], Arrays]
) -> None:
    ae = golden("ae")
    sound = (ae["audio_i16"][None] / 32768).astype(np.float32)
    for length in (1, 2, 3, 31, 32, 33):
        got = coders[0](np.ascontiguousarray(sound[:, :, : length * SAMPLES_PER_LATENT]))
        close(got, ae[f"encode.L{length}.latents"][:, :, :length], AUDIO)


def test_a_decoder_limits_what_it_decodes(tiny: Path, tmp_path: Path) -> None:
    """PCM is the limited sound; the ceiling is an input only when asked for."""
    checkpoint = Checkpoint(tiny)
    options: dict[str, Any] = {"precision": "fp32", "lowering": "primitives"}
    latent = noise(1, 32, 7)
    raw = runner(author_decoder(checkpoint, limiter=False, **options), tmp_path)(latent)[0]
    pcm = runner(author_decoder(checkpoint, **options), tmp_path)(latent)
    assert pcm.dtype == np.int32
    assert pcm.shape == (1, 7 * SAMPLES_PER_LATENT, 2)
    assert abs(pcm[0] - limiter_twin.pcm(raw.astype(np.float64))).max() <= 1
    author_decoder(checkpoint, ceiling_input=True, **options).save(tmp_path / "ceiling.onnx")
    session = ort.InferenceSession(str(tmp_path / "ceiling.onnx"))
    assert [port.name for port in session.get_inputs()] == ["latent", "limiter_ceiling"]
    inputs = {"latent": latent, "limiter_ceiling": np.array(0.25, np.float32)}
    pcm = session.run(None, inputs)[0]
    assert abs(raw).max() > 0.5, "or little is limited"
    assert abs(pcm[0] - limiter_twin.pcm(raw.astype(np.float64), 0.25)).max() <= 1
    baked = ort.InferenceSession(str(tmp_path / "dec.onnx"))
    assert [port.name for port in baked.get_inputs()] == ["latent"]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param({"family": "same-s", "coder_depth": 1}, id="s-one-block"),
        pytest.param({"family": "same-s", "coder_depth": 5, "coder_dim": 64}, id="s-five-blocks"),
        pytest.param(
            {"family": "same-s", "coder_depth": 2, "coder_dim": 192, "latent_dim": 8},
            id="s-three-heads",
        ),
        pytest.param(
            {"family": "same-s", "coder_depth": 3, "sinusoidal_blocks": 3}, id="s-sinusoidal"
        ),
        pytest.param({"family": "same-l", "coder_depth": 1, "coder_dim": 64}, id="l-one-block"),
        pytest.param(
            {"family": "same-l", "coder_depth": 4, "sinusoidal_blocks": 3, "latent_dim": 24},
            id="l-sinusoidal",
        ),
    ],
)
def test_any_configuration_equals_the_float64_twin(
    tmp_path: Path, family: dict[str, Any], lowering: str
) -> None:
    config = model_config(**family, depth=1, dim=64, heads=1)
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model", seed=3, config=config))
    compare_with_twin(checkpoint, tmp_path, lowering)


def test_wider_windows_and_chunks_equal_the_float64_twin(tmp_path: Path, lowering: str) -> None:
    for family in ("same-s", "same-l"):
        config = model_config(family, coder_dim=64, coder_depth=3, depth=1, dim=64, heads=1)
        for side in ("encoder", "decoder"):
            settings = config["model"]["pretransform"]["config"][side]["config"]
            settings["chunk_size"] = 64
            if family == "same-l":
                settings["sliding_window"] = [2, 2]
        checkpoint = Checkpoint(write_checkpoint(tmp_path / family, config=config))
        ae = checkpoint.config.autoencoder
        assert (ae.chunk_latents, ae.sliding_window) == (4, 2 if family == "same-l" else 0)
        compare_with_twin(checkpoint, tmp_path, lowering)


def compare_with_twin(checkpoint: Checkpoint, folder: Path, lowering: str) -> None:
    w, config = layers.load(checkpoint.autoencoder), checkpoint.config.autoencoder
    encode, decode = coder(checkpoint, folder, lowering)
    for length in (1, 4, 7):
        latent = noise(1, config.latent_dim, length)
        close(decode(latent)[0], twin.decode(w, config, latent[0].astype(np.float64)), AUDIO)
        sound = 0.3 * noise(1, 2, length * SAMPLES_PER_LATENT)
        close(encode(sound)[0], twin.encode(w, config, sound[0].astype(np.float64)), AUDIO)


def test_chunks_of_an_odd_number_of_latents_are_refused(tmp_path: Path) -> None:
    config = model_config("same-s")
    for side in ("encoder", "decoder"):
        config["model"]["pretransform"]["config"][side]["config"]["chunk_size"] = 48
    checkpoint = Checkpoint(write_checkpoint(tmp_path, config=config))
    with pytest.raises(CheckpointError, match="even number of latents"):
        author_decoder(checkpoint, precision="fp32", lowering="primitives")


@pytest.mark.parametrize("reach", [1, 2])
@pytest.mark.parametrize("block", [2, 6, 8, 15])
def test_the_sliding_window_equals_full_masked_attention(
    tmp_path: Path, block: int, reach: int, lowering: str
) -> None:
    """One differential attention, rotation included, at odd, prime and tiny lengths."""
    heads, head, half = 2, 16, 4
    inv_freq = (10_000.0 ** (-np.arange(half) / half)).astype(np.float32)
    g = Author("window", lowering=lowering)
    # q, q2, k, k2, v side by side, one row per group
    x = g.input("x", "float32", ("latent_len", GROUP * 5 * heads * head))
    groups = axis_length(g, x, 0)
    rows = reshape(g, whole_groups(g, x, block), -1, 5 * heads * head)
    windows = Windows.of(g, groups, block, reach)
    side = type("Side", (), {"heads": heads, "head_dim": head, "dim": heads * head})

    def rotate(y, positions, start):
        cos, sin = map(g.constant, rotary_tables(inv_freq, np.arange(start, start + positions)))
        return rotary(g, y, cos, sin, half=half, head=head)

    width, order = 2 * heads * head, np.arange(head)
    v = slice_axis(g, rows, 2 * width, 2**62, 1)
    if lowering == "operators":
        q, k = (slice_axis(g, rows, i * width, (i + 1) * width, 1) for i in range(2))
        y = windows.attend_rows(g, q, k, v, Rows(2 * heads, head, inv_freq))
        order = neighbours(half, head)
    else:
        qk = reshape(g, slice_axis(g, rows, 0, 2 * width, 1), -1, 4 * heads, head)
        y = transpose(g, windows.attend(g, qk, v, side, rotate), 0, 2, 1, 3)
    y = reshape(g, y, -1, width)
    y = slice_axis(g, y, 0, g.op("Mul", groups, g.ints(GROUP)), 0)
    g.output("y", y, "float32", ("tokens", 2 * heads * head))
    run = runner(g, tmp_path)
    for length in (1, 2, 3, 13, 16, 31, 53):
        values = np.tanh(noise(length, GROUP * 5 * heads * head))
        wide = values.reshape(length * GROUP, 5, heads * head).astype(np.float64)
        queries_keys = values.reshape(length * GROUP, 5, heads, head)[:, :4]
        queries_keys[...] = queries_keys[..., order]
        q, q2, k, k2, v = (layers.heads(wide[:, i], heads) for i in range(5))
        q, q2, k, k2 = (layers.rotary(part, inv_freq) for part in (q, q2, k, k2))
        near = abs(np.arange(len(wide))[:, None] - np.arange(len(wide))) <= reach * GROUP
        root = np.sqrt(head)  # the twin scales, the graph is given scaled queries
        parts = [layers.attention(a * root, b, v, near) for a, b in ((q, k), (q2, k2))]
        want = np.concatenate([layers.merge(part) for part in parts], axis=1)
        close(run(values), want, 1e-6)


@pytest.mark.parametrize("name", ["tiny-music", "tiny-medium"])
def test_no_rotation_is_too_large_to_launch(data: Path, tmp_path: Path, name: str) -> None:
    """ONNX Runtime's CUDA kernel counts batch and heads in 16 bits each; heads are few and wide."""
    g = author_decoder(Checkpoint(data / name), precision="fp16", lowering="operators")
    g.save(tmp_path / "dec.onnx")
    model = onnx.load(str(tmp_path / "dec.onnx"), load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.value_info
    }
    turned = [node for node in graph.node if node.op_type == "RotaryEmbedding"]
    depth = Checkpoint(data / name).config.autoencoder.decoder.depth
    assert len(turned) == 2 * depth
    for node in turned:
        _, tokens, width = shapes[node.input[0]]
        heads = next(a.i for a in node.attribute if a.name == "num_heads")
        assert LATENT_LEN_MAX * GROUP / tokens + 2 < 1 << 16, "chunks are the batch"
        assert width // heads > 64, "a block of threads per head"


def test_windows_are_aligned_for_fused_attention() -> None:
    for reach in range(1, 12):
        block = aligned_block(reach)
        assert reach <= block < reach + 8
        assert (block + 2 * reach) * GROUP % 8 == 0


@pytest.mark.parametrize("window_groups", [1, 4, 15])
def test_the_size_of_window_blocks_changes_nothing(
    data: Path, tmp_path: Path, window_groups: int
) -> None:
    checkpoint = Checkpoint(data / "tiny-medium")
    options: dict[str, Any] = {"precision": "fp32", "lowering": "primitives", "limiter": False}
    usual = runner(author_decoder(checkpoint, **options), tmp_path)
    (tmp_path / "other").mkdir()
    g = author_decoder(checkpoint, window_groups=window_groups, **options)
    other = runner(g, tmp_path / "other")
    for length in (1, 2, 7, 29):
        latent = noise(1, 32, length)
        close(other(latent), usual(latent), 2e-6)


@pytest.mark.parametrize(
    ("name", "precision", "lowering", "sound_db", "latents_db"),
    # measured, every rounding emulated: S 46 and 44 dB in BF16, S 64 and 63, L 62 and 64 in FP16
    [
        ("tiny-music", "bf16", "primitives", 42, 41),
        ("tiny-music", "fp16", "primitives", 60, 60),
        ("tiny-music", "fp16", "operators", 60, 60),
        ("tiny-medium", "fp16", "primitives", 60, 60),
        ("tiny-medium", "fp16", "operators", 60, 60),
    ],
)
def test_half_precision_stays_close(
    data: Path,
    tmp_path: Path,
    name: str,
    precision: str,
    lowering: str,
    sound_db: float,
    latents_db: float,
) -> None:
    """CASES 52: signal to error of both tiers, level kept within 1 %."""
    checkpoint = Checkpoint(data / name)
    latent, sound = noise(1, 32, 21), 0.3 * noise(1, 2, 21 * SAMPLES_PER_LATENT)
    results = {}
    for kind in ("fp32", precision):
        options: dict[str, Any] = {"precision": kind, "lowering": lowering}
        encoder = author_encoder(checkpoint, **options)
        decoder = author_decoder(checkpoint, limiter=False, **options)
        half = kind != "fp32"
        results[kind] = (
            runner(decoder, tmp_path, emulate=half)(latent).astype(np.float64),
            runner(encoder, tmp_path, emulate=half)(sound).astype(np.float64),
        )
    for want, got, least in zip(*results.values(), (sound_db, latents_db), strict=True):
        print("DB", 10 * np.log10((want**2).mean() / ((got - want) ** 2).mean()))
        assert 10 * np.log10((want**2).mean() / ((got - want) ** 2).mean()) > least
        assert abs(got.std() / want.std() - 1) < 0.01
        assert (got != want).any()


def test_a_checkpoint_of_the_autoencoder_alone_gives_the_same_graph(
    data: Path, tmp_path: Path
) -> None:
    """The published SAME-S and SAME-L repositories hold keys without prefix."""
    from safetensors.numpy import load_file, save_file

    source = data / "tiny-music"
    config = json.loads((source / "model_config.json").read_text())
    alone = {
        "model_type": "autoencoder",
        "sample_size": config["sample_size"],
        "sample_rate": config["sample_rate"],
        "audio_channels": 2,
        "model": config["model"]["pretransform"]["config"],
    }
    (tmp_path / "model_config.json").write_text(json.dumps(alone))
    lead = "pretransform.model."
    tensors = load_file(source / "model.safetensors")
    own = {k.removeprefix(lead): v for k, v in tensors.items() if k.startswith(lead)}
    save_file(own, tmp_path / "model.safetensors")
    latent, options = noise(1, 32, 5), {"precision": "fp32", "lowering": "primitives"}
    (tmp_path / "whole").mkdir()
    whole = runner(author_decoder(Checkpoint(source), **options), tmp_path / "whole")
    part = runner(author_decoder(Checkpoint(tmp_path), **options), tmp_path)
    np.testing.assert_array_equal(part(latent), whole(latent))


class FewTensors:
    """Stands in for a checkpoint's tensors."""

    def __init__(self, **values: NDArray) -> None:
        self.values = {name.replace("__", "."): np.float32(value) for name, value in values.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray:
        return self.values[name][start:stop]


@pytest.mark.parametrize("shifted", [False, True])
def test_a_norm_with_tiny_gains_keeps_its_shift(tmp_path: Path, shifted: bool) -> None:
    """beta is folded into a quotient by gamma, which may be zero or as small as float32 goes."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((9, 64))
    gamma, beta = rng.standard_normal((2, 64))
    gamma[:6] = 0, 1e-30, -1e-7, 0, 1e-3, -1e-5
    beta[:8] = 3, -2, 5, 0, 20, 1e-9, 0, 1e-30
    weight = rng.standard_normal((16, 64)) / 8
    tensors = FewTensors(
        norm__alpha=[0.7], norm__gamma=gamma, norm__beta=beta, layer__weight=weight
    )
    g = Author("norm", precision="fp16", lowering="operators")
    norm = _Norm(g, g.input("x", "float32", (9, 64)), tensors, "norm", shifted=shifted)
    y = norm.linear("layer", rows=[(0, 16)], label="out")
    g.output("y", y, "float32", (9, 16))
    got = runner(g, tmp_path / "norm", emulate=True)(x=np.float32(x))
    want = (np.float32(gamma) * np.tanh(0.7 * x) + np.float32(beta)) @ weight.T
    # each of 64 terms, at most 20, is rounded to 11 bits, at random
    np.testing.assert_allclose(got, want, atol=20 * 2.0**-11)
