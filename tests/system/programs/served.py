"""The model of `slow_service.py`, and its input: `xsp profile served.py:build`."""

from __future__ import annotations

import torch
from torch import nn


class Rerank(nn.Module):
    """What somebody wrote in an afternoon: the likeliest classes of each row, row by row."""

    def forward(self, x):
        return torch.stack([self._kept(row) for row in x.flatten(0, -2)]).view_as(x)

    def _kept(self, row):
        likely = row.softmax(0)
        least = likely.sort(descending=True).values[8]
        return torch.where(likely > least, likely, torch.zeros_like(likely))


class RerankAtOnce(nn.Module):
    """The same for all rows at once."""

    def forward(self, x):
        likely = x.softmax(-1)
        least = likely.sort(-1, descending=True).values[..., 8:9]
        return torch.where(likely > least, likely, torch.zeros_like(likely))


def build(batch: int, *more: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """Return an encoder of 128 tokens with a head, and an input of that many requests."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(256, 64), *more).eval(), torch.randn(batch, 128, 256)


def build_slow(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Return it with a layer that goes through its rows in Python."""
    return build(batch, Rerank())


def build_mended(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Return it with that layer mended."""
    return build(batch, RerankAtOnce())
