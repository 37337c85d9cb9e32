"""From what a person asks for to finished engines: preflight, missing exports, builds.

Knows: the order of things. Doesn't know: flags, terminals, TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sa3_build.architectures import Architecture, parse_architectures
from sa3_build.build import build_all
from sa3_build.flavours import Flavour, default_flavour, flavour_named
from sa3_build.order import Order
from sa3_build.preflight import check_formats, check_orders, check_targets
from sa3_build.profiles import Range, parse_profile
from sa3_build.recipes import RECIPES
from sa3_build.sources import Piece, check_source, graph_of, is_ready, pieces_for, pull_checkpoints
from sa3_models.errors import UsageError
from sa3_models.gpus import local_architectures
from sa3_models.onnx_file import OnnxFile
from sa3_models.paths import sa3_home
from sa3_models.sidecar import Sidecar
from sa3_models.stages import Precision

__all__ = ["Plan", "Wish", "carry_out", "plan"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What was asked for, as it was written.

    words: models and stages. arch: architectures, () or ("auto",) for the GPUs of this machine.
    source: `--from`: a checkpoint folder, ONNX, or "hub".
    profiles: lengths of the DiT instead of the recipe's.
    """

    words: tuple[str, ...] = ()
    arch: tuple[str, ...] = ()
    flavour: str | None = None
    precision: Precision | None = None
    source: str | None = None
    ceiling: bool = False
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A wish that passed every check that needs no graph.

    pieces: the stages wanted. ranges: profiles that replace the DiT's own, if any.
    """

    pieces: tuple[Piece, ...]
    flavour: Flavour
    targets: tuple[Architecture, ...]
    ranges: tuple[Range, ...]

    def order(self, piece: Piece, graph: OnnxFile) -> Order:
        """The order for one piece."""
        recipe = RECIPES[piece.stage]
        return Order(
            source=graph,
            stage=piece.stage,
            precision=piece.precision,
            ranges=self.ranges if self.ranges and recipe.custom else recipe.ranges,
            flavour=self.flavour,
            targets=self.targets,
            home=sa3_home(),
            stage_dir=piece.stage_dir,
        )

    def ready(self) -> list[Order]:
        """Orders for the pieces whose graph is there already."""
        return [self.order(p, graph_of(p, say=lambda _: None)) for p in self.pieces if is_ready(p)]


def plan(wish: Wish, *, say: Say) -> Plan:
    """Check a wish: flavour, targets, libraries, words, formats, profiles.

    Pulls checkpoints first if the wish says `--from hub`.

    Raises:
        Sa3Error: the first thing that stands in the way.
    """
    flavour = flavour_named(wish.flavour) if wish.flavour else default_flavour()
    ranges = tuple(parse_profile(text) for text in wish.profiles)
    targets = _targets(wish, flavour)
    check_targets(flavour, targets)
    if wish.source == "hub":
        pull_checkpoints(wish.words, say=say)
    pieces = pieces_for(
        wish.words,
        source=None if wish.source == "hub" else wish.source,
        precision=wish.precision,
        ceiling=wish.ceiling,
    )
    for piece in pieces:
        check_formats(piece.name, _FORMATS.get(piece.precision, frozenset()), targets)
    if ranges and not any(RECIPES[piece.stage].custom for piece in pieces):
        raise UsageError("--profile is for the DiT, but no stage of it is asked for")
    if wish.ceiling and not any(piece.ceiling for piece in pieces):
        raise UsageError("--ceiling-input is for exported decoders, but none is asked for")
    for piece in pieces:
        check_source(piece)
    chosen = Plan(pieces, flavour, targets, ranges)
    check_orders(missing(chosen.ready()))
    return chosen


def carry_out(chosen: Plan, *, say: Say, jobs: int = 1) -> list[tuple[Path, Sidecar | None]]:
    """Export what has no graph yet, then build what has no engine yet.

    Returns:
        Every engine asked for, with its record if it was built now (None: it was up to date).

    Raises:
        Sa3Error: an export or a build failed, or the machine is too small for it.
    """
    orders = [chosen.order(piece, graph_of(piece, say=say)) for piece in chosen.pieces]
    check_orders(missing(orders), jobs=jobs)
    built = {
        order.engine(target): sidecar
        for order, sidecar in build_all(orders, say=say, jobs=jobs)
        for target in order.targets
    }
    engines = [order.engine(target) for order in orders for target in order.targets]
    return [(engine, built.get(engine)) for engine in engines]


def missing(orders: Sequence[Order]) -> list[Order]:
    """What of the orders has no engine of the same key yet."""
    return [rest for order in orders if (rest := order.missing()) is not None]


_FORMATS = {"bf16": frozenset({"bfloat16"}), "fp8": frozenset({"float8e4m3fn"})}


def _targets(wish: Wish, flavour: Flavour) -> tuple[Architecture, ...]:
    words = tuple(word for text in wish.arch for word in text.split(",") if word)
    if words and words != ("auto",):
        return parse_architectures(words)
    here = local_architectures()
    if not here:
        raise flavour.missing(()) or UsageError(
            "there is no GPU here to build for", hint="name the targets: --arch sm_86,sm_89,sm_120"
        )
    return parse_architectures(here)
