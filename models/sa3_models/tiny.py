"""Random checkpoints in the published layout, from a seed, of any size.

Knows: the files of the layout and sensible scales for random weights. Doesn't know: training: what
such a model renders is noise with the right shape. `python -m sa3_models.tiny DIR` writes one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import TEXT_SUBFOLDER
from sa3_models.config_file import read_model_config, read_text_config
from sa3_models.files import whole_file
from sa3_models.manifest import Shape, model_tensors, text_tensors

__all__ = ["model_config", "random_tensor", "tokenizer_config", "write_checkpoint"]


def model_config(
    family: str = "same-s",
    *,
    latent_dim: int = 32,
    dim: int = 128,
    depth: int = 2,
    heads: int = 2,
    memory_tokens: int = 64,
    coder_dim: int = 128,
    coder_depth: int = 2,
    cond_dim: int = 64,
    differential: bool = False,
    sinusoidal_blocks: int = 0,
    objective: str = "rf_denoiser",
    sample_size: int = 5_292_032,
) -> dict[str, Any]:
    """A `model_config.json` of either family with the given sizes."""

    def coder(side: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "channels": coder_dim,
            "c_mults": [1],
            "strides": [16],
            "latent_dim": latent_dim,
            "transformer_depths": [coder_depth],
            "differential": True,
            "dyt": True,
            "dim_heads": 64,
            "chunk_size": 32,
            "chunk_midpoint_shift": family == "same-s",
            "mask_noise": 0.0,
        }
        config["in_channels" if side == "encoder" else "out_channels"] = 512
        if family == "same-l":
            config["sliding_window"] = [1, 1]
        if side == "decoder":
            config["conv_mapping"] = family == "same-s"
            config["sinusoidal_blocks"] = [sinusoidal_blocks]
        return {"type": "same", "config": config}

    return {
        "model_type": "diffusion_cond_inpaint",
        "sample_size": sample_size,
        "sample_rate": 44_100,
        "audio_channels": 2,
        "model": {
            "pretransform": {
                "type": "autoencoder",
                "config": {
                    "pretransform": {
                        "type": "patched",
                        "config": {"patch_size": 256, "channels": 2},
                    },
                    "encoder": coder("encoder"),
                    "decoder": coder("decoder"),
                    "bottleneck": {"type": "softnorm", "config": {"dim": latent_dim}},
                    "latent_dim": latent_dim,
                    "downsampling_ratio": 4096,
                    "io_channels": 2,
                },
            },
            "conditioning": {
                "configs": [
                    {
                        "id": "prompt",
                        "type": "t5gemma",
                        "config": {
                            "max_length": 256,
                            "padding_mode": "learned",
                            "subfolder": TEXT_SUBFOLDER,
                        },
                    },
                    {
                        "id": "seconds_total",
                        "type": "number",
                        "config": {"min_val": 0, "max_val": 384, "fourier_features_type": "expo"},
                    },
                ],
                "cond_dim": cond_dim,
            },
            "diffusion": {
                "type": "dit",
                "diffusion_objective": objective,
                "cross_attention_cond_ids": ["prompt", "seconds_total"],
                "global_cond_ids": ["seconds_total"],
                "local_add_cond_ids": ["inpaint_mask", "inpaint_masked_input"],
                "sampling_distribution_shift_options": None,
                "config": {
                    "io_channels": latent_dim,
                    "embed_dim": dim,
                    "depth": depth,
                    "num_heads": heads,
                    "cond_token_dim": cond_dim,
                    "global_cond_dim": cond_dim,
                    "local_add_cond_dim": latent_dim + 1,
                    "transformer_type": "continuous_transformer",
                    "global_cond_type": "adaLN",
                    "timestep_features_type": "expo",
                    "timestep_features_dim": 256,
                    "num_memory_tokens": memory_tokens,
                    "attn_kwargs": {"qk_norm": "rms", "differential": differential},
                    "norm_type": "rms_norm",
                    "ff_kwargs": {"mult": 4},
                },
            },
            "io_channels": latent_dim,
        },
    }


def text_config(
    hidden: int = 64, layers: int = 2, heads: int = 2, vocab: int = 512
) -> dict[str, Any]:
    """A T5Gemma `config.json` of the given sizes."""
    return {
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "encoder": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "query_pre_attn_scalar": hidden // heads,
            "attn_logit_softcapping": 50.0,
            "pad_token_id": 0,
        },
    }


def tokenizer_config(vocab: int = 512) -> dict[str, Any]:
    """A byte-fallback BPE `tokenizer.json` with Gemma's conventions and no merges."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *(chr(code) for code in range(33, 127))]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, piece in enumerate(special)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {piece: i for i, piece in enumerate(pieces[:vocab])},
            "merges": [],
        },
    }


def random_tensor(
    name: str, shape: Shape, rng: np.random.Generator, head_dim: int = 64
) -> NDArray[np.float32]:
    """A tensor whose scale keeps activations near one, whatever the depth.

    Norm gains lie around one, matrices have std 1/√fan-in, rotary tables are the real ones.
    """
    if name.endswith("inv_freq"):
        rotary = head_dim // 2
        return (10_000.0 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    sizes = tuple(int(size or 1) for size in shape)
    values = rng.standard_normal(sizes, np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf in {"gamma", "alpha", "scaling_factor", "running_std", "weight_g"}:
        return (1 + 0.1 * values).astype(np.float32)
    if len(sizes) == 1 or leaf in {"bias", "beta"}:
        return (0.1 * values).astype(np.float32)
    if leaf in {"new_tokens", "memory_tokens", "padding_embedding"} or "embed_tokens" in name:
        return (0.2 * values).astype(np.float32)
    return (values / math.sqrt(math.prod(sizes[1:]))).astype(np.float32)


def write_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
) -> Path:
    """Write a small random checkpoint; the same arguments give the same bytes.

    Args:
        directory: created if needed; files in it are replaced.
        seed: of the weights.
        config: `model_config.json`, by default a small SAME-S model.
        text: the text encoder's `config.json`.

    Returns:
        `directory`.
    """
    from safetensors.numpy import save_file

    text_directory = directory / TEXT_SUBFOLDER
    text_directory.mkdir(parents=True, exist_ok=True)
    for path, data in (
        (directory / "model_config.json", config or model_config()),
        (text_directory / "config.json", text or text_config()),
        (text_directory / "tokenizer.json", tokenizer_config()),
        (text_directory / "tokenizer_config.json", {"padding_side": "right"}),
    ):
        with whole_file(path) as part:
            part.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
    rng = np.random.default_rng(seed)
    shapes = {
        directory: model_tensors(read_model_config(directory)),
        text_directory: {
            f"model.encoder.{name}": shape
            for name, shape in text_tensors(read_text_config(text_directory)).items()
        },
    }
    for folder, tensors in shapes.items():
        values = {name: random_tensor(name, shape, rng) for name, shape in tensors.items()}
        with whole_file(folder / "model.safetensors") as part:
            save_file(values, part)
    return directory


def main() -> None:
    """Write the embedded default checkpoint to the directory named on the command line."""
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=("same-s", "same-l"), default="same-s")
    options = parser.parse_args()
    write_checkpoint(
        options.directory,
        seed=options.seed,
        config=model_config(options.family, differential=options.family == "same-l"),
    )


if __name__ == "__main__":
    main()
