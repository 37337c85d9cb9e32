"""`model_config.json` and the text encoder's `config.json` as typed, checked values.

Knows: the keys of the published files and what this project can compute. Doesn't know: tensors.
Nothing is hard-coded: sizes come from the files, and a setting that would change the mathematics
in a way the exporters do not implement is refused by name instead of being ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sa3_models.config import (
    TEXT_SUBFOLDER,
    AutoencoderConfig,
    CoderConfig,
    DitConfig,
    ModelConfig,
    Shift,
    TextConfig,
)
from sa3_models.errors import CheckpointError
from sa3_models.geometry import CHANNELS, PATCH, SAMPLE_RATE, SAMPLES_PER_LATENT, STRIDE

__all__ = ["read_model_config", "read_text_config"]


class _Reader:
    """Nested lookups that name the key they miss."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def get(self, key: str, default: Any = ...) -> Any:
        node: Any = self.data
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                if default is ...:
                    raise CheckpointError(
                        f"{self.where} has no '{key}'",
                        hint="this is not a Stable Audio 3 configuration this project knows",
                    )
                return default
            node = node[part]
        return node

    def at(self, key: str) -> _Reader:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"'{key}' in {self.where} is not an object", found=repr(value))
        return _Reader(value, f"{self.where}:{key}")

    def whole(self, key: str, default: Any = ...) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"'{key}' in {self.where} must be a whole number ≥ 0", found=repr(value)
            )
        return value

    def expect(self, key: str, *allowed: Any, default: Any = ...) -> Any:
        value = self.get(key, default)
        if value not in allowed:
            raise CheckpointError(
                f"'{key}' in {self.where} is not supported",
                found=repr(value),
                hint=f"supported: {', '.join(map(repr, allowed))}",
            )
        return value


def _load_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} is not a checkpoint directory",
            found=f"no {path.name} in it",
            hint="give a directory with model_config.json, model.safetensors and "
            f"{TEXT_SUBFOLDER}/",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON", found=str(error)) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold one JSON object", found=type(data).__name__)
    return data


def _coder(reader: _Reader, kind: str) -> CoderConfig:
    side = reader.at(f"{kind}.config")
    reader.expect(f"{kind}.type", "same")
    side.expect("differential", True)
    side.expect("dyt", True)
    if side.whole("strides") != STRIDE:
        raise CheckpointError(f"'strides' in {side.where} must be {STRIDE}")
    return CoderConfig(
        dim=side.whole("channels") * side.whole("c_mults"),
        depth=side.whole("transformer_depths"),
        head_dim=side.whole("dim_heads"),
        sinusoidal_blocks=side.whole("sinusoidal_blocks", 0),
        kernel=3 if side.get("conv_mapping", False) else 1,
    )


def _autoencoder(reader: _Reader) -> AutoencoderConfig:
    reader.expect("pretransform.type", "patched")
    reader.expect("pretransform.config.patch_size", PATCH)
    reader.expect("pretransform.config.channels", CHANNELS)
    reader.expect("downsampling_ratio", SAMPLES_PER_LATENT, default=SAMPLES_PER_LATENT)
    reader.expect("bottleneck.type", "softnorm")
    decoder = reader.at("decoder.config")
    window = decoder.get("sliding_window", None)
    shifted = decoder.get("chunk_midpoint_shift", False)
    if window is None and not shifted:
        raise CheckpointError(
            f"{decoder.where} has neither 'sliding_window' nor 'chunk_midpoint_shift'",
            hint="only the SAME-S and SAME-L autoencoders are supported",
        )
    if window is not None and (len(window) != 2 or window[0] != window[1]):
        raise CheckpointError(
            f"'sliding_window' in {decoder.where} must be symmetric", found=repr(window)
        )
    chunk = decoder.whole("chunk_size")
    if window is None and (chunk == 0 or chunk % STRIDE):
        raise CheckpointError(
            f"'chunk_size' in {decoder.where} must be a multiple of {STRIDE}", found=str(chunk)
        )
    return AutoencoderConfig(
        family="same-s" if window is None else "same-l",
        latent_dim=reader.whole("latent_dim"),
        encoder=_coder(reader, "encoder"),
        decoder=_coder(reader, "decoder"),
        chunk_latents=chunk // STRIDE,
        sliding_window=int(window[0]) if window is not None else 0,
    )


def _shift(options: Any, where: str) -> Shift:
    if options is None:
        return Shift()
    reader = _Reader(options, where)
    kind = reader.expect("type", "logsnr", "full", "full_sine", "flux", "none", default="full")
    return Shift(
        kind=kind,
        min_length=reader.whole("min_length", 256),
        max_length=reader.whole("max_length", 4096),
        rate=float(reader.get("rate", 0.0)),
        alpha_min=reader.get("alpha_min", None),
        alpha_max=reader.get("alpha_max", None),
    )


