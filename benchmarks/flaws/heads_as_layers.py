"""Attention with separate linear layers for each head, where one layer could compute all heads."""

import torch
from running import FLAWED, predict

WIDTH, HEADS = 256, 16


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.queries = torch.nn.ModuleList(torch.nn.Linear(WIDTH, size) for _ in range(HEADS if FLAWED else 0))
        self.keys = torch.nn.ModuleList(torch.nn.Linear(WIDTH, size) for _ in range(HEADS if FLAWED else 0))
        self.values = torch.nn.ModuleList(torch.nn.Linear(WIDTH, size) for _ in range(HEADS if FLAWED else 0))
        self.all = torch.nn.Linear(WIDTH, 3 * WIDTH) if not FLAWED else None
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        if self.all is None:
            parts = [torch.stack([output(x) for output in head], 1) for head in (self.queries, self.keys, self.values)]
        else:
            parts = [*self.all(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)]
        outputs = torch.nn.functional.scaled_dot_product_attention(*parts)
        return self.out(outputs.transpose(1, 2).reshape(batch, length, WIDTH))


predict(torch.nn.Sequential(*(Attention() for _ in range(4))), torch.rand(8, 16, WIDTH))
