"""Shared memory of NVIDIA's devices (`xsp.device.sharing`), through their driver: processes open it by CUDA IPC.

The driver's library is called without torch. Each call makes the device's primary context current, which torch uses as
well, and restores the thread's own context afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

from xsp.device.sharing import DeviceLostError, DeviceMemoryError
from xsp.errors import ShareError

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64
GRANULE = 2 << 20
"""Bytes; an allocation of whole granules has its own handle, whereas smaller allocations share one."""

_LAZY_PEER_ACCESS = 1
"""The flag that `cuIpcOpenMemHandle` requires."""

_OUT_OF_MEMORY = 2

_NOT_OPENABLE = "the memory cannot be opened here: is the store's process on the same machine, in the same container?"

_LOST = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Error codes after which a context cannot be used: an error of its memory, an illegal address, a failed launch, a
device that does not answer."""

_REMEDIES = {
    2: "the device has no memory left; nvidia-smi shows who uses it",
    3: "CUDA cannot be used in a child that was forked after its parent used it; start processes with spawn",
    46: "the device is reserved by another process (exclusive compute mode); nvidia-smi -c DEFAULT",
    100: "there is no NVIDIA device here; nvidia-smi shows them",
    101: "there is no such device here; nvidia-smi -L and CUDA_VISIBLE_DEVICES show the devices",
    201: _NOT_OPENABLE,
    205: _NOT_OPENABLE,
    400: _NOT_OPENABLE,
    **dict.fromkeys(_LOST, "the device is lost for this process; nvidia-smi shows whether it answers"),
    801: "the device or its driver does not share memory between processes (some MIG set-ups, WSL, Jetson)",
}
"""Remedies, by the driver's error code."""


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    """`CUuuid`."""

    _fields_ = (("bytes", ctypes.c_byte * 16),)


class DriverError(ShareError):
    """A failed call of the driver."""


class _OutOfMemoryError(DriverError, DeviceMemoryError):
    """A call of the driver that failed because the device has no memory left."""


class _LostError(DriverError, DeviceLostError):
    """A call of the driver that failed because the device is lost for this process."""


_ADDRESS, _SIZE, _POINTER, _INT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_POINTER, _POINTER),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyHtoD_v2": (_ADDRESS, _POINTER, _SIZE),
    "cuMemcpyDtoH_v2": (_POINTER, _ADDRESS, _SIZE),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}
"""The functions used, with the version suffixes of the driver's header, and their argument types."""


class _Driver:
    """The driver's library."""

    def __init__(self, library: str) -> None:
        """Load and initialise the library.

        Raises:
            ShareError: it is missing or too old, or finds no device.
        """
        try:
            cdll = ctypes.CDLL(library)
        except OSError:
            raise ShareError(
                f"there is no NVIDIA driver here ({library} cannot be loaded): attach without device=, on the CPU"
            ) from None
        self._calls = {}
        for name, types in _SIGNATURES.items():
            call = getattr(cdll, name, None)
            if call is None:
                raise ShareError(f"{library} has no {name}: the driver is too old; CUDA 11.4 or later has it")
            call.argtypes, call.restype = types, _INT
            self._calls[name] = call
        self.call("the driver", "cuInit", 0)

    def call(self, label: str, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            DriverError: the call fails.
        """
        code = self._calls[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._calls["cuGetErrorName"](code, ctypes.byref(text))
            failed = {_OUT_OF_MEMORY: _OutOfMemoryError, **dict.fromkeys(_LOST, _LostError)}.get(code, DriverError)
            remedy = f"; {_REMEDIES[code]}" if code in _REMEDIES else ""
            raise failed(f"{label}: {name} failed ({text.value.decode() if text.value else f'error {code}'}){remedy}")


_devices: dict[tuple[int, str, int], CudaSharing] = {}
"""Opened devices, by process ID, library and ordinal."""

_devices_lock = threading.Lock()


def device(ordinal: int) -> CudaSharing:
    """Return a device of this process; the ordinal is torch's.

    Raises:
        ShareError: there is no driver, or no such device.
    """
    with _devices_lock:
        key = os.getpid(), LIBRARY, ordinal
        if key not in _devices:
            _devices[key] = CudaSharing(_Driver(LIBRARY), ordinal)
        return _devices[key]


class CudaSharing:
    """A GPU of NVIDIA, and operations on its memory; see `xsp.device.sharing.SharingDevice`."""

    granule = GRANULE
    monitor = "nvidia-smi"

    def __init__(self, driver: _Driver, ordinal: int) -> None:
        """Retain the device's primary context until the process ends.

        Raises:
            ShareError: there is no such device, or it cannot be used.
        """
        self.ordinal = ordinal
        self._driver = driver
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= ordinal < count.value:
            raise ShareError(
                f"{self.label}: there is no such device; the number of devices here is {count.value}, which "
                "CUDA_VISIBLE_DEVICES may limit"
            )
        number, name, uuid = ctypes.c_int(), ctypes.create_string_buffer(256), _Uuid()
        self._call("cuDeviceGet", ctypes.byref(number), ordinal)
        self._call("cuDeviceGetName", ctypes.byref(name), len(name), number)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), number)
        self.name = name.value.decode(errors="replace")
        self.uuid = bytes(uuid).hex()
        """Identifier of the device or of its MIG instance; the same in all processes."""

        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    @property
    def label(self) -> str:
        """Name of the device in messages."""
        return f"cuda:{self.ordinal}"

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.call(self.label, name, *arguments)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """Return the address of memory that can be shared.

        Raises:
            DriverError: the device has no memory left.
        """
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory, which no other process may have open."""
        with self._current():
            self._call("cuMemFree_v2", address)

    def fill(self, address: int, source: int, nbytes: int) -> None:
        """Copy host memory to the device; the copy is complete after `synchronise`."""
        with self._current():
            self._call("cuMemcpyHtoD_v2", address, source, nbytes)

    def read(self, address: int, target: int, nbytes: int) -> None:
        """Copy device memory to the host, and wait for the copy."""
        with self._current():
            self._call("cuMemcpyDtoH_v2", target, address, nbytes)

    def synchronise(self) -> None:
        """Wait for all work that this process has submitted to the device."""
        with self._current():
            self._call("cuCtxSynchronize")

    def handle(self, address: int) -> bytes:
        """Return the handle with which other processes open the memory.

        Raises:
            DriverError: the device does not share memory.
        """
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map memory shared by another process, and return the address. Opening a handle a second time may be an error.

        Raises:
            DriverError: it cannot be opened.
        """
        address = ctypes.c_uint64()
        with self._current():
            ipc_handle = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc_handle, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap memory from `open`, after all work that this process has submitted to the device."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", address)
