"""Distillation: a teacher under no_grad, a student that is trained on what it says."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--student-first", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10)).eval()
student = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
truth = Truth()
for _ in range(options.iterations):
    x = torch.randn(options.batch, 128)
    said = student(x) if options.student_first else None
    with torch.no_grad():
        target = teacher(x).softmax(1)
    said = student(x) if said is None else said
    loss = functional.kl_div(said.log_softmax(1), target, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.calls += 2
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
