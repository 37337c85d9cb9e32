"""Stages on a GPU through ONNX Runtime's CUDA provider, on the device's own stream.

Knows: provider options, input and output binding, what makes a session capturable. Doesn't know:
plans, graphs, TensorRT. A session computes on the stream it is given and isn't waited for, so that
its runs can be captured into the graph of a whole render.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import MachineMismatch, RunFailed, first_line
from sa3_models.geometry import LATENT_LEN_MAX, SAMPLES_PER_LATENT
from sa3_models.onnx_file import read_onnx
from sa3_models.stages import Stage, StageIO
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory

if TYPE_CHECKING:
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import Tensor

__all__ = ["OrtCudaStage", "onnx_runtime"]

PROVIDER = "CUDAExecutionProvider"
_STDOUT = threading.Lock()  # two threads that divert it would not bring it back
_CUDART = "libcudart.so.13"  # what the provider is linked with
_FATAL_ONLY = 4  # ONNX Runtime log severity
_MEMORY_SIGNS = (
    *("out of memory", "failed to allocate", "bfcarena"),
    *("alloc_failed", "allocation_failed", "allocation failed"),  # cuBLAS and cuDNN
)
_BFLOAT16 = 16  # ONNX's number for a type NumPy hasn't
_CODERS = (Stage.ENCODER, Stage.DECODER)
# They cut their sequence by arithmetic on its length. ONNX Runtime does that on the host, and host
# work between GPU work can't be captured: their sessions are made for one length, where all of it
# is constant.
_ONE_LENGTH = _CODERS
# Theirs is attention in many short chunks or windows: flash attention, which ONNX Runtime would
# take, fills tiles of 128 queries and needs twice the time (docs/benchmarks-cuda.md).
_EFFICIENT_ATTENTION = "2"
# Device memory of a run beyond weights and ports, in bytes: (fixed, per latent). Measured on the
# largest published sizes, medium's (bench/cuda_stage.py), and a little more: smaller models are
# overestimated, SAME-S by half. The whole DiT isn't measured.
_SCRATCH = {
    Stage.TEXT: (32 << 20, 0),
    Stage.DIT_PREPARE: (48 << 20, 8 << 10),
    Stage.DIT_STEP: (64 << 20, 64 << 10),
    Stage.DIT: (128 << 20, 256 << 10),
    Stage.ENCODER: (192 << 20, 25 << 17),  # as the decoder
    Stage.DECODER: (192 << 20, 25 << 17),  # SAME-L: 3.1 MiB per latent
}


class OrtCudaStage:
    """One ONNX file in an ONNX Runtime CUDA session."""

    shares_scratch = False  # a session keeps a memory pool of its own

    def __init__(self, stage: Stage, path: Path, driver: Driver) -> None:
        """Read the facts of a file; nothing is loaded.

        Raises:
            ArtefactMissing: the file or its data isn't there, or is no ONNX.
        """
        graph = read_onnx(path)
        self.path = path
        self.io: StageIO = graph.io
        self.latent_range = (1, LATENT_LEN_MAX)
        self.weight_bytes = sum(file.stat().st_size for file in (path, *graph.data))
        self.description = "ONNX Runtime"
        self._stage = stage
        self._driver = driver
        self._any: Any = None  # a session for all lengths
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._fresh: dict[int, Any] = {}  # loaded, not yet prepared: kept until then

    def scratch_bytes(self, latent_len: int) -> int:
        """Memory of a run, from measured numbers."""
        fixed, per_latent = _SCRATCH[self._stage]
        return fixed + per_latent * latent_len

    def load(self, latent_lens: Iterable[int]) -> None:
        """Open a session, or one for each length where a session takes just one.

        Raises:
            MachineMismatch: this ONNX Runtime has no CUDA, or its CUDA doesn't start.
            RunFailed: the file is refused.
        """
        if self._stage in _ONE_LENGTH:
            lengths = set(latent_lens)
            # what was loaded for a run that failed before it came to this stage
            self._fresh = {n: session for n, session in self._fresh.items() if n in lengths}
            for length in sorted(lengths):
                if length not in self._pinned:
                    self._fresh[length] = self._pinned[length] = self._open(length)
        elif self._any is None:
            self._any = self._open(None)

    def prepare(self, latent_len: int) -> OrtCall:
        """A call for one length."""
        if self._stage not in _ONE_LENGTH:
            self.load(())
            return OrtCall(self._any, self.path.name, self._driver.index, held_bytes=0)
        session = self._fresh.pop(latent_len, None) or self._pinned.get(latent_len)
        if session is None:  # it went with the last recording of this length
            session = self._pinned[latent_len] = self._open(latent_len)
        return OrtCall(session, self.path.name, self._driver.index, held_bytes=self.weight_bytes)

    def unload(self) -> None:
        """Give weights and memory pools back."""
        self._any = None
        self._fresh.clear()

    def _open(self, latent_len: int | None) -> Any:
        """A session, for one length or for all."""
        ort = onnx_runtime()
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.intra_op_num_threads = 1
        # a pattern would take the memory of a second run anew, in one piece, during the capture
        options.enable_mem_pattern = False
        if latent_len is not None:
            sizes = {"latent_len": latent_len, "samples": latent_len * SAMPLES_PER_LATENT}
            for name, size in sizes.items():
                options.add_free_dimension_override_by_name(name, size)
        # weights outside of the pool: the pool holds what a run needs and nothing else
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        provider = {
            "device_id": str(self._driver.index),
            "user_compute_stream": str(self._driver.stream),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": "HEURISTIC",  # nothing is timed: the same choice every time
            "use_tf32": "0",  # fp32 files are a reference
        }
        if self._stage in _CODERS:
            provider["sdpa_kernel"] = _EFFICIENT_ATTENTION
        try:
            session = ort.InferenceSession(
                str(self.path.resolve()),
                options,
                providers=[(PROVIDER, provider), "CPUExecutionProvider"],
            )
        except Exception as error:  # ONNX Runtime has no common base class
            raise _explained(f"{self.path.name} could not be loaded", error) from error
        if session.get_providers()[0] != PROVIDER:
            raise MachineMismatch(
                "ONNX Runtime could not start CUDA",
                found=f"it offers {', '.join(session.get_providers())}",
                hint="onnxruntime-gpu needs CUDA 13 and cuDNN 9: ./install.sh, or --device cpu",
            )
        return session


class OrtCall:
    """Runs of a session on addresses; bindings live as long as graphs captured with them."""

    scratch_bytes = 0

    def __init__(self, session: Any, name: str, index: int, *, held_bytes: int) -> None:
        """Take a loaded session on GPU number `index`."""
        import onnxruntime as ort

        self.held_bytes = held_bytes
        self._session, self._name, self._index = session, name, index
        self._bindings: list[Any] = []
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def enqueue(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, scratch: int
    ) -> None:
        """Enqueue one run. `scratch` isn't used: a session has its own pool.

        Raises:
            RunFailed: ONNX Runtime failed; OutOfDeviceMemory where that was the reason.
        """
        binding = self._session.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for port, tensor in tensors.items():
                kind = _BFLOAT16 if tensor.dtype == "bfloat16" else _element_type(tensor.dtype)
                bind(port, "cuda", self._index, kind, tensor.shape, tensor.address)
        self._bindings.append(binding)
        try:
            self._session.run_with_iobinding(binding, self._options)
        except Exception as error:
            _forget_cuda_error()
            raise _explained(f"{self._name} failed", error) from error


def _element_type(dtype: str) -> Any:
    import numpy as np

    return np.dtype(dtype)


@cache
def onnx_runtime() -> Any:
    """The package onnxruntime with CUDA, its libraries loaded.

    Raises:
        MachineMismatch: the installed package is the CPU one.
    """
    import onnxruntime as ort

    ort.set_default_logger_severity(_FATAL_ONLY)  # errors come as exceptions
    if PROVIDER not in ort.get_available_providers():
        raise MachineMismatch(
            "the installed ONNX Runtime has no CUDA",
            found=f"onnxruntime {ort.__version__} with {', '.join(ort.get_available_providers())}",
            hint="pip uninstall onnxruntime, then pip install onnxruntime-gpu; or --device cpu",
        )
    if hasattr(ort, "preload_dlls"):  # CUDA and cuDNN from their wheels; it talks on stdout
        with _STDOUT, contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()
    return ort


def _forget_cuda_error() -> None:
    """Clear the CUDA runtime's memory of the last error, or the next run would report it again."""
    with contextlib.suppress(OSError):  # another CUDA version under another name
        ctypes.CDLL(_CUDART, mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaGetLastError()


def _explained(what: str, error: Exception) -> RunFailed:
    """ONNX Runtime's error in our words; running out of memory is told apart."""
    text = first_line(error)[:400]
    if any(sign in str(error).lower() for sign in _MEMORY_SIGNS):
        return OutOfDeviceMemory.during(what, text)
    return RunFailed(what, found=text)
