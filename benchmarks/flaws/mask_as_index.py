"""A loss over the values that a mask selects, which are copied into a new tensor to sum them."""

import torch
from running import FLAWED, predict


class MaskedError(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.guess = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        error = (self.guess(x) - target).abs()
        if FLAWED:
            return error[mask].sum() / mask.sum()
        return torch.where(mask, error, 0.0).sum() / mask.sum()


predict(MaskedError(), torch.rand(4096, 256), torch.rand(4096, 256), torch.rand(4096, 256) > 0.3)
