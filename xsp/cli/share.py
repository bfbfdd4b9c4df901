"""Keep one copy of a model's weights in shared memory, to which the processes of this machine attach.

A process attaches by `xsp.share.attach(module, "model.safetensors")`: its parameters become read-only views of the
shared memory. Weights that are not in the store yet are copied there first. Killed clients are detached; clients of a
killed store keep their weights. `safetensors.torch.load_file` also maps the file without copying: measure whether a
store pays before you use one.

examples:
  xsp share estimate model.safetensors        would it pay, by bytes and tensors?
  xsp share measure torchvision:resnet50      does it pay for this model, on this machine?
  xsp share serve --capacity 8GiB             the store, until Ctrl-C
  xsp share put model.safetensors             copy weights in advance
  xsp share status                            contents, and attached processes; reads no weights
  xsp share check                             compare weights on devices with the store's
  xsp share evict 9f86d081                    free weights that are not in use
  xsp share serve --device 0                  also one copy of weights on a GPU for all processes
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from xsp import processes, terminal, texts
from xsp.cli import options, progress
from xsp.errors import UsageError

SUMMARY = "share one copy of weights between processes"


def add_dir_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the directory of the store's socket."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory of the store's socket (default: $XSP_SHARE_DIR, or one of this user)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """List the subcommands."""
    del args
    return progress.list_parts("share", PARTS)


def _number(text: str) -> int:
    """Return the number of a device from itself or the device's identifier: `0`, `cuda:0`."""
    from xsp.device import devices

    number = text.rpartition(":")[2]
    if not number.isdecimal() or text not in (number, devices.sharing_device(int(number)).id):
        raise argparse.ArgumentTypeError(f"{text!r}: write a number as PyTorch has it, 0 or cuda:0")
    return int(number)


def _line(result: dict[str, Any]) -> str:
    """Return the line for the comparison of one object."""
    from xsp.device import devices

    pids = ", ".join(map(str, result["attached"])) or "nobody"
    verdict = "equal"
    if result["error"]:
        verdict = f"not compared: {result['error']}"
    elif result["corrupted"]:
        verdict = f"DIFFERS from the host at {result['corrupted']}; end the processes that are attached"
    label = devices.sharing_device(result["device"]["ordinal"]).id
    return (
        f"  {label}  {result['key'][:16]}  {texts.size_text(result['nbytes']):>10}  "
        f"attached: {pids}  {result['source']}: {verdict}"
    )


class Serve:
    """Run the store until Ctrl-C: weights in sealed shared memory, offered over a Unix socket of this user.

    Nothing listens on the network. If the capacity is reached, the least recently used weights are evicted, or those
    that --evict chooses, never weights that a process is attached to. Attached clients keep their weights when the
    store ends; the next store begins empty. With --device, weights are also copied to NVIDIA devices, one copy for all
    processes that ask for it. The process that keeps them there ends after the last of its clients, even if the store
    ends before.

    examples:
      xsp share serve
      xsp share serve --capacity 8GiB
      xsp share serve --dir /run/user/1000/models --capacity 512MiB
      xsp share serve --evict gdsf      also by size and time to copy
      xsp share serve --device 0 --device-capacity 8GiB
    """

    SUMMARY = "run the store, until Ctrl-C"

    @staticmethod
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
            help="what is evicted first: the least recently used (lru, the default), the least frequently requested "
            "(lfu), or by uses, time to copy and size together (gdsf)",
        )
        parser.add_argument(
            "--device",
            type=_number,
            action="append",
            default=[],
            metavar="N",
            help="also serve the memory of this device, numbered as in PyTorch, 0 or cuda:0; can be repeated",
        )
        parser.add_argument(
            "--device-capacity",
            type=options.size,
            metavar="SIZE",
            help="memory for all weights on each device (default: half of the free memory there)",
        )
        add_dir_option(parser)

    @staticmethod
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
                f"xsp share: process {process} keeps the memory of {devices.sharing_device(ordinal).id} until the "
                "attached processes have ended; killing it would make their memory invalid"
            )
        return 0


