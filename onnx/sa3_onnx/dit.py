"""The diffusion transformer: prepare (once per render), step (one velocity), whole (both).

Knows: the ports of the three stages. Doesn't know: what either part computes (sa3_onnx.dit_prepare,
sa3_onnx.dit_step), sampling, guidance, files. Each part is authored once; the whole is their
composition, so the three agree.
"""

from __future__ import annotations

from sa3_models.checkpoint import Checkpoint
from sa3_models.stages import Stage
from sa3_onnx.author import Author, Lowering
from sa3_onnx.dit_part import LATENT
from sa3_onnx.dit_prepare import Prepare
from sa3_onnx.dit_step import Step

__all__ = ["author_dit"]


def author_dit(
    checkpoint: Checkpoint, stage: Stage, *, precision: str, lowering: Lowering
) -> Author:
    """Write the graph of `dit`, `dit_prepare` or `dit_step` (ports: docs/architecture.md)."""
    config = checkpoint.config.dit
    assert config is not None
    g = Author(stage.value, precision=precision, lowering=lowering)
    prepare, step = Prepare(g, checkpoint.dit, config), Step(g, checkpoint.dit, config)
    if stage is Stage.DIT_PREPARE:
        for port, tensor in prepare.outputs(prepare.inputs()).items():
            g.output(port.name, tensor, port.dtype, port.shape)
        return g
    x = g.input("x", "float32", (1, config.latent_dim, LATENT))
    t = g.input("t", "float32", (1,))
    conditions = prepare.inputs() if stage is Stage.DIT else {}
    padding = g.input("padding_mask", "float32", (1, LATENT))
    if stage is Stage.DIT:
        prepared = {port.name: tensor for port, tensor in prepare.outputs(conditions).items()}
    else:
        prepared = {p.name: g.input(p.name, p.dtype, p.shape) for p in step.prepared_ports()}
    velocity = step.velocity(x, t, padding, prepared)
    g.output("velocity", velocity, "float32", (1, config.latent_dim, LATENT))
    return g
