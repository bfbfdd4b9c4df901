"""Print the JSON Schema of manifests, for editors and for forms.

examples:
  xsp evaluate schema > manifest.schema.json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import progress

SUMMARY = "print the JSON Schema of manifests"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    del args
    from xsp.evaluate import manifest

    progress.write(json.dumps(manifest.schema(), indent=2) + "\n")
    return 0
