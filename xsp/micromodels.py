"""Small models in families; each family varies one of SPOC's measures and keeps the other three constant.

| family | varies | by |
|---|---|---|
| `input` | elements of the input | its height and width, which a pooling layer reduces to one size |
| `parameters` | parameters | rows of an embedding, of which a constant number is read |
| `operations` | FLOPs | height and width after the pooling |
| `path` | longest path | the same 24 convolutions as 24 branches of one, …, one branch of 24 |
| `depth` | longest path | deeper and narrower: layers times channels² is constant |

Within a family, the measure causes the change in latency, and is not only correlated with it. All models of `path` have
the same calls, so it shows the cost of dependence alone; in `depth`, a longer path has more calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xsp.errors import ModelError, nearest

VARIED_MEASURES: Mapping[str, str] = {
    "input": "input_elements",
    "parameters": "parameters",
    "operations": "flops",
    "path": "longest_path",
    "depth": "longest_path",
}
"""Family → the measure of `xsp.graph.measures` that it varies."""

_CHANNELS, _WIDTH, _READ_ROWS = 16, 64, 64
"""Channels of the input; elements of a row of the embedding; rows that are read."""


@dataclass(frozen=True)
class MicroParameters:
    """The parameters of a model."""

    side: int = 64
    """Height and width of the input."""

    size: int = 32
    """Height and width after the pooling."""

    channels: int = 32
    branches: int = 1
    depth: int = 24
    """Convolutions of a branch."""

    rows: int = 64
    """Rows of the embedding."""

    sums_all: bool = False
    """Whether the result sums the outputs of all convolutions, instead of only the last one of each branch."""


_PATH = MicroParameters(size=16, sums_all=True)
_DEPTH = MicroParameters(size=8)
_FAMILIES: Mapping[str, tuple[MicroParameters, ...]] = {
    "input": tuple(MicroParameters(side=32 * times) for times in (1, 2, 3, 4, 6, 8)),
    "parameters": tuple(MicroParameters(rows=1 << power) for power in (6, 9, 11, 13, 15, 17)),
    "operations": tuple(MicroParameters(size=size) for size in (8, 16, 24, 32, 48, 64)),
    "path": tuple(replace(_PATH, branches=count, depth=24 // count) for count in (24, 12, 6, 4, 3, 2, 1)),
    "depth": tuple(
        replace(_DEPTH, depth=147_456 // (channels * channels), channels=channels)
        for channels in (384, 192, 128, 96, 64, 48, 32)
    ),
}


def names() -> list[str]:
    """Return the names of all models, such as `path-3`; within a family the measure grows with the number."""
    return [f"{family}-{number}" for family, plans in _FAMILIES.items() for number in range(1, len(plans) + 1)]


def plan(name: str) -> MicroParameters:
    """Return the parameters of a model.

    Raises:
        ModelError: there is no model of this name.
    """
    if name not in names():
        raise ModelError(f"there is no micro-model {name!r}{nearest(name, names())}")
    family, _, number = name.rpartition("-")
    return _FAMILIES[family][int(number) - 1]


def build(name: str, batch: int) -> tuple[Any, Any]:
    """Return a module and its input; weights and input are drawn from torch's generator, which the caller has seeded.

    Raises:
        ModelError: there is no model of this name.
    """
    import torch

    spec = plan(name)

    class Micro(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleList(
                torch.nn.ModuleList(_convolution(torch, spec.channels) for _ in range(spec.depth))
                for _ in range(spec.branches)
            )
            self.table = torch.nn.Embedding(spec.rows, _WIDTH)
            self.register_buffer("read", torch.arange(_READ_ROWS) * (spec.rows // _READ_ROWS))

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.adaptive_avg_pool2d(x, spec.size)
            x = x.repeat(1, spec.channels // _CHANNELS, 1, 1)
            outputs = []
            for branch in self.branches:
                output = x
                for index, layer in enumerate(branch):  # type: ignore[arg-type, var-annotated]
                    output = layer(output)
                    if spec.sums_all or index == spec.depth - 1:
                        outputs.append(output)
            total = torch.stack(outputs).sum(0) + self.table(self.read).mean()
            return total.mean((2, 3))

    return Micro(), torch.randn(batch, _CHANNELS, spec.side, spec.side)


def _convolution(torch: Any, channels: int) -> Any:
    """Return a layer that keeps the scale of its input, so that deep models do not compute with denormal numbers."""
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    torch.nn.init.normal_(layer.weight, std=(9 * channels) ** -0.5)
    return layer
