"""`torch.optim.Adam`, configured to update the parameters one by one."""

import torch
from running import FLAWED, train

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(80)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **({"foreach": False} if FLAWED else {"fused": True}))
train(model, torch.rand(16, 64), optimizer.step, optimizer.zero_grad)
