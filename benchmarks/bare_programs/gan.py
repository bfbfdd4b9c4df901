"""A GAN whose discriminator is trained twice for each step of its generator."""

from __future__ import annotations

import torch
from clock import Clock
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

clock = Clock()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
while clock.runs():
    for _ in range(2):
        clock.runs()
        real = torch.rand(64, 784)
        discriminator.zero_grad()
        loss_of(discriminator(real), ones).backward()
        fake = generator(torch.randn(64, 32))
        loss_of(discriminator(fake.detach()), zeros).backward()
        of_discriminator.step()
        clock.lap("discriminator")
    clock.runs()
    generator.zero_grad()
    loss_of(discriminator(fake), ones).backward()
    of_generator.step()
    clock.lap("generator")
clock.say()
