"""Show what the store holds, on the host and on devices, and which processes are attached.

No weights are read: weights on devices that were found to differ before are marked "corrupted". `xsp share check`
compares all of them with those of the store.

examples:
  xsp share status
  xsp share status --format json
"""

from __future__ import annotations

import argparse
import json

from xsp import texts
from xsp.cli import options, progress, share

SUMMARY = "show what the store holds, and who is attached; reads no weights"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_format_option(parser)
    share.add_dir_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status of the store."""
    from xsp.device import devices as known
    from xsp.share import client, devices

    status = client.status(args.dir)
    on_devices = devices.status(args.dir)
    if args.format == "json":
        progress.write(json.dumps({**status, "devices": on_devices}, indent=1) + "\n")
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
