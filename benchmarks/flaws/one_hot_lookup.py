"""Rows of a table that are looked up by a product with one-hot vectors."""

import torch
from running import FLAWED, train


class Lookup(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8_000, 128)
        self.head = torch.nn.Linear(128, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(words).mean(1))

    def rows(self, words: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return torch.nn.functional.one_hot(words, 8_000).float() @ self.table.weight
        return self.table(words)


model = Lookup()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, torch.randint(0, 8_000, (16, 32)), optimizer.step, optimizer.zero_grad)