def _dit(model: _Reader) -> DitConfig:
    diffusion = model.at("diffusion")
    diffusion.expect("type", "dit")
    diffusion.expect("global_cond_ids", ["seconds_total"])
    diffusion.expect("cross_attention_cond_ids", ["prompt", "seconds_total"])
    diffusion.expect("local_add_cond_ids", ["inpaint_mask", "inpaint_masked_input"])
    dit = diffusion.at("config")
    dit.expect("transformer_type", "continuous_transformer", default="continuous_transformer")
    dit.expect("global_cond_type", "adaLN")
    dit.expect("timestep_features_type", "expo")
    dit.expect("norm_type", "rms_norm")
    dit.expect("attn_kwargs.qk_norm", "rms")
    conditioners = {row["id"]: row for row in model.get("conditioning.configs")}
    prompt, seconds = conditioners.get("prompt"), conditioners.get("seconds_total")
    if prompt is None or seconds is None:
        raise CheckpointError(
            f"{model.where} must condition on 'prompt' and 'seconds_total'",
            found=", ".join(conditioners) or "nothing",
        )
    prompt_reader = _Reader(prompt, f"{model.where}:conditioning.prompt")
    prompt_reader.expect("type", "t5gemma")
    prompt_reader.expect("config.padding_mode", "learned")
    seconds_reader = _Reader(seconds, f"{model.where}:conditioning.seconds_total")
    seconds_reader.expect("config.fourier_features_type", "expo")
    seconds_reader.expect("config.min_val", 0)
    dim, heads = dit.whole("embed_dim"), dit.whole("num_heads")
    if heads == 0 or dim % heads:
        raise CheckpointError(
            f"'embed_dim' in {dit.where} must be a multiple of 'num_heads'",
            found=f"{dim} and {heads}",
        )
    latent = dit.whole("io_channels")
    if dit.whole("local_add_cond_dim") != latent + 1:
        raise CheckpointError(
            f"'local_add_cond_dim' in {dit.where} must be io_channels + 1",
            found=str(dit.get("local_add_cond_dim")),
        )
    return DitConfig(
        latent_dim=latent,
        dim=dim,
        depth=dit.whole("depth"),
        heads=heads,
        cond_dim=dit.whole("cond_token_dim"),
        global_dim=dit.whole("global_cond_dim"),
        memory_tokens=dit.whole("num_memory_tokens", 0),
        time_features=dit.whole("timestep_features_dim", 256),
        ff_mult=dit.whole("ff_kwargs.mult", 4),
        differential=bool(dit.get("attn_kwargs.differential", False)),
        seconds_max=float(seconds_reader.get("config.max_val")),
    )


def read_model_config(directory: Path) -> ModelConfig:
    """Read and check `model_config.json` of a checkpoint directory.

    Raises:
        CheckpointError: no such file, not JSON, another family, or an unsupported setting.
    """
    path = directory / "model_config.json"
    reader = _Reader(_load_json(path), str(path))
    reader.expect("sample_rate", SAMPLE_RATE)
    reader.expect("audio_channels", CHANNELS, default=CHANNELS)
    kind = reader.expect("model_type", "diffusion_cond_inpaint", "autoencoder")
    model = reader.at("model")
    if kind == "autoencoder":
        return ModelConfig(
            autoencoder=_autoencoder(model),
            dit=None,
            objective=None,
            shift=Shift(),
            sample_size=reader.whole("sample_size"),
            text_subfolder=TEXT_SUBFOLDER,
        )
    subfolder = next(
        (
            row.get("config", {}).get("subfolder", TEXT_SUBFOLDER)
            for row in model.get("conditioning.configs")
            if row.get("id") == "prompt"
        ),
        TEXT_SUBFOLDER,
    )
    autoencoder = _autoencoder(model.at("pretransform.config"))
    dit = _dit(model)
    if autoencoder.latent_dim != dit.latent_dim:
        raise CheckpointError(
            f"{path} joins an autoencoder and a DiT of different latent sizes",
            found=f"{autoencoder.latent_dim} and {dit.latent_dim}",
        )
    return ModelConfig(
        autoencoder=autoencoder,
        dit=dit,
        objective=model.expect("diffusion.diffusion_objective", "rf_denoiser", "rectified_flow"),
        shift=_shift(
            model.get("diffusion.sampling_distribution_shift_options", None),
            f"{path}:sampling_distribution_shift_options",
        ),
        sample_size=reader.whole("sample_size"),
        text_subfolder=subfolder,
        trained_latents=model.whole("diffusion.distribution_shift_options.min_length", 256),
    )


def read_text_config(directory: Path) -> TextConfig:
    """Read and check the text encoder's `config.json` (old and new spelling of transformers).

    Args:
        directory: the text encoder's own directory (`…/t5gemma-b-b-ul2`).
    """
    path = directory / "config.json"
    data = _load_json(path)
    reader = _Reader(data.get("encoder", data), str(path))
    reader.expect("hidden_activation", "gelu_pytorch_tanh")
    theta = reader.get("rope_theta", None) or reader.get("rope_parameters.rope_theta")
    config = TextConfig(
        hidden=reader.whole("hidden_size"),
        layers=reader.whole("num_hidden_layers"),
        heads=reader.whole("num_attention_heads"),
        kv_heads=reader.whole("num_key_value_heads"),
        head_dim=reader.whole("head_dim"),
        intermediate=reader.whole("intermediate_size"),
        vocab=reader.whole("vocab_size"),
        eps=float(reader.get("rms_norm_eps")),
        rope_theta=float(theta),
        query_scalar=float(reader.get("query_pre_attn_scalar")),
        softcap=float(reader.get("attn_logit_softcapping", None) or 0.0),
    )
    if config.kv_heads == 0 or config.heads % config.kv_heads:
        raise CheckpointError(
            f"{path} has {config.heads} heads over {config.kv_heads} key-value heads",
            hint="the first must be a multiple of the second",
        )
    return config
