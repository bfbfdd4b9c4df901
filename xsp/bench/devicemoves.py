"""Transfers to, from and within a device, for the runtime `transfers`: those of the first accelerator of the machine.

Imports torch: import it where it is needed. Transfers are timed by the device's clock. Transfers of pageable memory,
which keep the host busy, and transfers between two devices use the host's clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from xsp.bench.inputs import NotTimeable
from xsp.bench.torchcalls import Prepared, self_timed
from xsp.bench.transfers import FAMILIES, ROW
from xsp.device import devices
from xsp.device.contract import Accelerator, DeviceLost, Elapsed, Fault
from xsp.errors import DeviceError, first_sentence

MOST_CALLS = 100
"""Most transfers of a batch by the device's clock: they are queued while it spins."""

MOST_LAUNCHES = 500


def prepare(name: str, size: int) -> Prepared:
    """Return a transfer that involves a device, ready to be timed.

    Raises:
        NotTimeable: there is no such device, or it has no such transfer.
        DeviceError: the device cannot be used now.
        MemoryError: it has too little memory.
        DeviceLost: it is lost for this process.
    """
    here = [device for device in devices.accelerators() if isinstance(device, Accelerator)]
    if not here:
        raise NotTimeable("there is no device here")
    device, peers = here[0], [other for other in here[1:] if other.kind == here[0].kind]
    if name == "peer-copy" and not peers:
        listed = ", ".join(other.id for other in here)
        raise NotTimeable(f"a peer copy needs two devices of one kind, and here is only {listed}")
    for used in here[:1] if name != "peer-copy" else (device, peers[0]):
        if reason := devices.obstacle(used):
            raise DeviceError(reason)
    with _told(device):
        prepared = _prepared(name, device, peers, size)
    timed = prepared.timed
    assert timed is not None

    def batch(calls: int) -> int | Elapsed:
        with _told(device):
            return timed(calls)

    return replace(prepared, timed=batch)


@contextlib.contextmanager
def _told(device: Accelerator) -> Iterator[None]:
    """Raise what the device says that an error means: the sitting is the processor's, which does not know."""
    try:
        yield
    except NotImplementedError as error:
        raise NotTimeable(str(error)) from error
    except Exception as error:
        fault = device.fault(error)
        if fault is Fault.OUT_OF_MEMORY:
            raise MemoryError(first_sentence(error)) from error
        if fault is Fault.LOST:
            raise DeviceLost(first_sentence(error)) from error
        raise


def _prepared(name: str, device: Accelerator, peers: Sequence[Accelerator], size: int) -> Prepared:
    if not FAMILIES[name].most:
        call = _launched(name, device)
        return self_timed(lambda calls: _by_host(device, call, calls, issued=True), MOST_LAUNCHES)
    if name == "peer-copy":
        return _peer_copy(device, peers[0], size)
    if name == "zero-copy" or name.startswith("managed-"):
        return _of_host_pages(name, device, size)
    if name == "both-ways-pinned":
        return _both_ways(device, size)
    move = _moved(name, device, size)
    if name.endswith("pageable"):
        return self_timed(lambda calls: _by_host(device, move, calls))
    return self_timed(lambda calls: _on_device(device, move, calls), MOST_CALLS)


def _on_device(
    device: Accelerator, call: Callable[[], object], calls: int, before: Callable[[], object] | None = None
) -> int:
    return max(1, round(device.timed(call, [()] * calls, before).ns))


def _by_host(
    device: Accelerator,
    call: Callable[[], object],
    calls: int,
    issued: bool = False,
    finish: Callable[[], object] | None = None,
) -> int:
    """Return the nanoseconds of the host until the device has done the calls and `finish` returns, or until they are
    `issued`."""

    def repeated() -> None:
        for _ in range(calls):
            call()
        if finish is not None:
            finish()

    call()  # what the first call loads is no part of it
    elapsed = device.waited(repeated)
    return max(1, round(elapsed.issue_ns if issued else elapsed.ns))


def _launched(name: str, device: Accelerator) -> Callable[[], object]:
    """Return a call by which the host launches something, or waits."""
    if name == "synchronize":
        return device.synchronize
    if name == "graph-launch":
        tensor = torch.zeros(1, device=device.torch_name)
        return device.capture(lambda: tensor.add_(1))
    return device.launch()


def _moved(name: str, device: Accelerator, size: int) -> Callable[[], object]:
    """Return a transfer to, from or within a device."""
    place = device.torch_name
    if name == "device-strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4, device=place)[::2] for _ in range(2)]
        return lambda: rows[0].copy_(rows[1])
    if name in ("device-read", "device-write"):
        tensor = torch.ones(size // 4, device=place)
        return tensor.sum if name == "device-read" else lambda: tensor.fill_(2.0)
    there = torch.ones(size, dtype=torch.uint8, device=place)
    if name == "device-copy":
        target = torch.empty_like(there)
        return lambda: target.copy_(there)
    here = torch.ones(size, dtype=torch.uint8)
    here = device.pinned(here) if name.endswith("pinned") else here
    target, source = (there, here) if name.startswith("host-to-device") else (here, there)
    return lambda: target.copy_(source, non_blocking=name.endswith("pinned"))


def _both_ways(device: Accelerator, size: int) -> Prepared:
    """Return transfers in both directions at once, each in its own stream."""
    ways = [_moved(f"{way}-pinned", device, size) for way in ("host-to-device", "device-to-host")]

    def times(move: Callable[[], object], calls: int) -> Callable[[], object]:
        return lambda: [move() for _ in range(calls)]

    def batch(calls: int) -> int:
        return _on_device(device, lambda: device.beside([times(way, calls) for way in ways]), 1)

    device.beside([times(way, 1) for way in ways])  # raises here if the device has one stream
    return self_timed(batch, MOST_CALLS)


def _peer_copy(device: Accelerator, peer: Any, size: int) -> Prepared:
    source, target = (torch.ones(size, dtype=torch.uint8, device=each.torch_name) for each in (device, peer))
    return self_timed(lambda calls: _by_host(device, lambda: target.copy_(source), calls, finish=peer.synchronize))


def _of_host_pages(name: str, device: Accelerator, size: int) -> Prepared:
    """Return a device's access to memory of the host; managed pages are on the host before each."""
    if name == "zero-copy":
        seen = device.seen(device.pinned(torch.ones(size // 4)))
        return self_timed(lambda calls: _on_device(device, seen.sum, calls), MOST_CALLS)
    pages = device.managed(size)
    move = pages.prefetch if name == "managed-prefetch" else pages.tensor.sum
    return self_timed(lambda calls: _on_device(device, move, calls, pages.to_host), MOST_CALLS)
