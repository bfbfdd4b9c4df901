"""Check a manifest: its fields, and whether it can run here.

It does what `xsp evaluate run` does before the load, by the same code, and stores nothing: it opens the model, reads
and prepares the samples, and predicts once for each of the first samples and for each batch size. Manifests of
MLModelScope and DLSpec are accepted too. Exit code 0: it can run here; 3: it is valid, but cannot.

examples:
  xsp evaluate check resnet18.yaml
  xsp evaluate check resnet18.yaml --canonical        as a sorted manifest of xsp
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from xsp.cli import evaluate_run, options, progress
from xsp.errors import XspError

SUMMARY = "check a manifest, and whether it can run here"

CANNOT_RUN = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("manifest", type=Path, metavar="MANIFEST", help="a YAML file")
    parser.add_argument("--canonical", action="store_true", help="print the canonical form, as YAML, and nothing else")
    evaluate_run.add_label_option(parser)
    options.add_quiet_option(parser)


def run(args: argparse.Namespace) -> int:
    """Check the manifest, and print the result."""
    from xsp.evaluate import agents, reading, running, yamltext

    parsed = reading.read(args.manifest)
    manifest = parsed.manifest
    if args.canonical:
        progress.write(yamltext.write(manifest.plain()))
        return 0
    progress.echo(f"{manifest.title}: a manifest of {parsed.dialect}, identity {manifest.identity[:16]}")
    for note in parsed.notes:
        progress.echo(f"  note: {note}")
    facts = agents.local_facts(labels=dict(args.label), devices=manifest.hardware.gpu not in ("", "none"))
    reasons, notes = running.objections(manifest, facts), []
    if not reasons:
        try:
            with progress.progress_bar(args.quiet) as show:
                notes = running.check(manifest, parsed.folder, agents.Options(trusted=True), facts, show)
        except XspError as error:
            reasons = [str(error)]
    for note in notes:
        progress.echo(f"  note: {note}")
    for reason in reasons:
        progress.echo(f"  cannot run here: {reason}")
    if not reasons:
        progress.echo(f"  can run here; next: xsp evaluate run {shlex.quote(str(args.manifest))}")
    return CANNOT_RUN if reasons else 0
