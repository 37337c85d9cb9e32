"""kernels.cu to machine code, through NVRTC, kept on disk.

Knows: compiler options, the cache file. Doesn't know: what the kernels compute. With a cached file
NVRTC isn't even loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from sa3_models.errors import MachineMismatch, RunFailed
from sa3_models.files import whole_file
from sa3_models.paths import cache_dir

__all__ = ["compiled_kernels", "source_path"]

OPTIONS = ("--std=c++17", "--fmad=false")  # sums round as written: see kernels.cu


def source_path() -> Path:
    """The file with the kernels."""
    return Path(__file__).with_name("kernels.cu")


def compiled_kernels(architecture: str) -> bytes:
    """Machine code of all kernels for an architecture ("sm_90").

    Read from the cache when source, options and architecture are the same; a cache that can't be
    written is no error.

    Raises:
        MachineMismatch: NVRTC isn't installed, or is older than the GPU and its driver can't help.
        RunFailed: the source doesn't compile.
    """
    source = source_path().read_bytes()
    digest = hashlib.sha256(b"\0".join([source, architecture.encode(), *map(str.encode, OPTIONS)]))
    cached = cache_dir() / "kernels" / f"{architecture}-{digest.hexdigest()[:16]}.cubin"
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    code = _compile(source, architecture)
    with contextlib.suppress(OSError), whole_file(cached) as part:
        part.write_bytes(code)
    return code


def _compile(source: bytes, architecture: str) -> bytes:
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status):
            raise RunFailed("NVRTC failed", found=nvrtc.nvrtcGetErrorString(status)[1].decode())
        return values[0] if len(values) == 1 else values

    try:
        count = check(nvrtc.nvrtcGetNumSupportedArchs())
    except (RuntimeError, OSError) as error:  # the library behind the module isn't there
        raise MachineMismatch(
            "NVRTC, the compiler of the CUDA kernels, is not installed",
            found=str(error).partition(". ")[0][:120],
            hint="pip install nvidia-cuda-nvrtc",
        ) from error
    known = sorted(check(nvrtc.nvrtcGetSupportedArchs())[:count])
    capability = int(architecture.removeprefix("sm_"))
    # a GPU newer than NVRTC gets PTX of the newest known one, which its driver compiles
    native = capability in known
    virtual = max((c for c in known if c <= capability), default=None)
    if virtual is None:
        raise MachineMismatch(
            f"this GPU ({architecture}) is too old", found=f"NVRTC compiles for sm_{known[0]} up"
        )
    target = f"--gpu-architecture={f'sm_{capability}' if native else f'compute_{virtual}'}"
    program = check(nvrtc.nvrtcCreateProgram(source, b"kernels.cu", 0, [], []))
    options = [option.encode() for option in (target, *OPTIONS)]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
        log = bytes(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RunFailed("kernels.cu does not compile", found=log.decode(errors="replace").strip())
    size, read = (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        if native
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    code = bytes(check(size(program)))  # the call below writes into it
    check(read(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    return code
