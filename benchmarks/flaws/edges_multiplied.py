"""A layer of a graph network that multiplies each node's features once for each edge of the node."""

import torch
from running import FLAWED, train

NODES, EDGES = 2_000, 24_000
source, target = torch.randint(0, NODES, (2, EDGES))


class Messages(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.message = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        messages = self.message(x[source]) if FLAWED else self.message(x)[source]
        return torch.relu(x + torch.zeros_like(x).index_add(0, target, messages))


model = torch.nn.Sequential(Messages(), Messages())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, torch.rand(NODES, 64), optimizer.step, optimizer.zero_grad)
