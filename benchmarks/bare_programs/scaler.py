"""Training in bfloat16 with a GradScaler; every seventh loss overflows, so that its optimizer step is skipped."""

from __future__ import annotations

import torch
from clock import Clock
from torch import nn

clock = Clock()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model.to(clock.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler(clock.device, init_scale=1024.0, growth_interval=10**6, backoff_factor=0.999)
x = torch.randn(64, 256, device=clock.device)
for number in clock.iterations():
    optimizer.zero_grad()
    with torch.autocast(clock.device, torch.bfloat16):
        loss = model(x).float().square().mean()
    scaler.scale(loss * float("inf") if number % 7 == 3 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    clock.lap()
clock.say()
