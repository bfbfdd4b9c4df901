"""A training loop that waits for each batch, which is loaded in the same thread."""

import time

import torch
from running import FLAWED, STEPS
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, place: int) -> torch.Tensor:
        if FLAWED:
            time.sleep(0.004)
        return torch.rand(128)


model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in DataLoader(Slow(), batch_size=8):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
