"""Whether sharing pays: processes load the same weights in turns, through the store and in ways without a store.

Each process is forked from one that has built the model but computed nothing, so its load and its call are the first.
The ways are `safetensors.torch.load_file`, which maps the file and so shares its pages, `torch.load`, and `attach`.
Each way is measured warm (the file is in the page cache, and the store holds the weights) and cold (neither). A few
processes of each way that load at once show how long that takes, and how much memory one more process takes: of the
host, or of the device onto which they load.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xsp import atomic, processes
from xsp.comparison import evidence
from xsp.device import devices
from xsp.errors import ShareError
from xsp.share import client
from xsp.share import devices as stores
from xsp.share.loadworker import ATTACH, MMAP, WAYS, memory_of

WARM, COLD = "warm", "cold"
CONCURRENT_PROCESSES = 3
"""Concurrent processes of a way for the memory measurement."""

TURNS = 12
COLD_TURNS = 5
"""Maximum number of cold turns: warm is the state that a store is for."""

START_S = 120.0
ANSWER_S = 300.0
END_S = 5.0
"""Seconds that a process that no longer answers may take to end."""

COLD_SHARE = 0.02
"""A file is not cold if more than this share of it is still in memory after dropping it."""

_CODE = processes.call_code("xsp.share.loadworker", "work")
_STORE = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from xsp import processes; processes.end_with_parent(int(sys.argv[2]))\n"
    "from xsp.cli import main; sys.exit(main(['share', 'serve', '--dir', sys.argv[3], '--capacity', *sys.argv[4:]]))"
)

ProgressCallback = Callable[[str, int, int], None]
"""Called before each process with a description, the number of processes so far, and the maximum number."""


@dataclass
class WayTimes:
    """Times of the processes of one way and state, one process per turn."""

    load_ns: list[float] = field(default_factory=list)
    call_ns: list[float] = field(default_factory=list)

    @property
    def total_ns(self) -> list[float]:
        """Nanoseconds of loading and the first call."""
        return [load + call for load, call in zip(self.load_ns, self.call_ns, strict=True)]


class ProcessMemory(NamedTuple):
    """Bytes that processes of one way take, as proportional set sizes without the mapped libraries; on a device, the
    bytes of their tensors."""

    single_bytes: int
    """Bytes of a single process, with everything else that the way needs (the store)."""

    further_bytes: float
    """Bytes per further process, from several concurrent processes."""

    pss: int
    """Proportional set size of one of the concurrent processes, libraries included; 0 on a device."""

    def of(self, count: int) -> float:
        """Return the bytes for this number of processes."""
        return self.single_bytes + (count - 1) * self.further_bytes


@dataclass
class Measurement:
    """The result of a measurement."""

    source: str
    module: str
    nbytes: int
    tensors: int
    turns: int = 0
    most_turns: int = TURNS
    times: dict[tuple[str, str], WayTimes] = field(default_factory=dict)
    memory: dict[str, ProcessMemory] = field(default_factory=dict)
    together: dict[tuple[str, int], WayTimes] = field(default_factory=dict)
    """Way and number of processes → the times of each of them, all at once."""

    device: str = ""
    """Identifier of the device onto which the weights are loaded; empty for the host."""

    device_name: str = ""
    cold_obstacle: str = ""
    """Why nothing was measured cold."""

    concurrent: int = 0
    """Number of processes that loaded at once; 0 for none."""

    large_bytes: int | None = None
    """Bytes of the weights that have large pages in the store; None if unknown."""


def measure(
    source: str,
    module: str = "",
    turns: int = TURNS,
    seed: int = 0,
    on_progress: ProgressCallback = lambda *_: None,
    states: Sequence[str] = (WARM, COLD),
    concurrent: int = CONCURRENT_PROCESSES,
    device: str | None = None,
) -> Measurement:
    """Measure all ways in turns, until it is clear whether `attach` takes less time than `load_file`, both warm.

    A separate store is started for the measurement and ended afterwards. The order within each turn is random.

    Args:
        source: a safetensors file, or the name of a model, whose weights are then initialised from a seed.
        module: the name of the model to which the file belongs; without it, tensors are read once instead of a call.
        turns: maximum number of turns; 3 or more.
        seed: seed of the order.
        on_progress: progress callback, see `ProgressCallback`.
        states: which of warm and cold to measure.
        concurrent: processes that load at once; 2 or more, or 0 to leave that and memory out.
        device: identifier of the device onto which all ways load; default: the host's memory.

    Raises:
        ShareError: a process cannot load the weights or call the model; the message gives the reason.
        DeviceError: there is no such device.
        UsageError: the number of turns is invalid.
    """
    repeats = evidence.turn_repeats(turns)
    for library in ("torch", "safetensors"):
        if importlib.util.find_spec(library) is None:
            raise ShareError(f"measuring needs {library}: pip install 'xsp[share]'")
    target = devices.of(device or "cpu")
    if obstacle := target.sharing_obstacle():
        raise ShareError(f"{target.id}: {obstacle}")
    path = Path(source)
    if not path.is_file():
        if ":" not in source:
            raise ShareError(
                f"{source}: no such file; give a safetensors file, or a model such as torchvision:resnet18"
            )
        if module:
            raise ShareError(f"{source}: no such file; omit MODULE if the source is the name of a model")
    weights, module = (str(path.resolve()), module) if path.is_file() else ("", source)
    with atomic.temporary_folder() as folder:
        request = {"cwd": os.getcwd(), "folder": folder, "module": module, "weights": weights, "store": f"{folder}/s"}
        if not target.is_host:
            request["device"] = target.id
        on_progress("writing the weights", 0, 1)
        with worker_process() as process:
            weights_size = request_answer(process, {"do": "prepare", **request})
        request["weights"] = weights or f"{folder}/model.safetensors"
        result = Measurement(source, module, weights_size["nbytes"], weights_size["tensors"], most_turns=turns)
        if not target.is_host:
            result.device, result.device_name = target.id, target.name
        files = [Path(request["weights"]), Path(folder) / "model.pt"]
        result.cold_obstacle = _why_not_cold(files) if COLD in states else "it was not requested"
        capacity = 2 * weights_size["nbytes"] + (64 << 20)
        # The options with which a store serves a device; none for one whose memory is the host's.
        with running_store(
            Path(request["store"]), capacity, *(() if target.torch_type == "cpu" else ("--device", str(target.index)))
        ) as store:
            _take_turns(result, request, files, repeats, random.Random(seed), on_progress)
            if concurrent:
                _take_memory(result, request, files, store, on_progress, concurrent)
            result.large_bytes = sum(entry["large_bytes"] for entry in client.status(Path(request["store"]))["objects"])
    return result


def _take_turns(
    result: Measurement,
    request: dict[str, str],
    files: Sequence[Path],
    repeats: evidence.Repeats,
    rng: random.Random,
    on_progress: ProgressCallback,
) -> None:
    states = [WARM] if result.cold_obstacle else [WARM, COLD]
    order = [(way, state) for way in WAYS for state in states]
    result.times = {key: WayTimes() for key in order}
    with worker_process() as parent:
        request_answer(parent, {"do": "build", "forks": True, **request})
        for turn in range(1, result.most_turns + 1):
            turn_order = [key for key in order if key[1] == WARM or turn <= COLD_TURNS]
            for index, (way, state) in enumerate(rng.sample(turn_order, len(turn_order))):
                message = f"turn {turn} of at most {result.most_turns}: {way}, {state}"
                on_progress(message, (turn - 1) * len(order) + index, result.most_turns * len(order))
                if state == WARM:
                    _fill_device(parent, request)
                request_answer(parent, {"do": "fork"})
                _set_state(state, files, Path(request["store"]))
                times = request_answer(parent, {"do": "load", "way": way})
                request_answer(parent, {"do": "end"})
                result.times[way, state].load_ns.append(times["load_ns"])
                result.times[way, state].call_ns.append(times["call_ns"])
            result.turns = turn
            pair = result.times[MMAP, WARM].total_ns, result.times[ATTACH, WARM].total_ns
            if turn >= evidence.MIN_TURNS and evidence.compare_turn(repeats, *pair).is_enough:
                return


def _take_memory(
    result: Measurement,
    request: dict[str, str],
    files: Sequence[Path],
    store: subprocess.Popen[bytes],
    on_progress: ProgressCallback,
    concurrent: int,
) -> None:
    """Measure the times and the memory of one process, and of several that load at once, of each way."""
    result.concurrent = concurrent
    if result.device:
        with worker_process() as parent:
            request_answer(parent, {"do": "build", "forks": True, **request})
            _fill_device(parent, request)
    for index, way in enumerate(WAYS):
        totals: list[int] = []
        pss = 0
        is_known = True
        for count in (1, concurrent):
            on_progress(f"memory: {count} × {way}", index, len(WAYS))
            with contextlib.ExitStack() as stack:
                workers = [stack.enter_context(worker_process()) for _ in range(count)]
                for process in workers:
                    request_answer(process, {"do": "build", **request})
                _set_state(WARM, files, Path(request["store"]))
                for process in workers:
                    process.ask({"do": "load", "way": way})
                times = [_answer(process, {"do": "load", "way": way}) for process in workers]
                result.together[way, count] = WayTimes(
                    [each["load_ns"] for each in times], [each["call_ns"] for each in times]
                )
                memories = [request_answer(process, {"do": "memory"}) for process in workers]
                if way == ATTACH:
                    memories.append(_memory_of_store(store, request))
            is_known = is_known and all(memories)  # else the system does not report it
            if is_known and result.device:
                totals.append(sum(memory["held"] for memory in memories))
            elif is_known:
                totals.append(sum(memory["pss"] - memory["libraries"] for memory in memories))
                pss = memories[0]["pss"]
        if is_known:
            result.memory[way] = ProcessMemory(totals[0], (totals[1] - totals[0]) / (concurrent - 1), pss)


def _memory_of_store(store: subprocess.Popen[bytes], request: Mapping[str, str]) -> dict[str, Any]:
    if "device" not in request:
        return memory_of(store.pid)
    return {"held": sum(status.get("held_bytes", 0) for status in stores.status(Path(request["store"])))}


def _fill_device(parent: processes.WorkerProcess, request: Mapping[str, str]) -> None:
    """Let a child attach if the store serves a device and holds nothing there, so that it holds the weights."""
    served = stores.status(Path(request["store"])) if "device" in request else []
    if served and not any(status.get("objects") for status in served):
        for step in ({"do": "fork"}, {"do": "load", "way": ATTACH}, {"do": "end"}):
            request_answer(parent, step)


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker_process() -> Iterator[processes.WorkerProcess]:
    """Run a process under measurement."""
    process = processes.WorkerProcess(_CODE, str(os.getpid()))
    try:
        yield process
    finally:
        process.end()


def request_answer(process: processes.WorkerProcess, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to a process under measurement, and return its answer.

    Raises:
        ShareError: the process reports an error, ends, or takes too long.
    """
    process.ask(request)
    return _answer(process, request)


