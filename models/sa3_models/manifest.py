"""Every tensor a checkpoint must hold, with its shape, derived from its configuration.

Knows: names and shapes of the published layout. Doesn't know: values or files. The same table
checks a checkpoint before an export and generates random checkpoints of any size.

A size of None means "any": rotary tables may cover more or fewer of a head's dims.
"""

from __future__ import annotations

from collections.abc import Mapping

from sa3_models.config import AutoencoderConfig, CoderConfig, DitConfig, ModelConfig, TextConfig
from sa3_models.geometry import CHANNELS, PATCH

__all__ = [
    "CODER_FF_MULT",
    "IGNORED",
    "Shape",
    "autoencoder_tensors",
    "conditioner_tensors",
    "dit_tensors",
    "model_tensors",
    "text_tensors",
]

Shape = tuple[int | None, ...]

CODER_FF_MULT = 3  # width factor of the feed-forward layers in SAME

# (pattern, reason): tensors of a published file that no exporter needs
IGNORED: tuple[tuple[str, str], ...] = (
    ("bottleneck.noise_scaling_factor", "the decoder's noise is left out: decoding is exact"),
    ("model.decoder.*", "the text decoder of the encoder-decoder is never run"),
    ("decoder.*", "the text decoder of the encoder-decoder is never run"),
    ("lm_head.*", "the text decoder of the encoder-decoder is never run"),
)


