"""A low-rank update of a layer's weights that is computed as a whole matrix in each step, as of LoRA by hand."""

import torch
from running import FLAWED, train


class Updated(torch.nn.Module):
    def __init__(self, width: int = 768, rank: int = 8) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, width) / width)
        self.up = torch.nn.Parameter(torch.randn(width, rank) / rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = x @ (self.up @ self.down).T if FLAWED else (x @ self.down.T) @ self.up.T
        return torch.relu(self.base(x) + update)


model = torch.nn.Sequential(Updated(), Updated())
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
train(model, torch.rand(32, 768), optimizer.step, optimizer.zero_grad)