def _answer(process: processes.WorkerProcess, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request that was sent; errors as in `request_answer`."""
    deadline = time.monotonic() + ANSWER_S
    line = process.answer(deadline)
    if not line:
        is_late = time.monotonic() >= deadline
        code = process.end(0.0 if is_late else END_S)
        failure = f"took more than {ANSWER_S:.0f} s" if is_late else f"ended ({processes.exit_description(code)})"
        raise ShareError(f"the process for {request['do']!r} {failure}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ShareError(f"{request.get('way', request['do'])}: {answer['error']}")
    return answer


@contextlib.contextmanager
def running_store(folder: Path, capacity: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a store of `capacity` bytes in a subprocess; `options` are further arguments of `xsp share serve`."""
    arguments = [str(os.getpid()), str(folder), str(capacity), *options]
    process = processes.start_python(_STORE, *arguments, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                client.connect(folder).close()
                break
            except ShareError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()


def _set_state(state: str, files: Sequence[Path], store: Path) -> None:
    """Bring the files into memory and their weights into the store (warm), or remove both (cold)."""
    if state == WARM:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass
        client.attach(files[0], store)
        return
    deadline = time.monotonic() + START_S
    while (
        stores.evict("*", store) + client.evict("*", store)["attached"]
    ):  # the end of the last turn's process is noticed late
        if time.monotonic() > deadline:
            raise ShareError("the weights stay attached, so cold loading cannot be measured")
        time.sleep(0.005)
    for path in files:
        _drop(path)


def _drop(path: Path) -> None:
    """Ask the system to drop a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # dirty pages cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _why_not_cold(files: Sequence[Path]) -> str:
    """Return the reason why files cannot be made cold; empty if they can."""
    for path in files:
        _drop(path)
        share = resident_share(path)
        if share is None:
            return "the system does not report which part of a file is in memory"
        if share > COLD_SHARE:
            return f"{100 * share:.0f} % of {path.name} stay in memory when dropped (tmpfs, or in use)"
    return ""


def resident_share(path: Path) -> float | None:
    """Return the share of a file's pages that is in memory; None if the system does not report it."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    if not size or not hasattr(libc, "mincore"):
        return None
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
        # ctypes gives the address only of a writable mapping; this one is private, and nothing writes to it
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    return None if failed else sum(page & 1 for page in pages) / len(pages)