def _linear(name: str, out: int, into: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (out, into)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


def _feed_forward(name: str, dim: int, inner: int) -> dict[str, Shape]:
    return {
        **_linear(f"{name}.ff.0.proj", 2 * inner, dim, bias=True),
        **_linear(f"{name}.ff.2", dim, inner, bias=True),
    }


def dit_tensors(config: DitConfig) -> dict[str, Shape]:
    """Tensors of the DiT, names after `model.model.`."""
    dim, head, latent = config.dim, config.head_dim, config.latent_dim
    streams = 2 if config.differential else 1  # differential attention has a second q and k
    out: dict[str, Shape] = {
        "preprocess_conv.weight": (latent, latent, 1),
        "postprocess_conv.weight": (latent, latent, 1),
        "transformer.memory_tokens": (config.memory_tokens, dim),
        "transformer.rotary_pos_emb.inv_freq": (None,),
        **_linear("to_timestep_embed.0", dim, config.time_features, bias=True),
        **_linear("to_timestep_embed.2", dim, dim, bias=True),
        **_linear("to_cond_embed.0", dim, config.cond_dim, bias=False),
        **_linear("to_cond_embed.2", dim, dim, bias=False),
        **_linear("to_global_embed.0", dim, config.global_dim, bias=False),
        **_linear("to_global_embed.2", dim, dim, bias=False),
        **_linear("transformer.project_in", dim, latent, bias=False),
        **_linear("transformer.project_out", latent, dim, bias=False),
        **_linear("transformer.global_cond_embedder.0", dim, dim, bias=True),
        **_linear("transformer.global_cond_embedder.2", 6 * dim, dim, bias=True),
    }
    if config.memory_tokens == 0:
        del out["transformer.memory_tokens"]
    for i in range(config.depth):
        block = f"transformer.layers.{i}"
        out[f"{block}.to_scale_shift_gate"] = (6 * dim,)
        for norm in ("pre_norm", "cross_attend_norm", "ff_norm"):
            out[f"{block}.{norm}.gamma"] = (dim,)
        for attention in ("self_attn", "cross_attn"):
            out[f"{block}.{attention}.q_norm.gamma"] = (head,)
            out[f"{block}.{attention}.k_norm.gamma"] = (head,)
            out |= _linear(f"{block}.{attention}.to_out", dim, dim, bias=False)
        out |= _linear(f"{block}.self_attn.to_qkv", (2 * streams + 1) * dim, dim, bias=False)
        out |= _linear(f"{block}.cross_attn.to_q", streams * dim, dim, bias=False)
        out |= _linear(f"{block}.cross_attn.to_kv", (streams + 1) * dim, dim, bias=False)
        out |= _feed_forward(f"{block}.ff", dim, config.ff_mult * dim)
        out |= _linear(f"{block}.to_local_embed.0", dim, latent + 1, bias=True)
        out |= _linear(f"{block}.to_local_embed.2", dim, dim, bias=True)
    return out


def conditioner_tensors(config: DitConfig) -> dict[str, Shape]:
    """Tensors of the conditioners, names after `conditioner.conditioners.`."""
    seconds = "seconds_total.embedder.embedding.1"
    return {
        "prompt.padding_embedding": (config.cond_dim,),
        **_linear(seconds, config.global_dim, config.time_features, bias=True),
    }


def _coder(config: CoderConfig, name: str, into: int, out: int) -> dict[str, Shape]:
    dim = config.dim
    shapes: dict[str, Shape] = {
        f"{name}.new_tokens": (1, 1, dim),
        f"{name}.mapping.weight_g": (out, 1, 1),
        f"{name}.mapping.weight_v": (out, into, config.kernel),
        f"{name}.mapping.bias": (out,),
    }
    for i in range(config.depth):
        block = f"{name}.transformers.{i}"
        norms = {"pre_norm": dim, "ff_norm": dim}
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
        for norm, width in norms.items():
            shapes |= {
                f"{block}.{norm}.alpha": (1,),
                f"{block}.{norm}.gamma": (width,),
                f"{block}.{norm}.beta": (width,),
            }
        shapes |= _linear(f"{block}.self_attn.to_qkv", 5 * dim, dim, bias=False)
        shapes |= _linear(f"{block}.self_attn.to_out", dim, dim, bias=False)
        shapes |= _feed_forward(f"{block}.ff", dim, CODER_FF_MULT * dim)
        shapes[f"{block}.rope.inv_freq"] = (None,)
    return shapes


def autoencoder_tensors(config: AutoencoderConfig) -> dict[str, Shape]:
    """Tensors of a SAME autoencoder, names as in a stand-alone file."""
    latent, patch = config.latent_dim, CHANNELS * PATCH
    encoder, decoder = config.encoder, config.decoder
    return {
        "bottleneck.scaling_factor": (1, latent, 1),
        "bottleneck.bias": (1, latent, 1),
        "bottleneck.running_std": (1,),
        **_coder(encoder, "encoder.layers.0", patch, encoder.dim),
        **_linear("encoder.layers.2", latent, encoder.dim, bias=True),
        **_linear("decoder.layers.1", decoder.dim, latent, bias=True),
        **_coder(decoder, "decoder.layers.3", decoder.dim, patch),
    }


def text_tensors(config: TextConfig) -> dict[str, Shape]:
    """Tensors of the T5Gemma encoder, names without prefix."""
    hidden, inner = config.hidden, config.intermediate
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    out: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab, hidden),
        "norm.weight": (hidden,),
    }
    for i in range(config.layers):
        layer = f"layers.{i}"
        for norm in (
            "pre_self_attn_layernorm",
            "post_self_attn_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            out[f"{layer}.{norm}.weight"] = (hidden,)
        out |= {
            f"{layer}.self_attn.q_proj.weight": (wide, hidden),
            f"{layer}.self_attn.k_proj.weight": (narrow, hidden),
            f"{layer}.self_attn.v_proj.weight": (narrow, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, wide),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return out


def model_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """Tensors of `model.safetensors` with their full names."""
    coder = autoencoder_tensors(config.autoencoder)
    if config.dit is None:
        return coder
    return {
        **{f"model.model.{name}": shape for name, shape in dit_tensors(config.dit).items()},
        **{f"pretransform.model.{name}": shape for name, shape in coder.items()},
        **{
            f"conditioner.conditioners.{name}": shape
            for name, shape in conditioner_tensors(config.dit).items()
        },
    }
