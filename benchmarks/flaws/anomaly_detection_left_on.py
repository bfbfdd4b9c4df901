"""Autograd's anomaly detection, left on after debugging."""

import torch
from running import FLAWED, train

torch.autograd.set_detect_anomaly(FLAWED)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(12)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, torch.randn(64, 256), optimizer.step, optimizer.zero_grad)
