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

from xsp.cli import progress, share

SUMMARY = "show what the store holds, and who is attached; reads no weights"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")
    share.placed(parser)


def run(given: argparse.Namespace) -> int:
    """Print the status of the store."""
    from xsp.share import client, devices, shelf

    found = client.status(given.dir)
    on_devices = devices.status(given.dir)
    if given.format == "json":
        progress.put(json.dumps({**found, "devices": on_devices}, indent=1) + "\n")
        return 0
    for store in (found, *on_devices):
        if "error" in store:
            progress.tell(f"{store['socket']}: {store['error']}")
            continue
        held, capacity = shelf.size_text(store["held_bytes"]), shelf.size_text(store["capacity_bytes"])
        copying = f", {shelf.size_text(store['copying_bytes'])} being copied" if store["copying_bytes"] else ""
        what = f"cuda:{store['device']['ordinal']}, {store['device']['name']}: " if "device" in store else ""
        progress.tell(
            f"{what}process {store['pid']}: {held} of {capacity}{copying}; {store['evictions']} evicted so far"
        )
        for each in store["objects"]:
            pids = ", ".join(map(str, each["attached"])) or "nobody"
            corrupted = f"  corrupted ({each['corrupted']})" if each.get("corrupted") else ""
            progress.tell(
                f"  {each['key'][:16]}  {shelf.size_text(each['nbytes']):>10}  {each['tensors']:>5} tensors  "
                f"{each['hits']:>5} hits  attached: {pids}  {each['source']}{corrupted}"
            )
    if not found["objects"]:
        progress.tell("  nothing yet; use xsp share put FILE, or attach a file")
    if any(store.get("objects") for store in on_devices):
        progress.tell("nothing was compared; xsp share check compares weights on devices with the store's")
    return 0
