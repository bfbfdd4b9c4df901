"""GPUs of NVIDIA (CUDA) and AMD (ROCm, which torch calls by the same names), timed by their own clock."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from xsp.device import ceilings, machine, processor
from xsp.device.contract import Accelerator, Fault, Managed, Substitutes
from xsp.device.sharing import SharingDevice
from xsp.errors import first_sentence
from xsp.processes import system_text

LEAST_FREE_SHARE = 0.1
"""Share of a device's memory below which it is too small, or too busy, for anything."""

MOST_FOREIGN_PERCENT = 20
"""Utilisation before any work of ours, above which other work would be part of every figure."""

DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Patterns of files in `/dev`."""

CALIBRATION_CYCLES = 1_000_000

_SMI = ("power.limit", "clocks.max.sm", "clocks.max.mem", "utilization.gpu", "clocks.sm", "clocks.mem")
_SMI_NOTED = ("temperature.gpu", "power.draw", "clocks_throttle_reasons.active")

_SLOW_REASONS = {
    0x4: "the power limit", 0x8: "a slowdown by the hardware", 0x20: "its temperature", 0x40: "its temperature",
    0x80: "the power supply",
}  # fmt: skip
"""Bits of NVML's reasons for lower clocks that mean that work ran slower (`nvmlClocksEventReasons`, nvml.h)."""

_LOST = re.compile(
    r"(CUDA|HIP|cuDNN|CUBLAS|hipBLAS)\w* error|device-side assert|illegal memory|fallen off the bus", re.I
)
_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", re.I)


