"""A TensorRT that builds nothing: the API that sa3_build.engine calls, with a scripted ending.

Importable by the build's own process, because the tests put this folder on the path.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Severity(enum.Enum):
    ERROR = 1
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


@dataclass(frozen=True)
class FakeFlavour:
    """ending: "ok", "none", "raise", "oom", "kill", "exit" or "sleep:<seconds>".

    log: gets a line per build. operators: those the parser does not know.
    """

    log: Path
    ending: str = "ok"
    name: str = "tensorrt-rtx"
    number: str = "1.7.1.116"
    operators: tuple[str, ...] = ()

    def version(self) -> str:
        return self.number

    def missing(self, targets: Any) -> None:
        return None

    def load(self) -> Any:
        return SimpleNamespace(
            ILogger=ILogger,
            Builder=lambda logger: Builder(logger, self),
            OnnxParser=lambda network, logger: Parser(self),
            NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=0),
            BuilderFlag=SimpleNamespace(TF32=1),
        )

    def aim(self, trt: Any, config: Any, targets: Any) -> None:
        config.targets = [row.name for row in targets]

    def targets_of(self, plan_head: bytes) -> None:
        return None


class Parser:
    num_errors = 0

    def __init__(self, flavour: FakeFlavour) -> None:
        self.flavour = flavour

    def parse_from_file(self, path: str) -> bool:
        return True

    def supports_operator(self, kind: str) -> bool:
        return kind not in self.flavour.operators


class Builder:
    def __init__(self, logger: Any, flavour: FakeFlavour) -> None:
        self.logger, self.flavour = logger, flavour

    def create_network(self, flags: int) -> object:
        return object()

    def create_builder_config(self) -> Any:
        profiles: list[Any] = []
        return SimpleNamespace(
            profiles=profiles,
            clear_flag=lambda flag: None,
            add_optimization_profile=lambda profile: profiles.append(profile) or len(profiles) - 1,
        )

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda *shapes: None)

    def build_serialized_network(self, network: object, config: Any) -> bytes | None:
        with self.flavour.log.open("a") as file:
            file.write(f"{' '.join(config.targets)}\n")
        ending, _, seconds = self.flavour.ending.partition(":")
        for index in range(max(1, len(config.profiles))):
            self.logger.log(Severity.INFO, f"Max Scratch Memory: {1000 * (index + 1)} bytes")
        if ending == "sleep":
            time.sleep(float(seconds))
        elif ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif ending == "exit":
            os._exit(7)
        elif ending == "raise":
            raise RuntimeError("the bindings said no")
        elif ending in ("none", "oom"):
            self.logger.log(
                Severity.ERROR,
                "OutOfMemory (Requested size was 183768576 bytes.)"
                if ending == "oom"
                else "Error Code 1: no tactic for layer 17",
            )
            return None
        return b"\x00plan" * 1000
