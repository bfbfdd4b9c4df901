"""A causal attention mask that each layer computes again."""

import torch
from running import FLAWED, predict

LENGTH = 512
MASK = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 192)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        query, key, content = self.project(value).chunk(3, -1)
        mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1) if FLAWED else MASK
        return value + torch.nn.functional.scaled_dot_product_attention(query, key, content, attn_mask=mask)


predict(torch.nn.Sequential(*[Layer() for _ in range(6)]), torch.randn(1, LENGTH, 64))
