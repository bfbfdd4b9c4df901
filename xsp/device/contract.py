"""The contract of a device: all that xsp asks of what computes, the processor included.

| question | answered by |
|---|---|
| is it there, does the program use it, and can it be used now | `count`, `may_be_here`, `is_used`, `obstacle` |
| tensors and random values on it | `torch_name`, `torch_type`, `generator` |
| how long do these calls take on it, and how long does the host take to issue them | `timed`, `waited` |
| what has to be overwritten so that its caches hold other data | `caches`, `rotated_bytes`, `eviction_buffer` |
| can a function be captured once and replayed without the host | `capture` |
| how much memory is free, and how much may a block take | `free_bytes`, `begin`, `workspace_bytes` |
| what does an error of torch mean | `fault` |
| what do transfers use: memory read in place, streams, launches | `pinned`, `seen`, `managed`, `beside`, `launch` |
| can processes share weights on it | `sharing_obstacle`, `sharing`, `shared` |
| what does this process hold there | `held_bytes` |
| how much energy has it used | `energy_joules` |
| what can it do at most | `ceiling`, `own_products` |
| which device is it, so that only comparable timings are compared | `identity`, `circumstances` |
| what do runs and the processor's timings note of it | `properties`, `described`, `libraries`, `uuid` |

`Processor` is the processor, `xsp.device.cuda` has GPUs of NVIDIA and AMD. Another device is one class in one file,
declared as an entry point of `xsp.devices`; `tests/device/test_conformance.py` checks it. Most of them have a clock of
their own: `Accelerator` times with marks on the device, and leaves six short methods to the class.

Nothing here loads torch; methods that need it do.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from xsp.device import ceilings
from xsp.device.ceilings import Ceiling
from xsp.device.sharing import SharingDevice
from xsp.errors import AnalysisError, ShareError

LEAST_ROTATED_BYTES = 16 << 20

SHARED_ON = "memory is shared on the host and on NVIDIA's devices: cpu, cuda:0"
"""Where `xsp share` can keep weights."""

Substitutes = Mapping[Any, Callable[..., tuple[str, Any] | None]]
"""Function of torch → what a device takes for it: it returns a note and the result, or None to leave the function."""

Arguments = Sequence[tuple[Any, ...]]
"""The arguments of consecutive calls of a function."""


class Elapsed(NamedTuple):
    """The time of some calls, in nanoseconds for all of them."""

    ns: float
    """Time on the device."""

    issue_ns: float
    """Time until the host had issued all calls; on a processor the same."""

    waits: bool = False
    """Whether the device had to wait for the host in between, so that `ns` contains time in which it was idle."""


class Managed(Protocol):
    """Memory that the host and a device address alike, and whose pages move to the one that uses them."""

    tensor: Any
    """The memory as a tensor of the device, of float32."""

    def to_host(self) -> None:
        """Write all pages from the host, so that they are there."""

    def prefetch(self) -> None:
        """Issue the transfer of all pages to the device."""


class Fault(enum.Enum):
    """What an error of a device means for the block that ran."""

    OUT_OF_MEMORY = "out of memory"
    """The block needs too much; others may run in the same process."""

    LOST = "lost"
    """The process can no longer use the device: an illegal address, a failed launch, a device that does not answer."""


class DeviceLost(Exception):
    """Raised when this process can no longer use a device; the message is the device's."""