class Put:
    """Copy weights into the store before the first client needs them.

    The key of each file is printed; `attach` accepts it instead of the file.

    examples:
      xsp share put model.safetensors
      xsp share put a.safetensors b.safetensors
      xsp share put model.safetensors.index.json      all shards; or give their folder
    """

    SUMMARY = "copy weights into the store"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "files", nargs="+", metavar="FILE", help="safetensors files, indexes of shards, or folders with one of them"
        )
        add_dir_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Copy the files, one by one."""
        from xsp import clock
        from xsp.share import client, weights

        for name in [shard for source in args.files for shard in weights.shards(source)]:
            start = clock.monotonic_ns()
            attachment = client.attach(name, args.dir)
            ms = (clock.monotonic_ns() - start) / 1e6
            state = "was there" if attachment.hit else "copied"
            size = texts.size_text(attachment.mapping.nbytes)
            progress.echo(
                f"{name}: sha256:{attachment.key[:16]}, {size}, {len(attachment.tensors)} tensors, {state}, {ms:.1f} ms"
            )
            del attachment  # detached, so that the store can evict it for the next file
        return 0


class Status:
    """Show what the store holds, on the host and on devices, and which processes are attached.

    No weights are read: weights on devices that were found to differ before are marked "corrupted". `xsp share check`
    compares all of them with those of the store.

    examples:
      xsp share status
      xsp share status --format json
    """

    SUMMARY = "show what the store holds, and who is attached; reads no weights"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        options.add_format_option(parser)
        add_dir_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the status of the store."""
        from xsp.device import devices as known
        from xsp.share import client, devices

        status = client.status(args.dir)
        on_devices = devices.status(args.dir)
        if args.format == "json":
            progress.write_json({**status, "devices": on_devices})
            return 0
        for store in (status, *on_devices):
            if "error" in store:
                progress.echo(f"{store['socket']}: {store['error']}")
                continue
            used_text, capacity_text = texts.size_text(store["held_bytes"]), texts.size_text(store["capacity_bytes"])
            copying = f", {texts.size_text(store['copying_bytes'])} being copied" if store["copying_bytes"] else ""
            prefix = ""
            if "device" in store:
                prefix = f"{known.sharing_device(store['device']['ordinal']).id}, {store['device']['name']}: "
            progress.echo(
                f"{prefix}process {store['pid']}: {used_text} of {capacity_text}{copying}; "
                f"{store['evictions']} evicted so far"
            )
            for entry in store["objects"]:
                pids = ", ".join(map(str, entry["attached"])) or "nobody"
                corrupted = f"  corrupted ({entry['corrupted']})" if entry.get("corrupted") else ""
                progress.echo(
                    f"  {entry['key'][:16]}  {texts.size_text(entry['nbytes']):>10}  {entry['tensors']:>5} tensors  "
                    f"{entry['hits']:>5} hits  attached: {pids}  {entry['source']}{corrupted}"
                )
        if not status["objects"]:
            progress.echo("  nothing yet; use xsp share put FILE, or attach a file")
        if any(store.get("objects") for store in on_devices):
            progress.echo("nothing was compared; xsp share check compares weights on devices with the store's")
        return 0


class Evict:
    """Free weights that no process is attached to.

    examples:
      xsp share evict 9f86d081      by the first digits of the key
      xsp share evict --all         all that are not in use
    """

    SUMMARY = "free weights that no process is attached to"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "key", nargs="?", metavar="KEY", help="first 8 or more digits of the key; xsp share status lists keys"
        )
        parser.add_argument("--all", action="store_true", help="all weights that no process is attached to")
        add_dir_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Evict the weights."""
        from xsp.share import client, devices

        if (args.key is None) == (not args.all):
            raise UsageError("give one KEY, or --all")
        key = "*" if args.all else args.key.removeprefix("sha256:")

        def report(text: str) -> None:
            progress.warn(f"xsp share: nothing was evicted at {text}")

        device_count = devices.evict(key, args.dir, report)  # first: the host keeps weights that are on a device
        result = client.evict(key, args.dir)
        suffix = f", {device_count} on devices" if device_count else ""
        progress.echo(f"{result['evicted']} evicted{suffix}, {result['attached']} attached and kept")
        return 0


class Check:
    """Read all weights on devices, and compare them with the read-only memory of the store.

    Nothing stops a process from writing weights on a device. At each attachment a sample of blocks is compared; this
    command compares all blocks, which takes the time of reading them. Weights that differ are not shared any more:
    processes that attach later get another copy, and the attached processes are listed. Memory of the host cannot be
    written, so without a device there is nothing to compare.

    `xsp share status` reads no weights: it shows what the store holds, and differences that were found before.

    exit codes:
      0  nothing differs
      1  something differs, or could not be compared

    examples:
      xsp share check
      xsp share check --format json
    """

    SUMMARY = "compare weights on devices with the store's; exit code 1 if any differ"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        options.add_format_option(parser)
        add_dir_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Compare the weights, and return the exit code."""
        from xsp.share import client, devices

        served = devices.status(args.dir)
        if not served:
            client.status(args.dir)  # raises if there is no store
        results = devices.check(args.dir) if served else []
        different_count = sum(result["corrupted"] is not None for result in results)
        failed_count = sum(result["error"] is not None for result in results)
        if args.format == "json":
            progress.write_json(results)
        elif not served:
            progress.echo("the store serves no device, and memory of the host cannot be written: nothing to compare")
        elif not results:
            progress.echo("nothing is on a device: nothing to compare")
        else:
            progress.echo("compared, block by block, with the memory of the store:")
            for result in results:
                progress.echo(_line(result))
            counts = [f"{len(results) - different_count - failed_count} of {len(results)} equal"]
            counts += [f"{different_count} differ"] * (different_count > 0) + [f"{failed_count} not compared"] * (
                failed_count > 0
            )
            progress.echo(", ".join(counts))
        return 1 if different_count or failed_count else 0


