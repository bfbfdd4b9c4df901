"""The runtime `collectives`: gloo ranks on this machine, each a separate process that receives commands.

The process that times is idle while they run: after a barrier, each rank reports by the machine's clock when it started
and when it ended. A timing lasts from the last start to the last end; of `after` it is what the ranks spend in
all-reduces on average, since each of them computes before each one. The ranks find each other through an unnamed file
in memory, and end with the process that started them.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsp import processes
from xsp.bench import transfers
from xsp.bench.spec import Spec
from xsp.errors import first_line
from xsp.texts import size_text

_CODE = processes.call_code("xsp.bench.ranks", "run_rank")

PATIENCE_S = 60.0
"""Seconds to wait for ranks to start or to answer."""

MOST_RANKS = 64

COMPUTING = ("together-product", "together-copy", "beside")
"""Collectives in which ranks compute independently."""

CROWDED_NS = 50_000_000
"""Shortest batch in which more ranks compute than there are cores.

The system lets a process keep a core for some milliseconds. In a batch of one millisecond some ranks have not begun
when others have ended, and the time of starting them counted as computing: 5 times as long as alone, instead of 2.
"""


class Collectives:
    """The runtime that prepares the collectives of `xsp.bench.transfers`."""

    name = transfers.COLLECTIVES

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int) -> Any:
        """Return a collective ready to be timed.

        Raises:
            NotTimeable: there is no such collective, or gloo cannot run it here.
            MemoryError: the buffers exceed the limit.
        """
        from xsp.bench.inputs import NotTimeable
        from xsp.bench.rounds import BATCH_NS
        from xsp.bench.torchcalls import Prepared

        name, arguments = transfers.arguments(spec)
        size, count = int(arguments.get("bytes", 0)), int(arguments.get("ranks", 0))
        if name not in transfers.OF_RANKS or not 1 <= count <= MOST_RANKS or size < 0:
            raise NotTimeable(f"there is no collective {name} of {count} ranks")
        if 2 * size * count > limit_bytes:
            raise MemoryError(
                f"its buffers take {size_text(2 * size * count)} of {size_text(limit_bytes)} allowed, on all ranks"
            )
        command = {"what": name, "bytes": size, "ranks": count, "products": int(arguments.get("products", 0))}
        try:
            ranks = _ranks(count, spec.threads)
            first_ns = ranks.measure_ns(command, 1)
        except CommandRefused as error:
            _ranks.end()
            raise NotTimeable(str(error)) from error
        trips = 2 if name == "send" else 1  # there and back
        repeats = max(1, CROWDED_NS // max(first_ns, BATCH_NS)) if _is_crowded(command) else 1
        return Prepared(
            lambda: None,
            [()],
            timed=lambda calls: round(ranks.measure_ns(command, calls * repeats) / (trips * repeats)),
        )


class CommandRefused(Exception):
    """Raised when ranks cannot carry out a command; the message is the reason."""


class _RankCache:
    """A cache of started ranks; a group also serves requests for fewer ranks."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Ranks] = {}

    def __call__(self, count: int, threads: int) -> Ranks:
        groups = [
            group for (size, group_threads), group in self._groups.items() if size >= count and group_threads == threads
        ]
        if not groups:
            groups = [self._groups.setdefault((count, threads), Ranks(count, threads))]
        return groups[0]

    def end(self) -> None:
        """End all ranks: the ranks of a failed collective may still wait for each other."""
        for group in self._groups.values():
            group.end()
        self._groups.clear()


