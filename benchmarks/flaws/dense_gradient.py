"""An embedding of many rows, of which a step looks up a few, with a dense gradient for all rows."""

import torch
from running import FLAWED, train

table = torch.nn.Embedding(200_000, 64, sparse=not FLAWED)
model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(64 * 16, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, torch.randint(0, 200_000, (32, 16)), optimizer.step, optimizer.zero_grad)
