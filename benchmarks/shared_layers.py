"""How many layers of many models are distinct, and how many timings do further models of a family need?

Nothing is timed. Models that are already in the folder are not captured again: `graph_corpus.py --all --out DIR` and
this script with `--out DIR` share the graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from parts import turns

from xsp.graph import corpus, files, sharing, work
from xsp.graph.blocks import block, windows

SIZES = (1, 2, 4, 8)
GOAL_DISTINCT, LEAST_MODELS, GOAL_FEWER, GOAL_SAVED = 0.12, 1000, 0.75, 4.4

RESNETS = ("torchvision:resnet18", "torchvision:resnet34", "torchvision:resnet50")
LARGER = ("torchvision:resnet101", "torchvision:resnet152")
SECOND_VERSIONS = {
    "timm:resnetv2_50": ["torchvision:resnet50"],
    "timm:resnetv2_101": ["torchvision:resnet101"],
    "torchvision:vgg16_bn": ["torchvision:vgg16"],
    "torchvision:vgg19_bn": ["torchvision:vgg19"],
    "torchvision:swin_v2_t": ["torchvision:swin_t"],
    "torchvision:efficientnet_v2_s": ["torchvision:efficientnet_b0"],
    "torchvision:mobilenet_v3_large": ["torchvision:mobilenet_v2"],
    "timm:convnextv2_tiny": ["torchvision:convnext_tiny"],
    "timm:beitv2_base_patch16_224": ["timm:beit_base_patch16_224"],
}
"""Second version of a family → the first version, whose layers count as timed."""

QUICK = (*RESNETS, "torchvision:resnet101", "timm:resnetv2_50")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--out", type=Path, help="folder of graphs: existing ones are read, missing ones are captured")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="calls per block (default: 1 2 4 8)")
    parser.add_argument("--most", type=int, default=200, help="models whose blocks are counted (default: 200)")
    options = turns.parse(parser, arguments)
    required = (
        QUICK
        if options.quick
        else (
            *RESNETS,
            *LARGER,
            *SECOND_VERSIONS,
            *(version for versions in SECOND_VERSIONS.values() for version in versions),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        corpus.collect(list(dict.fromkeys(required)), out, progress=lambda label, *_: turns.say(f"  {label}"))
        shared = sharing.read(out)
        report = turns.Report(
            "shared_layers",
            f"Layers that {len(shared.members)} models share",
            ("question", "models", "layers", "different", "answer", "goal", "verdict"),
        )
        _growth(report, shared)
        _families(report, shared)
        if not options.quick:
            _blocks(report, shared, options.sizes, options.most)
    if shared.holes:
        report.notes.append(f"{len(shared.holes)} models of the folder have no graph, and are not in the figures.")
    report.finish(options)


def _growth(report: turns.Report, shared: sharing.Corpus) -> None:
    """Add goal number 2: the share of distinct layers, over at least a thousand models."""
    curve = sharing.growth(shared.members)
    if not curve:
        report.notes.append("No model of the folder has a graph.")
        return
    calls, keys = curve[-1]
    share = keys / max(calls, 1)
    has_enough = len(curve) >= LEAST_MODELS
    verdict = (
        turns.verdict(turns.Figure(share, share, share), GOAL_DISTINCT)
        if has_enough
        else f"needs {LEAST_MODELS:,} models"
    )
    report.add(
        [
            "different layers",
            str(len(curve)),
            f"{calls:,}",
            f"{keys:,}",
            f"{share:.1%}",
            f"≤ {GOAL_DISTINCT:.0%}",
            verdict,
        ],
        growth=curve[:: max(1, len(curve) // 100)] + curve[-1:],
    )


def _families(report: turns.Report, shared: sharing.Corpus) -> None:
    """Add goal number 10: timings that larger models and second versions need if the others are timed."""
    members = {member.spec: member for member in shared.members}
    cases = [(name, list(RESNETS), 0.0, "0 new") for name in LARGER]
    cases += [
        (name, versions, 1 - GOAL_FEWER, f"≥ {GOAL_FEWER:.0%} fewer") for name, versions in SECOND_VERSIONS.items()
    ]
    second_shares: list[float] = []
    for name, versions, max_share, goal in cases:
        if name not in members or any(version not in members for version in versions):
            continue
        target = members[name]
        new_timings = sharing.count_new(target, [members[version] for version in versions])
        share = new_timings / max(len(target.unique), 1)
        if name in SECOND_VERSIONS:
            second_shares.append(share)
        report.add(
            [
                f"{name.split(':')[1]} after {', '.join(version.split(':')[1] for version in versions)}",
                str(1 + len(versions)),
                f"{len(target.keys):,}",
                f"{len(target.unique):,}",
                f"{new_timings} new, {1 - share:.0%} fewer",
                goal,
                turns.verdict(turns.Figure(share, share, share), max_share),
            ],
            new=new_timings,
        )
    if second_shares:
        report.notes.append(
            f"Second versions: {sum(1 - share >= GOAL_FEWER for share in second_shares)} of {len(second_shares)} need "
            f"{GOAL_FEWER:.0%} fewer timings than without the first version. Those that miss it are "
            "new designs under an old name: Swin v2 has "
            "windows of 8 instead of 7, EfficientNet v2 and MobileNet v3 have other widths, ConvNeXt v2 has one more "
            "norm in each block. Only the first version counts as timed, no siblings."
        )


def _blocks(report: turns.Report, shared: sharing.Corpus, sizes: Sequence[int], max_models: int) -> None:
    """Add goal number 9 by counts alone: blocks over distinct blocks, and FLOPs over distinct FLOPs."""
    selection = shared.members[:: max(1, len(shared.members) // max_models)][:max_models]
    for size in sizes:
        count, work_all, flops_by_key = 0, 0, {}
        for member in selection:
            graph = files.load(corpus.graph_path(shared.path, member.spec))
            for start, stop in windows(graph, size):
                flops = sum(work.flops_of(node) or 0 for node in graph.nodes[start:stop])
                count, work_all = count + 1, work_all + flops
                flops_by_key.setdefault(block(graph, start, stop).work_key, flops)
        times, by_work = count / max(len(flops_by_key), 1), work_all / max(sum(flops_by_key.values()), 1)
        report.add(
            [
                f"blocks of {size}",
                str(len(selection)),
                f"{count:,}",
                f"{len(flops_by_key):,}",
                f"{times:.1f} × blocks, {by_work:.1f} × FLOPs",
                f"{GOAL_SAVED} × of time" if size == 1 else "",
                "see construction" if size == 1 else "",
            ]
        )
        turns.say(f"  blocks of {size}: {times:.1f}")


if __name__ == "__main__":
    main()