class Cuda(Accelerator):
    """A GPU of NVIDIA."""

    kind = "cuda"
    most_rotated_bytes = 1 << 28
    convolution_precision: ClassVar[str | None] = "tf32"
    shares = True
    onnx_provider = "CUDAExecutionProvider"
    blocking_variables: ClassVar[Mapping[str, str]] = {"CUDA_LAUNCH_BLOCKING": "1"}
    captured_by = 'CUDA graphs, torch.compile(mode="reduce-overhead")'

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._cycles_per_ns = 0.0
        self._streams: list[Any] = []
        self._counter: Callable[[], float] | None = None

    @classmethod
    def count(cls) -> int:
        """Return how many GPUs torch can use."""
        if importlib.util.find_spec("torch") is None:
            return 0
        if "torch" not in sys.modules and not cls.may_be_here():  # so that no command loads it to count none
            return 0
        import torch

        if (torch.version.hip is not None) != issubclass(cls, Hip):
            return 0
        if torch.cuda.is_initialized():
            return torch.cuda.device_count()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a driver that is too old: `absence` says so, where it matters
            return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def may_be_here(cls) -> bool:
        """Return whether a driver has made a file in `/dev`: only torch knows which devices those are."""
        return any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern))

    @classmethod
    def absence(cls) -> str:
        """Return torch's reason for having no GPU: it was built without, there is no driver, the driver is too old."""
        try:
            import torch

            torch.cuda.init()
        except ImportError:
            return "torch is not installed: pip install 'xsp[torch]'"
        except Exception as error:
            remedy = ": update it, or install a build of PyTorch for it" if "too old" in str(error) else ""
            return first_sentence(error) + remedy
        return ""

    def initialise(self) -> None:
        """Have torch make its list of GPUs, without a context on any."""
        import torch

        torch.cuda.init()

    def obstacle(self) -> str | None:
        """Return why the GPU cannot be used now: another process has it, or most of its memory."""
        import torch

        try:
            torch.zeros(1, device=self.torch_name).add_(1)
            self.synchronize()
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        except Exception as error:
            return f"{self.id} cannot be used ({first_sentence(error)}): end what uses it, or choose another --device"
        held = f"{(total_bytes - free_bytes) / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB"
        if free_bytes < LEAST_FREE_SHARE * total_bytes:
            return f"{self.id} is busy, {held} are in use: end the other processes, or choose another --device"
        percent = self._smi().get("utilization.gpu")
        if percent is not None and percent > MOST_FOREIGN_PERCENT:
            return f"{self.id} is busy, {percent:.0f} % by other processes: end them, or choose another --device"
        return None

    @property
    def name(self) -> str:
        """Its product's name: `NVIDIA H200`."""
        import torch

        return str(torch.cuda.get_device_name(self.index))

    @property
    def torch_name(self) -> str:
        """`cuda:0`."""
        return f"cuda:{self.index}"

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was issued."""
        import torch

        torch.cuda.synchronize(self.index)

    def begin(self, limit_bytes: int) -> None:
        """Make it torch's current device, and limit what its allocator takes."""
        import torch

        torch.cuda.set_device(self.index)
        total_bytes = torch.cuda.mem_get_info(self.index)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), self.index)

    # --- time -----------------------------------------------------------------------------------------------

    def spin(self, ns: int) -> None:
        """Keep the GPU busy with a kernel that counts its cycles."""
        import torch

        if not self._cycles_per_ns:
            torch.cuda._sleep(CALIBRATION_CYCLES)  # the first launch loads it
            first = self.mark()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            second = self.mark()
            self.synchronize()
            self._cycles_per_ns = CALIBRATION_CYCLES / max(1.0, self.between_ns(first, second))
        torch.cuda._sleep(round(ns * self._cycles_per_ns))

    def mark(self) -> Any:
        """Return an event that was recorded in the current stream."""
        import torch

        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.index))
        return mark

    def between_ns(self, first: Any, second: Any) -> float:
        """Return the time between two events; their resolution is half a microsecond."""
        return float(first.elapsed_time(second)) * 1e6

    def beside(self, functions: Sequence[Callable[[], object]]) -> None:
        """Issue each function to a stream of torch's."""
        import torch

        current = torch.cuda.current_stream(self.index)
        self._streams += [torch.cuda.Stream(self.index) for _ in functions[len(self._streams) :]]
        used = self._streams[: len(functions)]
        for stream in used:
            stream.wait_stream(current)
        for function, stream in zip(functions, used, strict=True):
            with torch.cuda.stream(stream):
                function()
        for stream in used:
            current.wait_stream(stream)

    def launch(self) -> Callable[[], object]:
        """Return the launch of a kernel that counts one cycle."""
        import torch

        return functools.partial(torch.cuda._sleep, 1)

    def caches(self) -> list[tuple[int, int]]:
        """Return the L2 cache."""
        size = getattr(self._facts(), "L2_cache_size", 0)
        return [(2, int(size))] if size else []

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return the replay of a CUDA graph."""
        import torch

        stream = torch.cuda.Stream(self.index)
        stream.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(stream):  # libraries allocate their workspaces, which is not allowed in a capture
            for _ in range(3):
                function()
        torch.cuda.current_stream(self.index).wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                function()
        except Exception as error:
            raise NotImplementedError(f"the step cannot be captured ({first_sentence(error)})") from error
        return graph.replay

    # --- memory ---------------------------------------------------------------------------------------------

    def free_bytes(self) -> int | None:
        """Return the free memory of the GPU; this makes a context."""
        import torch

        return int(torch.cuda.mem_get_info(self.index)[0])

    def workspace_bytes(self, function: Callable[[], object]) -> int | None:
        """Return what torch's allocator held at most beyond the inputs and outputs of a call."""
        import torch

        from xsp.cost.held import bytes_of

        torch.cuda.reset_peak_memory_stats(self.index)
        held = torch.cuda.memory_allocated(self.index)
        result = function()
        outputs = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (list, tuple)) else []
        out_bytes = sum(bytes_of(tensor) for tensor in outputs if isinstance(tensor, torch.Tensor))
        return max(0, int(torch.cuda.max_memory_allocated(self.index)) - held - out_bytes)

    def kernels(self, function: Callable[[], object]) -> tuple[str, ...]:
        """Return the kernels of one call as the profiler of torch sees them; empty if it sees none."""
        import torch

        with contextlib.suppress(Exception):  # another profiler has the device
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
                function()
                self.synchronize()
            on_device = (entry for entry in profiler.events() or () if entry.device_type.name == "CUDA")
            return tuple(entry.name for entry in sorted(on_device, key=lambda entry: entry.time_range.start))
        return ()

    def seen(self, pinned: Any) -> Any:
        """Return pinned memory at its own address."""
        import torch

        from xsp.device.cudamemory import Pinned

        return torch.as_tensor(Pinned(pinned), device=self.torch_name)

    def managed(self, size: int) -> Managed:
        """Return memory of `cudaMallocManaged`."""
        from xsp.device.cudamemory import ManagedMemory

        return ManagedMemory(size, self.index)

    def held_bytes(self) -> int | None:
        """Return what torch's allocator has handed out."""
        import torch

        return int(torch.cuda.memory_allocated(self.index))

    def sharing_obstacle(self) -> str:
        """Return whether torch knows CUDA; whether the driver shares memory shows when it is opened."""
        import torch

        return "" if torch.version.cuda else f"this PyTorch ({torch.__version__}) is built without CUDA"

    def sharing(self) -> SharingDevice:
        """Return the device as the driver has it."""
        from xsp.device import cudasharing

        return cudasharing.device(self.index)

    def shared(self, memory: Any) -> Any:
        """Return memory that CUDA IPC has opened."""
        import torch

        from xsp.device.cudamemory import Opened

        torch.cuda.init()
        return torch.as_tensor(Opened(memory), device=self.torch_name)

    def fault(self, error: BaseException) -> Fault | None:
        """Return what an error of torch means; after one of CUDA itself, the context cannot be used any more."""
        if _MEMORY.search(str(error)):
            return Fault.OUT_OF_MEMORY
        return Fault.LOST if _LOST.search(str(error)) else None

    # --- what it is -----------------------------------------------------------------------------------------

    @classmethod
    def libraries(cls) -> dict[str, Any]:
        """Return the versions of CUDA, of cuDNN and of the driver; the last two where there is a GPU."""
        import torch

        is_here = torch.cuda.is_available()
        return {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if is_here else None,
            "driver": _driver() if is_here else None,
        }

    @classmethod
    def is_used(cls) -> bool:
        """Return whether torch has a context."""
        import torch

        return bool(torch.cuda.is_initialized())

    @property
    def uuid(self) -> str:
        """Without the `GPU-` of NVML."""
        return str(getattr(self._facts(), "uuid", ""))

    def properties(self) -> dict[str, Any]:
        """Return what the occupancy of a launch depends on."""
        facts = self._facts()
        return {
            **self.described(),
            "compute": f"{facts.major}.{facts.minor}",
            "warp_size": getattr(facts, "warp_size", None),
        }

    def described(self) -> dict[str, Any]:
        """Return name, memory and number of multiprocessors."""
        facts = self._facts()
        return {"name": facts.name, "memory_bytes": facts.total_memory, "sms": facts.multi_processor_count}

    def _facts(self) -> Any:
        import torch

        return torch.cuda.get_device_properties(self.index)

    @classmethod
    def operators(cls) -> Substitutes:
        """Return the operators of NVIDIA's GPUs."""
        from xsp.device import cudaoperators

        return cudaoperators.NVIDIA

    def own_products(self, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield TF32 and FP8, which only tensor cores of some generations compute."""
        import torch

        compute = torch.cuda.get_device_capability(self.index)
        if torch.version.hip is None and compute >= (8, 0):
            previous = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                yield "tf32", ceilings.product(self.torch_name, size, torch.float32)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = previous
        if torch.version.hip is None and compute >= (8, 9) and hasattr(torch, "float8_e4m3fn"):
            left, right = ceilings.operands(self.torch_name, size, torch.float8_e4m3fn)
            scale, right = torch.ones((), device=self.torch_name), right.t()  # the right one must be column-major
            yield "fp8", lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)

    def energy_joules(self) -> float | None:
        """Return NVML's counter since the driver was loaded; None without `nvidia-ml-py`, or such a counter."""
        with contextlib.suppress(Exception):  # NVML's errors are of a package that may be missing
            if self._counter is None:
                self._counter = self._energy_counter()
            return self._counter()
        return None

    def _energy_counter(self) -> Callable[[], float]:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")
        return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    def identity(self) -> dict[str, Any]:
        """Return product, driver, libraries, limits of power and clocks, and the processor that issues the calls."""
        import torch

        smi = self._smi()
        limits = {
            "caches": [list(cache) for cache in self.caches()],
            "power_limit_w": smi.get("power.limit"),
            "clocks_max_mhz": [smi.get("clocks.max.sm"), smi.get("clocks.max.mem")],
        }
        return {
            "device": {"kind": self.kind, **self.described(), **limits},
            "cpu": machine.cpu_model(),
            "machine": os.uname().machine,
            "variables": processor.variables(os.environ),
            "torch": torch.__version__,
            "git": torch.version.git_version,
            **self.libraries(),
        }

    def circumstances(self) -> dict[str, Any]:
        """Return clocks, temperature and power as they are now; empty without `nvidia-smi`."""
        return {name: value for name, value in self._smi(_SMI_NOTED).items() if value is not None}

    def disturbance(self) -> str:
        """Return why the driver lowers the clocks now; empty if it does not, or if that is unknown."""
        bits = int(self._smi(_SMI_NOTED).get("clocks_throttle_reasons.active") or 0)
        reasons = dict.fromkeys(text for bit, text in _SLOW_REASONS.items() if bits & bit)
        return f"the clocks of {self.id} were lowered by {' and '.join(reasons)}" if reasons else ""

    def _smi(self, more: tuple[str, ...] = ()) -> dict[str, float | None]:
        """Return figures of the driver's own tool by name; empty if there is none."""
        uuid = self.uuid
        names = (*_SMI, *more)
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        command += [f"--id=GPU-{uuid}"] if uuid else []
        try:
            lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            return {}
        cells = lines[self.index if not uuid and self.index < len(lines) else 0].split(",") if lines else []
        return {name: _number(cell) for name, cell in zip(names, cells, strict=False)}


class Hip(Cuda):
    """A GPU of AMD, which torch calls by the names of CUDA."""

    kind = "hip"
    convolution_precision = None
    shares = False
    onnx_provider = "ROCMExecutionProvider"

    @classmethod
    def operators(cls) -> Substitutes:
        """Return the operators of AMD's GPUs."""
        from xsp.device import cudaoperators

        return cudaoperators.AMD

    def sharing_obstacle(self) -> str:
        """Return that `xsp share` knows NVIDIA's driver only."""
        return Accelerator.sharing_obstacle(self)

    def sharing(self) -> SharingDevice:
        """Raise, for the same reason."""
        return Accelerator.sharing(self)

    def managed(self, size: int) -> Managed:
        """Raise: the runtime that is called is NVIDIA's."""
        return Accelerator.managed(self, size)

    def energy_joules(self) -> float | None:
        """Return None: NVML is NVIDIA's."""
        return None


def _driver() -> str | None:
    match = re.search(r"(\d+\.\d+(\.\d+)?)", system_text("/proc/driver/nvidia/version"))
    return None if match is None else match.group(1)


def _number(cell: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(int(cell, 16)) if cell.strip().startswith("0x") else float(cell)
    return None