class Device(ABC):
    """What computes: the processor, or an accelerator with a number."""

    kind: ClassVar[str]
    """Name of its entry point, and the beginning of its identifier."""

    is_host: ClassVar[bool] = False
    """Whether the host itself computes, so that a call returns when its work is done."""

    most_calls: ClassVar[int | None] = None
    """Most calls that are issued without waiting; None for no limit."""

    most_rotated_bytes: ClassVar[int] = 1 << 30

    convolution_precision: ClassVar[str | None] = None
    """Precision of convolutions of float32 by torch's default, `tf32`; None for that of their inputs."""

    shares: ClassVar[bool] = False
    """Whether several processes can share memory on devices of this kind, so that `sharing` is there."""

    onnx_provider: ClassVar[str] = ""
    """What runs ONNX files on it: the name of a provider of ONNX Runtime; empty if none is known."""

    blocking_variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables by which each launch waits for its kernel."""

    captured_by: ClassVar[str] = ""
    """How a program captures its steps to replay them; empty if it cannot, or that is not known."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.index == self.index

    def __hash__(self) -> int:
        return hash((self.kind, self.index))

    @property
    def id(self) -> str:
        """Its identifier, as a user types it: `cuda:0`."""
        return f"{self.kind}:{self.index}"

    # --- is it there ----------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this kind are here, without using one."""

    @classmethod
    def may_be_here(cls) -> bool:
        """Return whether one could be here; unlike `count`, this loads no library."""
        return cls.count() > 0

    @classmethod
    def absence(cls) -> str:
        """Return why no device of this kind is here, if that is known; else an empty text."""
        return ""

    def obstacle(self) -> str | None:
        """Return why the device cannot be used now, and what to do: it is busy, its driver is too old; else None."""
        return None

    def initialise(self) -> None:
        """Have torch initialise the device: tools that observe it see nothing before."""
        import torch

        torch.zeros(1, device=self.torch_name)

    @property
    @abstractmethod
    def name(self) -> str:
        """Its product's name."""

    @classmethod
    def libraries(cls) -> dict[str, Any]:
        """Return versions of the libraries and the driver that hold its kernels, as plain values, if torch has some."""
        return {}

    @classmethod
    def is_used(cls) -> bool:
        """Return whether this process has initialised devices of this kind, without doing so; torch is loaded."""
        return False

    @property
    def uuid(self) -> str:
        """What the driver calls it in all processes; empty if unknown."""
        return ""

    def properties(self) -> dict[str, Any]:
        """Return what a run notes of it, as importers do: at least its name, see `xsp.run.Device`."""
        return {"name": self.name}

    def described(self) -> dict[str, Any]:
        """Return what the environment of the processor says of it, as plain values: at least its name."""
        return {"name": self.name}

    # --- tensors --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def torch_name(self) -> str:
        """What torch calls it: tensors are made with `device=torch_name`."""

    @property
    def torch_type(self) -> str:
        """What torch calls devices of its kind, `cuda`: autocast takes that."""
        return self.torch_name.split(":")[0]

    def generator(self, seed: int) -> Any:
        """Return a generator of random numbers on the device (`torch.Generator`)."""
        import torch

        return torch.Generator(device=self.torch_name).manual_seed(seed)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was issued."""

    # --- time -----------------------------------------------------------------------------------------------

    @abstractmethod
    def timed(
        self, function: Callable[..., Any], arguments: Arguments, before: Callable[[], object] | None = None
    ) -> Elapsed:
        """Call a function once with each set of arguments, and return how long the calls took.

        Args:
            function: a function whose work is on this device.
            arguments: arguments of each call.
            before: called before each call, and not timed.
        """

    def host_ns(self) -> int:
        """Return the time of the host's clock."""
        return time.perf_counter_ns()

    def waited(self, function: Callable[[], object], calls: int = 1) -> Elapsed:
        """Call a function a number of times, wait after each, and return the time by the host's clock.

        `issue_ns` is the time until the calls returned.
        """
        elapsed_ns = issue_ns = 0
        for _ in range(calls):
            self.synchronize()
            begin = self.host_ns()
            function()
            issue_ns += self.host_ns() - begin
            self.synchronize()
            elapsed_ns += self.host_ns() - begin
        return Elapsed(elapsed_ns, issue_ns)

    # --- caches ---------------------------------------------------------------------------------------------

    @abstractmethod
    def caches(self) -> list[tuple[int, int]]:
        """Return level and bytes of each data cache, sorted; empty if unknown."""

    def rotated_bytes(self) -> int:
        """Return the bytes that fill the caches with other data: a quarter more than the last level, within limits."""
        largest = max((size for _, size in self.caches()), default=LEAST_ROTATED_BYTES)
        return min(max(largest * 5 // 4, LEAST_ROTATED_BYTES), self.most_rotated_bytes)

    def eviction_buffer(self, size: int) -> Any:
        """Return a tensor of `size` bytes; once it is overwritten (`add_(1)`), the caches hold it."""
        import torch

        return torch.zeros(size // 4, device=self.torch_name)

    # --- capture and replay ---------------------------------------------------------------------------------

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a function that repeats the work of one call of `function` without its host's part.

        Raises:
            NotImplementedError: the device cannot; the message is the reason.
        """
        raise NotImplementedError(f"{self.name} has no capture and replay")

    # --- memory ---------------------------------------------------------------------------------------------

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the bytes of memory that are free; None if unknown."""

    def begin(self, limit_bytes: int) -> None:  # noqa: B027  a device without a limit relies on its free memory
        """Let this process use the device: allocations beyond so many bytes fail, before others have to end for it."""

    def workspace_bytes(self, function: Callable[[], object]) -> int | None:
        """Return the most bytes that a call holds beside its inputs and outputs; None if unknown."""
        return None

    def kernels(self, function: Callable[[], object]) -> tuple[str, ...]:
        """Return the names of the kernels that a call launches, in order; empty if unknown."""
        return ()

    def fault(self, error: BaseException) -> Fault | None:
        """Return what an error means, None if it is the block's own: a shape or a type that it does not take."""
        return None

    def pinned(self, tensor: Any) -> Any:
        """Return a copy of a host's tensor in memory from which the device transfers while the host goes on."""
        return tensor.pin_memory()

    def seen(self, pinned: Any) -> Any:
        """Return pinned memory as a tensor of the device, which reads it in place.

        Raises:
            NotImplementedError: the device cannot; the message is the reason.
        """
        raise NotImplementedError(f"{self.name} reads no memory of the host in place")

    def managed(self, size: int) -> Managed:
        """Return so many bytes of managed memory.

        Raises:
            NotImplementedError: the device has none, or it cannot be allocated; the message is the reason.
        """
        raise NotImplementedError(f"{self.name} has no managed memory")

    def held_bytes(self) -> int | None:
        """Return the bytes that tensors of this process hold on the device; None if unknown."""
        return None

    def sharing_obstacle(self) -> str:
        """Return why `xsp share` cannot keep weights on it for several processes; empty if it can.

        The text does not begin with the device: an error has its name as the user gave it.
        """
        return SHARED_ON

    def sharing(self) -> SharingDevice:
        """Return the device as one whose memory processes share, without torch, if this kind `shares`.

        Raises:
            ShareError: there is no such device, or its memory cannot be shared.
        """
        raise ShareError(f"{self.id}: {self.sharing_obstacle() or SHARED_ON}")

    def shared(self, memory: Any) -> Any:
        """Return memory of another process, opened in this one, as a tensor of bytes, which keeps it open.

        Args:
            memory: has `address` on the device and `nbytes`.
        """
        raise NotImplementedError(f"{self.id}: {self.sharing_obstacle() or SHARED_ON}")

    # --- what it is -----------------------------------------------------------------------------------------

    def energy_joules(self) -> float | None:
        """Return what the device has used since some moment in the past; None without a counter."""
        return None

    def ceiling(self, may_measure: bool = False, again: bool = False) -> Ceiling | str:
        """Return what the device can do at most: as measured here, else as quoted; a reason if unknown.

        Args:
            may_measure: measure it now if neither is known.
            again: measure it now in any case; the highest rates of all measurements count.
        """
        known = ceilings.of_machine(self.name)
        if again or (known is None and may_measure):
            measured = ceilings.measured(self)
            ceilings.store({self.name: measured})
            known = ceilings.of_machine(self.name) or measured
        if known is None and not self.is_host:  # no manufacturer quotes what a processor can do
            with contextlib.suppress(AnalysisError):
                known = ceilings.ceiling(self.name)
        where = "this machine" if self.is_host else self.name
        return known or f"the peak rates of {where} were not measured: xsp doctor --measure"

    @classmethod
    def operators(cls) -> Substitutes:
        """Return what torch takes on such devices for functions that have other operators on the processor."""
        return {}

    def own_products(self, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield precisions that torch has on this kind of device only, each with a product of two matrices in it.

        Each product is run before the next is asked for.

        Args:
            size: rows and columns of the matrices.
        """
        return iter(())

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what has to be equal for timings to be compared, as plain values: device, driver, libraries, limits.

        That of an accelerator has the key `device` with at least `kind`, `name` and `caches`.
        """

    def circumstances(self) -> dict[str, Any]:
        """Return what is noted beside timings and may differ: load, clocks, temperature."""
        return {}

    def disturbance(self) -> str:
        """Return why the device is slower now than it could be, if it says so; else an empty text."""
        return ""


class Accelerator(Device):
    """A device with a clock and a queue of its own: the host issues calls, and the device does them later.

    To time calls, the device first spins until all of them are issued, so that what it takes does not contain the
    host's part. If the host took longer than that, they are issued again behind a longer spin.
    """

    most_calls = 64

    first_spin_ns: ClassVar[int] = 500_000
    most_spin_ns: ClassVar[int] = 50_000_000

    @abstractmethod
    def spin(self, ns: int) -> None:
        """Keep the device busy for about so long."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark of the place in the queue that was reached now."""

    @abstractmethod
    def between_ns(self, first: Any, second: Any) -> float:
        """Return the nanoseconds that the device took from one mark to another; both have been reached."""

    def beside(self, functions: Sequence[Callable[[], object]]) -> None:
        """Issue each function to a stream of its own; they follow what was issued, and what is issued next follows all.

        Raises:
            NotImplementedError: the device has one stream.
        """
        raise NotImplementedError(f"{self.name} has one stream")

    def launch(self) -> Callable[[], object]:
        """Return a function that launches a kernel which does almost nothing."""
        return functools.partial(self.spin, 1)

    def timed(
        self, function: Callable[..., Any], arguments: Arguments, before: Callable[[], object] | None = None
    ) -> Elapsed:
        """Time calls by the device's clock, and their issue by the host's."""
        if before is not None:
            singles = [self._behind_a_spin(function, [each], before) for each in arguments]
            ns, issue_ns = (sum(single[place] for single in singles) for place in (0, 1))
            return Elapsed(ns, issue_ns, any(single.waits for single in singles))
        return self._behind_a_spin(function, arguments, None)

    def _behind_a_spin(
        self, function: Callable[..., Any], arguments: Arguments, before: Callable[[], object] | None
    ) -> Elapsed:
        spin_ns = self.first_spin_ns
        while True:
            self.synchronize()
            if before is not None:
                before()
            spinning = self.mark()
            self.spin(spin_ns)
            start = self.mark()
            begin = self.host_ns()
            for each in arguments:
                function(*each)
            issue_ns = self.host_ns() - begin
            end = self.mark()
            self.synchronize()
            waits = self.between_ns(spinning, start) < issue_ns
            if not waits or spin_ns >= self.most_spin_ns:
                return Elapsed(max(0.0, self.between_ns(start, end)), issue_ns, waits)
            # what waits for the device (a value that is read) waits for any spin: once is enough to know it
            spin_ns = min(max(2 * spin_ns, round(1.5 * issue_ns)), self.most_spin_ns)