class Measure:
    """Measure whether sharing pays for a model on this machine, compared with loading without a store.

    Fresh processes take turns: `safetensors.torch.load_file`, which maps the file, `torch.load`, and
    `xsp.share.attach`. It compares the time of loading and of the first call, and memory by the number of processes,
    with a store of its own. It takes some minutes on an idle machine, and ends as soon as the answer is known. With
    --device all ways load onto that device, where the store keeps one copy.

    examples:
      xsp share measure torchvision:resnet50                           weights from a seed
      xsp share measure model.safetensors torchvision:resnet50
      xsp share measure model.safetensors                              without a call: each tensor is read once
      xsp share measure torchvision:resnet50 --device cuda:0           onto a GPU
      xsp share measure torchvision:resnet50 --processes 8             8 processes load at once, for memory
    """

    SUMMARY = "measure whether sharing pays"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or torchvision:NAME and the like")
        parser.add_argument("module", nargs="?", default="", metavar="MODULE", help="the model, if SOURCE is a file")
        parser.add_argument(
            "--turns",
            type=options.positive_int,
            default=12,
            metavar="N",
            help="maximal number of turns, 3 or more (default: 12)",
        )
        parser.add_argument(
            "--device", metavar="NAME", help="load onto this device, cuda:0 (default: the host's memory)"
        )
        parser.add_argument(
            "--processes",
            type=options.positive_int,
            default=3,
            metavar="N",
            help="processes that load at once, 2 or more (default: 3)",
        )
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="seed of the order within turns (default: 0)"
        )
        options.add_quiet_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Measure, and print the result."""
        from xsp.device import devices
        from xsp.errors import UsageError
        from xsp.share import measuring, savings

        if args.seed < 0:
            raise UsageError("--seed: 0 or more")
        if args.processes < 2:
            raise UsageError("--processes: 2 or more, one is measured in any case")
        here = [device for device in devices.accelerators() if not device.sharing_obstacle()]
        if args.device is None and here:
            names = ", ".join(dict.fromkeys(device.name for device in here))
            progress.warn(f"xsp: weights are loaded into the host's memory, not onto {names}: --device {here[0].id}")
        with progress.progress_bar(args.quiet) as show:
            result = measuring.measure(
                args.source, args.module, args.turns, args.seed, show, concurrent=args.processes, device=args.device
            )
        if args.format == "json":
            progress.write_json(savings.as_json(result))
        else:
            progress.write(terminal.page(savings.document(result)) + "\n")
        return 0


class Estimate:
    """Estimate whether sharing would pay for a file, from its bytes and tensors and constants of this machine.

    Bandwidths come from `xsp bench transfers`; the time per tensor and per request to the store is measured on two
    small files, in some seconds. Only the header of the file is read. Memory and the first call are not estimated: `xsp
    share measure` measures them.

    examples:
      xsp bench transfers --families copy,read-cached,first-touch --threads 1      once per machine
      xsp share estimate model.safetensors
      xsp share estimate model.safetensors.index.json --format json                all shards
    """

    SUMMARY = "estimate whether sharing would pay"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "source", metavar="FILE", help="a safetensors file, an index of shards, or a folder with one"
        )
        options.add_timings_option(parser)
        options.add_quiet_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Read the header, measure the missing constants, and print the estimate."""
        from xsp.bench.timings import Timings
        from xsp.errors import ShareError
        from xsp.share import estimate, savings, weights

        tensors = []
        for name in weights.shards(args.source):
            try:
                file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ShareError(f"{name}: cannot be read ({error.strerror})") from error
            try:
                tensors += weights.read_header(file, name)
            finally:
                os.close(file)
        curves = estimate.curves(Timings.open(args.timings))
        with progress.progress_bar(args.quiet) as show:
            constants = estimate.Constants(estimate.costs(show), curves, estimate.digest_ns())
        if args.format == "json":
            progress.write_json(savings.estimate_json(args.source, tensors, constants))
        else:
            progress.write(terminal.page(savings.estimate_document(args.source, tensors, constants)) + "\n")
        return 0


PARTS: dict[str, Any] = {
    "serve": Serve,
    "put": Put,
    "status": Status,
    "evict": Evict,
    "check": Check,
    "measure": Measure,
    "estimate": Estimate,
}
"""Subcommands by name: each has what the module of a command has."""