class Ranks:
    """A group of rank processes that carry out commands."""

    def __init__(self, count: int, threads: int) -> None:
        """Start the processes.

        Raises:
            Refused: the processes do not start.
        """
        self.count = count
        self._processes: list[processes.WorkerProcess] = []
        store = os.memfd_create("xsp-ranks")
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if Path("/sys/class/net/lo").exists():
            variables["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host name resolves to
        try:
            for rank in range(count):
                arguments = os.getpid(), rank, count, threads, store
                self._processes.append(
                    processes.WorkerProcess(
                        _CODE, *map(str, arguments), env={**processes.environment(), **variables}, pass_fds=(store,)
                    )
                )
            for process in self._processes:
                self._answer(process)
        except OSError as error:
            self.end()
            raise CommandRefused(f"ranks cannot be started ({error.strerror})") from error
        except CommandRefused:
            self.end()
            raise
        finally:
            os.close(store)

    def measure_ns(self, command: dict[str, Any], calls: int) -> int:
        """Return the nanoseconds of `calls` collectives, from the last start to the last end.

        If there are more ranks than cores, some start after others have ended; collectives in which ranks compute are
        therefore timed from the first start.

        Raises:
            Refused: a rank cannot run the collective, or does not answer.
        """
        group = self._processes[: command["ranks"]]
        for process in group:
            process.ask({**command, "calls": calls})
        answers = [self._answer(process) for process in group]
        if all("spent" in answer for answer in answers):
            return max(1, round(sum(answer["spent"] for answer in answers) / len(answers)))
        starts = [answer["began"] for answer in answers]
        return max(
            1, max(answer["ended"] for answer in answers) - (min(starts) if _is_crowded(command) else max(starts))
        )

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
        self._processes = []

    @staticmethod
    def _answer(rank: processes.WorkerProcess) -> dict[str, int]:
        line = rank.answer(time.monotonic() + PATIENCE_S)
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a rank ended, or does not answer"}
        if "error" in answer:
            raise CommandRefused(str(answer["error"])[:200])
        return answer


def _is_crowded(command: dict[str, Any]) -> bool:
    """Return whether more ranks compute than there are cores."""
    return command["what"] in COMPUTING and command["ranks"] > processes.cores()


_ranks = _RankCache()


# --- a rank ------------------------------------------------------------------------------------------------------


def run_rank(parent: int, rank: int, count: int, threads: int, store: int, answers: int) -> None:
    """Run as a rank: carry out the commands on stdin until it is closed.

    Args:
        parent: process ID of the parent.
        rank: rank of this process.
        count: number of ranks.
        threads: number of torch threads.
        store: descriptor of the file through which the ranks find each other.
        answers: descriptor to which answers are written.
    """
    processes.end_with_parent(parent)
    with processes.Questions(answers) as questions:
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(threads)
            patience = datetime.timedelta(seconds=PATIENCE_S)
            file_store = dist.FileStore(f"/proc/self/fd/{store}", count)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=file_store, rank=rank, world_size=count, timeout=patience)
            groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
            questions.answer({"ready": rank})
        except Exception as error:
            questions.answer({"error": f"gloo cannot be used: {first_line(error)[:160]}"})
            return
        buffers: dict[tuple[str, int], Any] = {}
        for question in questions:
            try:
                questions.answer(_execute(question, rank, groups, buffers))
            except Exception as error:
                text = next(iter(str(error).splitlines()), "")
                questions.answer({"error": f"gloo rejects it: {type(error).__name__}: {text[:160]}"})
    os._exit(0)  # skips the cleanup of process groups, which would wait for other ranks


def _execute(command: dict[str, Any], rank: int, groups: dict[int, Any], buffers: dict[tuple[str, int], Any]) -> Any:
    import torch
    import torch.distributed as dist

    count, calls = command["ranks"], command["calls"]
    group = groups[count]
    work = _work(command, rank, group, buffers)
    work()
    if count > 1:
        dist.barrier(group)
    start = time.monotonic_ns()
    with torch.inference_mode():
        results = [work() for _ in range(calls)]
    answer = {"began": start, "ended": time.monotonic_ns()}
    return {**answer, "spent": sum(results)} if command["what"] == "after" else answer


def _work(command: dict[str, Any], rank: int, group: Any, buffers: dict[tuple[str, int], Any]) -> Callable[[], Any]:
    """Return a function that runs one collective; that of `after` returns the nanoseconds of its all-reduce."""
    import torch
    import torch.distributed as dist

    count, kind = command["ranks"], command["what"]
    elements = max(1, command["bytes"] // 4 // count) * count

    def buffer(name: str, length: int) -> Any:
        """Return a slice of a buffer that grows on demand: ranks hold no more than the largest message."""
        tensor = buffers.get((name, 0))
        if tensor is None or len(tensor) < length:
            tensor = buffers[name, 0] = torch.zeros(length)
        return tensor[:length]

    if kind in ("together-product", *transfers.WITH_PRODUCTS):
        matrix = buffer("product", 256 * 256).view(256, 256)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        if kind == "together-product":
            return lambda: multiply(1)
        full = buffer("in", elements)

        def reduce_and_multiply() -> None:
            pending: Any = dist.all_reduce(full, group=group, async_op=True)
            multiply(command["products"])
            pending.wait()

        def multiply_and_reduce() -> int:
            multiply(command["products"])
            begin = time.monotonic_ns()
            dist.all_reduce(full, group=group)
            return time.monotonic_ns() - begin

        return reduce_and_multiply if kind == "beside" else multiply_and_reduce
    if kind == "together-copy":
        source, target = buffer("in", transfers.COPY_BYTES // 4), buffer("out", transfers.COPY_BYTES // 4)
        return lambda: target.copy_(source)
    if kind == "barrier":
        return lambda: dist.barrier(group)
    full, part = buffer("in", elements), buffer("out", elements)[: elements // count]
    peer = 1 - rank

    def there_and_back() -> None:
        if rank == 0:
            dist.send(full, peer, group)
            dist.recv(full, peer, group)
        else:
            dist.recv(full, peer, group)
            dist.send(full, peer, group)

    def both_send() -> None:
        received = buffer("out", elements)
        requests: list[Any] = [dist.isend(full, peer, group), dist.irecv(received, peer, group)]
        for request in requests:
            request.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group),
        "reduce": lambda: dist.reduce(full, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(buffer("out", elements), full, group=group),
        "send": there_and_back,
        "send-both": both_send,
    }[kind]
