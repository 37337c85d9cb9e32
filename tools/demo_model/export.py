"""Write the trained weights as a checkpoint in the published layout.

Knows: the files of the layout and what the sizes are called in them. Doesn't know: training.
`python -m tools.demo_model.export --weights output/demo --to models/demo`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tools.demo_model.model import PATCH, SAMPLES_PER_LATENT, STRIDE, Sizes
from tools.demo_model.train import FRAMES
from torch import Tensor

TEXT_FOLDER = "t5gemma-b-b-ul2"
# part of the DiT's training file: name in the published one
PARTS = {"dit.": "model.", "cond.": "conditioner."}


def _coder(sizes: Sizes, side: str, depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "in_channels" if side == "encoder" else "out_channels": 2 * PATCH,
        "channels": sizes.ae_dim,
        "c_mults": [1],
        "strides": [STRIDE],
        "latent_dim": sizes.latent_dim,
        "transformer_depths": [depth],
        "differential": True,
        "dyt": True,
        "dim_heads": sizes.ae_head_dim,
        "chunk_size": 2 * STRIDE,
        "chunk_midpoint_shift": True,
        "mask_noise": 0.0,
    }
    if side == "decoder":
        config["conv_mapping"] = True
        config["sinusoidal_blocks"] = [0]
    return {"type": "same", "config": config}


def model_config(sizes: Sizes, objective: str) -> dict[str, Any]:
    """`model_config.json`: sample_size is the longest clip in training, in samples."""
    autoencoder = {
        "pretransform": {"type": "patched", "config": {"patch_size": PATCH, "channels": 2}},
        "encoder": _coder(sizes, "encoder", sizes.ae_encoder_depth),
        "decoder": _coder(sizes, "decoder", sizes.ae_decoder_depth),
        "bottleneck": {"type": "softnorm", "config": {"dim": sizes.latent_dim}},
        "latent_dim": sizes.latent_dim,
        "downsampling_ratio": SAMPLES_PER_LATENT,
        "io_channels": 2,
    }
    prompt = {"max_length": 256, "padding_mode": "learned", "subfolder": TEXT_FOLDER}
    seconds = {"min_val": 0, "max_val": 384, "fourier_features_type": "expo"}
    dit = {
        "io_channels": sizes.latent_dim,
        "embed_dim": sizes.dim,
        "depth": sizes.depth,
        "num_heads": sizes.dim // sizes.head_dim,
        "cond_token_dim": sizes.cond_dim,
        "global_cond_dim": sizes.cond_dim,
        "local_add_cond_dim": sizes.latent_dim + 1,
        "transformer_type": "continuous_transformer",
        "global_cond_type": "adaLN",
        "timestep_features_type": "expo",
        "timestep_features_dim": 256,
        "num_memory_tokens": sizes.memory_tokens,
        "attn_kwargs": {"qk_norm": "rms", "differential": False},
        "norm_type": "rms_norm",
        "ff_kwargs": {"mult": sizes.ff_mult},
    }
    return {
        "model_type": "diffusion_cond_inpaint",
        "sample_size": FRAMES * SAMPLES_PER_LATENT,
        "sample_rate": 44_100,
        "audio_channels": 2,
        "model": {
            "pretransform": {"type": "autoencoder", "config": autoencoder},
            "conditioning": {
                "configs": [
                    {"id": "prompt", "type": "t5gemma", "config": prompt},
                    {"id": "seconds_total", "type": "number", "config": seconds},
                ],
                "cond_dim": sizes.cond_dim,
            },
            "diffusion": {
                "type": "dit",
                "diffusion_objective": objective,
                "cross_attention_cond_ids": ["prompt", "seconds_total"],
                "global_cond_ids": ["seconds_total"],
                "local_add_cond_ids": ["inpaint_mask", "inpaint_masked_input"],
                # how training drew its times, and the lengths of its clips in latents
                "distribution_shift_options": {
                    "type": "logsnr",
                    "min_length": 10,
                    "max_length": FRAMES,
                },
                "sampling_distribution_shift_options": None,
                "config": dit,
            },
            "io_channels": sizes.latent_dim,
        },
    }


def text_config(sizes: Sizes) -> dict[str, Any]:
    """The text encoder's `config.json`."""
    head_dim = sizes.cond_dim // sizes.text_heads
    encoder = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.cond_dim,
        "intermediate_size": sizes.text_mlp,
        "num_hidden_layers": sizes.text_layers,
        "num_attention_heads": sizes.text_heads,
        "num_key_value_heads": sizes.text_heads,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "query_pre_attn_scalar": head_dim,
        "attn_logit_softcapping": 50.0,
        "pad_token_id": 0,
    }
    return {"model_type": "t5gemma", "is_encoder_decoder": True, "encoder": encoder}


def half(name: str, tensor: Tensor) -> Tensor:
    """F16, but rotary tables F32."""
    return (tensor.float() if "inv_freq" in name else tensor.half()).contiguous()


def export(weights: Path, target: Path, dit: str, sizes: Sizes, objective: str) -> None:
    """Write `target` from codec.safetensors, a DiT's file and the tokenizer in `weights`."""
    folder = target / TEXT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"pretransform.model.{name}": tensor
        for name, tensor in load_file(weights / "codec.safetensors").items()
    }
    text = {}
    for name, tensor in load_file(weights / dit).items():
        if name.startswith("text."):
            text[name.removeprefix("text.")] = half(name, tensor)
            continue
        lead = next(lead for lead in PARTS if name.startswith(lead))
        state[PARTS[lead] + name.removeprefix(lead)] = tensor
    state = {name: half(name, tensor) for name, tensor in state.items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    for path, data in (
        (target / "model_config.json", model_config(sizes, objective)),
        (folder / "config.json", text_config(sizes)),
    ):
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(weights / name, folder / name)


def main() -> None:
    """Parse and go."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--weights", type=Path, default=Path("output/demo"))
    p.add_argument("--dit", default="dit.safetensors", help="or dit_raw.safetensors")
    p.add_argument("--to", type=Path, default=Path("models/demo"))
    p.add_argument("--head", type=int, default=32, help="head dim of the autoencoder")
    p.add_argument("--objective", default="rf_denoiser", choices=["rf_denoiser", "rectified_flow"])
    a = p.parse_args()
    export(a.weights, a.to, a.dit, Sizes(ae_head_dim=a.head), a.objective)


if __name__ == "__main__":
    main()
