"""Run the store until Ctrl-C: weights in sealed shared memory, offered over a Unix socket of this user.

Nothing listens on the network. If the capacity is reached, the least recently used weights are evicted, or those that
--evict chooses, never weights that a process is attached to. Attached clients keep their weights when the store ends;
the next store begins empty. With --device, weights are also copied to NVIDIA devices, one copy for all processes that
ask for it. The process that keeps them there ends after the last of its clients, even if the store ends before.

examples:
  xsp share serve
  xsp share serve --capacity 8GiB
  xsp share serve --dir /run/user/1000/models --capacity 512MiB
  xsp share serve --evict gdsf      also by size and time to copy
  xsp share serve --device 0 --device-capacity 8GiB
"""

from __future__ import annotations

import argparse

from xsp import processes, texts
from xsp.cli import options, progress, share
from xsp.errors import UsageError

SUMMARY = "run the store, until Ctrl-C"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--capacity",
        type=options.size,
        metavar="SIZE",
        help="memory for all weights, such as 8GiB (default: half of the free memory)",
    )
    parser.add_argument(
        "--evict",
        choices=("lru", "lfu", "gdsf"),
        default="lru",
        help="what is evicted first: the least recently used (lru, the default), the least frequently requested (lfu), "
        "or by uses, time to copy and size together (gdsf)",
    )
    parser.add_argument(
        "--device",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="also serve the memory of this device, numbered as in PyTorch; can be repeated",
    )
    parser.add_argument(
        "--device-capacity",
        type=options.size,
        metavar="SIZE",
        help="memory for all weights on each device (default: half of the free memory there)",
    )
    share.add_dir_option(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    from xsp.device import devices
    from xsp.share import devicestore, shelf, store, wire

    capacity = args.capacity or (processes.free_memory_bytes() or 1 << 30) // 2
    if args.device_capacity is not None and not args.device:
        raise UsageError("--device-capacity: also give the device, --device 0")
    eviction = shelf.Eviction(args.evict)
    host_store = store.WeightStore(wire.directory(args.dir), capacity, eviction)
    device_stores = devicestore.start_device_stores(host_store, args.device, args.device_capacity, eviction)
    also = "".join(f", and {devices.sharing_device(ordinal).id}" for ordinal in device_stores)
    message = f"xsp share: up to {texts.size_text(capacity)} at {host_store.folder}{also}; Ctrl-C ends it"
    host_store.serve_until_signal(lambda: progress.echo(message, flush=True))
    for ordinal, process in devicestore.wait_for_exit(device_stores):
        progress.warn(
            f"xsp share: process {process} keeps the memory of {devices.sharing_device(ordinal).id} until the attached "
            "processes have ended; killing it would make their memory invalid"
        )
    return 0
