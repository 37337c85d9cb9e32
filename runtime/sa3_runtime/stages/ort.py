"""Stages on the CPU through ONNX Runtime.

Knows: session options, input and output binding. Doesn't know: plans, CUDA.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import ArtefactMissing, RunFailed, UsageError, first_line
from sa3_models.onnx_file import OnnxFile, read_onnx

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OrtStage", "allowed_threads", "check_cpu_types"]

_MEMORY = "shorter clips and --chunking on need less memory"
_ERRORS_ONLY = 3  # ONNX Runtime log severity
_GPU_ONLY = {"bfloat16", "float8e4m3fn"}  # types without CPU kernels


def allowed_threads() -> int:
    """Threads this process may use: affinity mask and cgroup quota, whichever is less.

    Asking the operating system for "all cores" inside a container gives the host's cores, and a
    runtime that pins threads to cores it may not use prints errors or hangs.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_quota() or allowed))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """CPUs of the cgroup quota, rounded up; None without one."""
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text().split()[:2]
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None


def check_cpu_types(graph: OnnxFile) -> None:
    """Refuse a graph whose number formats have no CPU kernels.

    Raises:
        UsageError: it holds bfloat16 or float8 tensors.
    """
    if unsupported := sorted(graph.types & _GPU_ONLY):
        raise UsageError(
            f"{graph.path.name} is made for a GPU",
            found=f"tensors of type {', '.join(unsupported)}, which the CPU can't compute",
            hint="use the fp32 files of this model, or --device cuda",
        )


class OrtStage:
    """One ONNX file in an ONNX Runtime CPU session. Buffers are NumPy arrays."""

    def __init__(self, path: Path, *, threads: int) -> None:
        """Load a file.

        Args:
            path: the .onnx file; its data file lies beside it.
            threads: threads within an operator; operators run one after the other.

        Raises:
            ArtefactMissing: a file isn't there, or ONNX Runtime refuses it.
            UsageError: the graph isn't for the CPU.
            RunFailed: there is not enough memory.
        """
        graph = read_onnx(path)
        check_cpu_types(graph)
        self.path = path
        self.io = graph.io
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # measured at full size, decoder of 128 latents: peak 0.39 GB so, 0.50 GB with patterns,
        # 1.08 GB without an arena, which is no faster (and 3 % of a DiT step slower at 120 s)
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        # waiting threads that spin gain nothing on an idle machine (0.52 s a DiT step of 10 s,
        # either way) and take a third more time of a busy one
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._shrink = ort.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._data = _mapped_data(graph)  # lives as long as the session
        model: str | bytes = str(path.resolve())
        if self._data:
            names, buffers = list(self._data), list(self._data.values())
            sizes = [len(buffer) for buffer in buffers]
            options.add_external_initializers_from_files_in_memory(names, buffers, sizes)
            model = path.read_bytes()
        try:
            self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no common base class
            what, found = f"{path.name} could not be loaded", first_line(error)
            if "lloc" in str(error):
                raise RunFailed(what, found=found, hint=_MEMORY) from error
            hint = "if it is damaged, sa3 export MODEL --force makes it again"
            raise ArtefactMissing(what, found=found, hint=hint) from error

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        *,
        last: bool = False,
    ) -> None:
        """Run once on arrays of the caller, without copies.

        Args:
            inputs: C-contiguous arrays by port name.
            outputs: C-contiguous arrays by port name, overwritten.
            last: give the memory of activations back afterwards.

        Raises:
            RunFailed: ONNX Runtime failed, or ran out of memory.
        """
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        try:
            self._session.run_with_iobinding(binding, self._shrink if last else None)
        except Exception as error:
            raise RunFailed(
                f"{self.path.name} failed",
                found=first_line(error),
                hint=_MEMORY if "lloc" in str(error) else None,
            ) from error

    def close(self) -> None:
        """Give the weights back."""
        del self._session
        self._data.clear()


def _mapped_data(graph: OnnxFile) -> dict[str, mmap.mmap]:
    """Data files to hand over in memory, by the name the graph knows them under.

    ONNX Runtime refuses data files that leave the model's directory through a link, which is how
    the hub's cache stores them: such a pair is mapped here instead. Empty for real neighbours.
    """
    real = graph.path.resolve()
    if all(file.resolve() == real.parent / file.name for file in graph.data):
        return {}
    mapped = {}
    for path in graph.data:
        with path.open("rb") as file:
            mapped[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped
