"""Performance ceilings of devices: operations and bytes per second, quoted from the manufacturer or measured.

A quote is an entry of `devices.toml` with its source. A measurement is a short calibration (`measure`) that
`xsp doctor --measure RUN` stores in `run.json` under `machine.ceilings`; it takes precedence over a quote. For use
outside runs, measurements of the current machine are stored in the user's cache (`store`, `of_machine`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import atomic, cached, processes
from xsp.clock import monotonic_ns
from xsp.errors import AnalysisError, UsageError, nearest
from xsp.plugins import importing
from xsp.run import Run

if TYPE_CHECKING:
    from xsp.device.contract import Device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "XSP_DEVICES"
"""Environment variable with the path of a file of further devices, in the format of `devices.toml`, read first."""

PRECISIONS = {
    "double": "fp64",
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "signed char": "int8",
    "unsigned char": "int8",
    "c10::Float4_e2m1fn_x2": "fp4",
    **dict.fromkeys((f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")), "fp8"),
}
"""Kineto's name of an element type → precision."""

DEFAULT_PRECISION = "fp32"
"""The precision of XSP's paper, which uses no other."""

MEASURED = "measured: "
"""Beginning of the source of rates that were measured, which is all that files say of it."""

_BRANDS = {"NVIDIA", "AMD", "TESLA", "INSTINCT", "GEFORCE"}
_NEUTRAL_WORD = re.compile(r"\d+GI?B|HBM\d?E?|SXM\d?|PCIE|OAM|VF")
"""Words that a device's name may contain beyond its entry's name: size and kind of memory, form factor."""


@dataclass(frozen=True)
class Ceiling:
    """The performance ceiling of a device: FLOP/s by precision, and bytes per second."""

    name: str
    vector: Mapping[str, float]
    tensor: Mapping[str, float]
    bytes_per_s: float
    source: str
    """URL of the quote, or how it was measured."""

    levels: tuple[tuple[int, float], ...] = ()
    """Bytes of a working set and bytes per second within it, smallest first: the caches above the memory; empty for a
    quote. The rates do not increase with the size."""

    threads: int | None = None
    """Number of threads that measured a processor."""

    kind: str = ""
    """Of a quote: which kind of `xsp.device.devices` the device is; empty if that is not stated."""

    @property
    def is_measured(self) -> bool:
        """Whether the rates were measured, not quoted."""
        return self.source.startswith(MEASURED)

    def bandwidth(self, working_set: int) -> float:
        """Return the most bytes per second within a working set: the rate of the largest measured set not above it.

        Between two measured points the higher rate applies, so that the result is a ceiling.
        """
        if working_set > MAX_CACHED_BYTES or not self.levels:
            return self.bytes_per_s
        return next((rate for size, rate in reversed(self.levels) if size <= working_set), self.levels[0][1])

    def peak(self, precision: str = DEFAULT_PRECISION) -> float | None:
        """Return the most FLOP/s in a precision, dense, on any units; None if the source does not state it."""
        return max((units[precision] for units in (self.vector, self.tensor) if precision in units), default=None)

    def ideal_intensity(self, precision: str = DEFAULT_PRECISION) -> float | None:
        """Return the FLOP per byte below which work is memory-bound: peak over bandwidth (XSP, section III-D)."""
        peak = self.peak(precision)
        return None if peak is None else peak / self.bytes_per_s

    def precisions(self) -> list[str]:
        """Return the precisions whose peak is known."""
        return sorted({*self.vector, *self.tensor})

    def highest(self, other: Ceiling) -> Ceiling:
        """Return the higher of the rates of two measurements of one device."""
        units = [
            {kind: max(table.get(kind, 0.0) for table in tables) for kind in {**tables[0], **tables[1]}}
            for tables in ((self.vector, other.vector), (self.tensor, other.tensor))
        ]
        sizes = sorted({size for entry in (self, other) for size, _ in entry.levels})
        levels = tuple((size, max(entry.bandwidth(size) for entry in (self, other))) for size in sizes)
        return replace(
            self, vector=units[0], tensor=units[1], bytes_per_s=max(self.bytes_per_s, other.bytes_per_s), levels=levels
        )

    def content(self) -> dict[str, Any]:
        """Return the ceiling in the format of `run.json`."""
        units = {"vector": dict(self.vector), "tensor": dict(self.tensor)}
        content = {"name": self.name, **units, "bytes_per_s": self.bytes_per_s, "source": self.source}
        content |= {"levels": [list(level) for level in self.levels]} if self.levels else {}
        return content | ({} if self.threads is None else {"threads": self.threads})


def ceiling(name: str) -> Ceiling:
    """Return the quoted ceiling of a device.

    Args:
        name: the driver's name of it: "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X".

    Raises:
        AnalysisError: there is no such entry (none for a part of a divided device, or a "Ti"); it says how to add one.
    """
    matches = _matching_entries(name)
    if not matches:
        raise AnalysisError(
            f"there is no ceiling of the device {name!r}: measure it on its machine with `xsp doctor --measure RUN`, "
            f"or quote it in a file like xsp/device/devices.toml and name that file in {VARIABLE}"
        )
    _, entry = max(matches, key=lambda match: match[0])
    return _from_quote(name, entry)


def ceiling_by_user_name(name: str) -> Ceiling:
    """Return the quoted ceiling of a device named by a user: the fastest of several forms ("H100").

    The `name` of the result is that of the form.

    Raises:
        AnalysisError: there is no such entry; the name may also have been meant to be that of a device here.
    """
    if _matching_entries(name):
        return ceiling(name)
    words = _words(name)
    forms = [
        _from_quote(form_name, entry) for entry in _entries(os.environ.get(VARIABLE)) for form_name in entry["names"]
        if words and words <= _words(form_name)
    ]  # fmt: skip
    if not forms:
        from xsp.device import devices

        products = [product for entry in _entries(os.environ.get(VARIABLE)) for product in entry["names"]]
        models = [word for product in products for word in product.split() if re.fullmatch(r"[A-Z]+\d+\w*", word)]
        raise AnalysisError(
            f"there is no device {name!r} here (here are {', '.join(devices.ids())}), and no ceiling of the device of "
            "that name: write one of those here or a product (H200), or quote yours in a file like "
            f"xsp/device/devices.toml and name that file in {VARIABLE}{nearest(name, [*models, *products])}"
        )
    return max(forms, key=lambda form: (form.peak() or 0, form.bytes_per_s))


def is_named(name: str, product: str) -> bool:
    """Return whether a user's name of a device ("H200") is that of a product ("NVIDIA H200")."""
    words = _words(name)
    return bool(words) and words <= _words(product)


def _matching_entries(name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the entries that match a driver's name, with the number of words in common."""
    name_words = _words(name)
    return [
        (len(words), entry)
        for entry in _entries(os.environ.get(VARIABLE))
        for words in map(_words, entry["names"])
        if words <= name_words and all(_NEUTRAL_WORD.fullmatch(word) for word in name_words - words)
    ]


def _from_quote(name: str, entry: Mapping[str, Any]) -> Ceiling:
    vector, tensor = ({k: peak * 1e12 for k, peak in entry.get(unit, {}).items()} for unit in ("vector", "tensor"))
    kind = entry.get("kind", "")
    return Ceiling(name, vector, tensor, entry["memory"] * 1e9, entry["source"], kind=kind)


def of_run(run: Run, on_device: bool) -> Ceiling:
    """Return the ceiling of the device or processor of a run: as measured there, else as quoted.

    Args:
        run: the content of `run.json`.
        on_device: whether the work ran on a device; else it ran on the processor.

    Raises:
        AnalysisError: the ceiling is unknown; the message says how to obtain it.
    """
    devices = run.machine.devices
    name = (devices[0] if devices else None) if on_device else run.machine.cpu
    content = run.machine.ceilings.get(str(name))
    if content is not None:
        return _from_measurement(content)
    if not on_device:
        raise AnalysisError(
            "what this processor can do at most was not measured: do it where the run was recorded, with "
            "`xsp doctor --measure RUN`"
        )
    if name is None:
        raise AnalysisError(
            'the trace does not say which device it is of: write its name into run.json, "machine": {"devices": [NAME]}'
        )
    return ceiling(name)


def _from_measurement(content: Any) -> Ceiling:
    try:
        vector, tensor = ({str(k): float(v) for k, v in content[unit].items()} for unit in ("vector", "tensor"))
        levels = tuple(sorted((int(size), float(rate)) for size, rate in content.get("levels") or ()))
        source = str(content["source"])
        threads = None if content.get("threads") is None else int(content["threads"])
        for value in (content["bytes_per_s"], *vector.values(), *tensor.values(), *(rate for _, rate in levels)):
            if not 0 < float(value) < float("inf"):
                raise ValueError(f"{value} is no rate")
        return Ceiling(str(content["name"]), vector, tensor, float(content["bytes_per_s"]), source, levels, threads)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AnalysisError(f"machine.ceilings in run.json is damaged ({error}); measure again") from error


# --- of this machine ------------------------------------------------------------------------------------


def cache_path() -> Path:
    """Return the file in the user's cache with the measurements of this machine."""
    return cached.user_folder() / "ceilings.json"


def store(ceilings: Mapping[str, Ceiling]) -> Path | None:
    """Store ceilings of this machine by the names of its devices; None if the cache cannot be written.

    The highest rates of all measurements with equal threads are kept: other work can only lower what is measured.
    """
    path = cache_path()
    content = _cached_content()
    for name, entry in ceilings.items():
        with contextlib.suppress(AnalysisError):  # what is stored is damaged: the new one replaces it
            stored = None if name not in content else _from_measurement(content[name])
            entry = entry if stored is None or stored.threads != entry.threads else entry.highest(stored)
        content[name] = entry.content()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
    except OSError:
        return None
    return path


def of_machine(name: str) -> Ceiling | None:
    """Return the measured ceiling of a device of this machine; None if there is none, or one of fewer cores than now.

    Raises:
        AnalysisError: the stored content is damaged.
    """
    content = _cached_content().get(name)
    try:
        result = None if content is None else _from_measurement(content)
    except AnalysisError as error:
        raise AnalysisError(f"{cache_path()} is damaged; measure again with `xsp doctor --measure`") from error
    if result is not None and result.threads is not None and result.threads < processes.cores():
        return None
    return result


def _cached_content() -> dict[str, Any]:
    """Return the content of the file; empty if it does not exist or cannot be read."""
    try:
        content = json.loads(cache_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word} - _BRANDS


@lru_cache(maxsize=4)
def _entries(user_file: str | None) -> list[dict[str, Any]]:
    """Return the entries of the user's file, followed by those of xsp."""
    entries: list[dict[str, Any]] = []
    if user_file:
        try:
            user_entries = tomllib.loads(Path(user_file).expanduser().read_text(encoding="utf-8"))["device"]
            if not isinstance(user_entries, list):
                raise ValueError("each device begins with [[device]], in two brackets")
            entries += map(_check_entry, user_entries)
        except (OSError, ValueError, KeyError) as error:
            raise AnalysisError(f"{VARIABLE}={user_file}: cannot be read as a list of devices ({error})") from error
    entries += tomllib.loads((files("xsp.device") / "devices.toml").read_text(encoding="utf-8"))["device"]
    return entries


def _check_entry(entry: Any) -> dict[str, Any]:
    """Return an entry of a user's file.

    Raises:
        ValueError: it lacks something, or has a value of another type.
    """
    names = entry.get("names") if isinstance(entry, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError('a device needs its names, as in names = ["NVIDIA H100"]')
    peaks = [entry.get(unit, {}) for unit in ("vector", "tensor")]
    if not all(isinstance(table, dict) for table in peaks) or not isinstance(entry.get("source"), str):
        raise ValueError(f"{names[0]}: vector and tensor are tables of TFLOP/s by precision, source is a text")
    if not isinstance(entry.get("kind", ""), str):
        raise ValueError(f"{names[0]}: kind is a text, such as cuda")
    for value in (entry.get("memory"), *(peak for table in peaks for peak in table.values())):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError(f"{names[0]}: memory in GB/s and the peaks in TFLOP/s are numbers above 0")
    return dict(entry)


# --- measuring ----------------------------------------------------------------------------------------

ROUNDS_NS = 300_000_000
"""Nanoseconds for which a product or a copy is repeated; the fastest repeat counts."""


def measure() -> Iterator[Ceiling]:
    """Measure the processor and each other device of this machine: matrix products by type, and a copy in memory.

    Yields:
        A ceiling for each; a measurement takes a second or two.

    Raises:
        UsageError: torch is not installed.
    """
    from xsp.device import devices  # which answers for the devices, and asks this module for their ceilings

    yield from map(measured, devices.present())


def measured(device: Device) -> Ceiling:
    """Measure a device; a processor with all cores that this process may use, whatever torch's number of threads.

    Raises:
        UsageError: torch is not installed.
    """
    with importing(UsageError, "measuring ceilings takes torch; pip install 'xsp[torch]'"):
        import torch
    if not device.is_host:
        finish = device.synchronize  # the current device may be another one
        return _measure(torch, device.torch_name, device.name, size=8192, copy_bytes=1 << 30, finish=finish)
    previous = torch.get_num_threads()
    torch.set_num_threads(processes.cores())
    try:
        result = _measure(
            torch, device.torch_name, device.name, size=MEASURED_SIZE, copy_bytes=1 << 26, finish=device.synchronize,
            own=device.own_products(MEASURED_SIZE),
        )  # fmt: skip
    finally:
        torch.set_num_threads(previous)
    return replace(result, threads=processes.cores())


Products = Iterable[tuple[str, Callable[[], object]]]
"""Precisions, each with a product of two matrices in it."""

MEASURED_SIZE = 1024
"""Rows and columns of the matrices whose products are measured."""


def _measure(
    torch: Any, device: str, name: str, size: int, copy_bytes: int, finish: Callable[[], None], own: Products = ()
) -> Ceiling:
    """Measure one device; products run on tensor cores if it has them for the type.

    Args:
        torch: the module.
        device: what torch calls it.
        name: its product's name.
        size: rows and columns of the matrices.
        copy_bytes: half of the bytes that are copied and changed.
        finish: waits for it.
        own: see `xsp.device.contract.Device.own_products`.
    """
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    if device != "cpu":
        dtypes["fp16"] = torch.float16
    peaks = {kind: 2 * size**3 / _fastest(product(device, size, dtype), finish) for kind, dtype in dtypes.items()}
    for kind, work in own:
        with contextlib.suppress(RuntimeError):  # this torch has another signature: not measured
            peaks[kind] = 2 * size**3 / _fastest(work, finish)
    for kind in ("fp32", "bf16") if device == "cpu" else ():
        convolution_s = _fastest(_convolution(torch, dtypes[kind], size // 4), finish)
        peaks[kind] = max(peaks[kind], _CONVOLUTION_FLOPS * (size // 4) ** 2 / convolution_s)
    seconds_per_byte = [
        _fastest(work, finish) / moved for work, moved in _moves(torch, device, 2 * copy_bytes)
    ]  # fmt: skip
    description = f"{MEASURED}products of {size} × {size}{' and convolutions' * (device == 'cpu')}"
    description += f", copies and changes of {copy_bytes >> 19} MiB, {torch.get_num_threads()} threads"
    rate = 1 / min(seconds_per_byte)
    return Ceiling(name, peaks, {}, rate, description, _levels(torch, device, rate, finish))


WORKING_SETS = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Sizes in bytes; one half of a working set is copied to the other, and all of it is changed in place."""

MAX_CACHED_BYTES = 1 << 28
"""Bytes above which a working set has the rate of the memory, even if a part of it is in a cache."""

_REPEATS = 8
_LONG_BYTES = 1 << 24
"""Working set from which a single move is timed: a longer piece is disturbed more often."""


def _levels(torch: Any, device: str, memory: float, finish: Callable[[], None]) -> tuple[tuple[int, float], ...]:
    """Measure copies and changes within working sets; the cost of the call is subtracted: only the bytes count.

    The rate of a single thread is multiplied by the threads, each of which has such a cache: it is a ceiling.
    """
    threads = 1 if device != "cpu" else torch.get_num_threads()
    call_s = [seconds for seconds, _, _ in _timed_moves(torch, device, 8, finish)]
    levels: list[tuple[int, float]] = []
    rate = memory
    for size in reversed(WORKING_SETS):
        for empty_s, (elapsed, moved, elements) in zip(call_s, _timed_moves(torch, device, size, finish), strict=True):
            factor = threads if device == "cpu" and elements < _MIN_THREADED_ELEMENTS else 1
            if elapsed > 1.2 * empty_s:  # else the call dominates the time
                rate = max(rate, factor * moved / (elapsed - empty_s))
        levels.append((size, rate))
    return tuple(reversed(levels))


_MIN_THREADED_ELEMENTS = 32_768
"""Number of elements from which torch copies and changes with several threads."""


def _moves(torch: Any, device: str, size: int) -> list[tuple[Callable[[], object], int]]:
    """Return a copy and a change in place within a working set of `size` bytes, each with the bytes that it moves.

    A change in place does not fetch what it overwrites, as a copy does, so that it may reach a higher rate.
    """
    data = torch.empty(max(2, size // 4), dtype=torch.float32, device=device).fill_(1)
    half = len(data) // 2
    source, target = data[:half], data[half : 2 * half]
    return [(lambda: target.copy_(source), 8 * half), (lambda: data.mul_(1.0), 8 * len(data))]


def _timed_moves(
    torch: Any, device: str, size: int, finish: Callable[[], None]
) -> Iterator[tuple[float, int, int]]:  # fmt: skip
    """Yield the seconds of each move within a working set, its bytes, and the elements that it writes."""
    repeats = _REPEATS if size < _LONG_BYTES else 1
    for move, moved in _moves(torch, device, size):

        def work(move: Callable[[], object] = move) -> None:
            for _ in range(repeats):
                move()

        yield _fastest(work, finish, ROUNDS_NS // 6) / repeats, moved, moved // 8


def product(device: str, size: int, dtype: Any) -> Callable[[], object]:
    """Return the product of two matrices.

    Args:
        device: what torch calls the device.
        size: their rows and columns.
        dtype: their type.
    """
    import torch

    left, right = operands(device, size, dtype)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def operands(device: str, size: int, dtype: Any) -> tuple[Any, Any]:
    """Return two matrices of random numbers: with constant ones a GPU needs less power, and is up to 13 % faster."""
    import torch

    source = torch.Generator(device=device).manual_seed(0)
    values = (torch.empty(size, size, device=device).uniform_(-1, 1, generator=source) for _ in range(2))
    left, right = (value.to(dtype) for value in values)
    return left, right


_SIDE = 28
_CONVOLUTION_FLOPS = 2 * 9 * _SIDE**2
"""Operations of a 3 × 3 convolution per pair of channels."""


def _convolution(torch: Any, dtype: Any, channels: int) -> Callable[[], object]:
    """Return a convolution; on a processor, it uses another library than products, and may be twice as fast."""
    value = torch.full((1, channels, _SIDE, _SIDE), 0.5, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.full((channels, channels, 3, 3), 0.5, dtype=dtype).to(memory_format=torch.channels_last)

    def work() -> object:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(value, weight, padding=1)

    return work


def _fastest(work: Callable[[], object], finish: Callable[[], None], rounds_ns: int | None = None) -> float:
    """Return the shortest time of `work` in seconds, after a warm-up call."""
    work()
    finish()
    begin, best = monotonic_ns(), None
    while best is None or monotonic_ns() - begin < (ROUNDS_NS if rounds_ns is None else rounds_ns):
        start = monotonic_ns()
        work()
        finish()
        elapsed = monotonic_ns() - start
        best = elapsed if best is None else min(best, elapsed)
    return best / 1e9
