"""A parsed graph to a serialized engine: the one builder code path of both flavours.

Knows: the TensorRT builder API common to 10.15, 11.4 and RTX 1.7. Doesn't know: files beside the
engine, other stages, processes. Networks are strongly typed: precision is in the graph, so there
are no precision flags here; TF32 is off, because fp32 engines are a reference.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sa3_build.order import Order
from sa3_models.errors import BuildFailed

__all__ = ["Built", "build_engine", "unsupported_operators"]

_SCRATCH = re.compile(r"Max Scratch Memory: (\d+) bytes")
_PROFILE = re.compile(r"Constructing optimization profile number (\d+) \[(\d+)/(\d+)\]")
_MEMORY = re.compile(r"OutOfMemory|out of memory|bad_alloc|Cannot allocate memory", re.IGNORECASE)


@dataclass(frozen=True)
class Built:
    """A finished plan: any object with the buffer interface, and each profile's scratch bytes."""

    plan: Any
    scratch: tuple[int, ...]


class _Log:
    """What the builder said: problems to explain a refusal, scratch sizes, progress."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.problems: deque[str] = deque(maxlen=8)
        self.scratch: list[int] = []

    def hear(self, severity: str, message: str) -> None:
        """Take one message of the library."""
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.problems.append(message.strip())
        elif found := _SCRATCH.search(message):
            self.scratch.append(int(found[1]))
        elif found := _PROFILE.search(message):
            self.tell(f"profile {found[2]}/{found[3]}")

    def refusal(self, what: str, cause: str | None = None) -> BuildFailed:
        """An error with the library's own last words."""
        found = " / ".join([*self.problems, *([cause] if cause else [])])
        hint = (
            "close other programs or use --jobs 1: the builder ran out of memory"
            if _MEMORY.search(found)
            else None
        )
        return BuildFailed(what, found=found or "TensorRT gave no reason", hint=hint)


def _logger(trt: Any, log: _Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # the base has no type information
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.hear(severity.name, message)

    return Logger()


def build_engine(order: Order, tell: Callable[[str], None]) -> Built:
    """Build one engine.

    Args:
        order: What to build.
        tell: Hears what the builder is at ("parsing", "profile 1/2").

    Raises:
        BuildFailed: the libraries are missing, the graph is refused, or the build fails; with the
            last errors that TensorRT logged.
    """
    trt = order.flavour.load()
    log = _Log(tell)
    logger = _logger(trt, log)
    try:
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        tell("parsing")
        if not parser.parse_from_file(str(order.source.path)):
            errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
            raise log.refusal(f"{order.name}: TensorRT refuses the graph", "; ".join(errors))
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        order.flavour.aim(trt, config, order.targets)
        for _, shapes in order.profiles:
            if shapes:
                _add_profile(builder, config, shapes, order, log)
        tell("compiling")
        plan = builder.build_serialized_network(network, config)
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        # how the bindings say no outside of the log
        raise log.refusal(
            f"{order.name}: the build failed", f"{type(error).__name__}: {error}"
        ) from error
    if plan is None:
        raise log.refusal(f"{order.name}: the build failed")
    _confirm_targets(order, plan)
    return Built(plan, tuple(log.scratch))


def _add_profile(builder: Any, config: Any, shapes: Any, order: Order, log: _Log) -> None:
    profile = builder.create_optimization_profile()
    for name, (low, opt, high) in shapes.items():
        profile.set_shape(name, low, opt, high)
    if config.add_optimization_profile(profile) < 0:
        raise log.refusal(f"{order.name}: TensorRT refuses a profile", str(shapes))


def _confirm_targets(order: Order, plan: Any) -> None:
    """The header of the plan names what was asked for (where the flavour can read it)."""
    wanted = {target.name for target in order.targets}
    made = order.flavour.targets_of(bytes(memoryview(plan)[:64]))
    if made is not None and set(made) != wanted:
        raise BuildFailed(
            f"{order.name}: the engine is for other targets than asked for",
            found=f"{', '.join(made) or 'none'} instead of {', '.join(sorted(wanted))}",
        )


def unsupported_operators(order: Order) -> tuple[str, ...]:
    """Operators of the graph that the flavour's parser doesn't know.

    Raises:
        BuildFailed: the libraries are missing.
    """
    trt = order.flavour.load()
    logger = _logger(trt, _Log(lambda _: None))
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    kinds = sorted({kind for _, kind in order.source.operators})
    return tuple(kind for kind in kinds if not parser.supports_operator(kind))
