"""A GAN: the discriminator's step has two forward and two backward passes, the generator's one; they take turns."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--critics", type=int, default=1, help="steps of the discriminator for one of the generator")
options = parser.parse_args()

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
ones, zeros = torch.ones(options.batch, 1), torch.zeros(options.batch, 1)
truth = Truth()
for _ in range(options.iterations):
    for _ in range(options.critics):
        real = torch.rand(options.batch, 784)
        discriminator.zero_grad()
        binary_cross_entropy_with_logits(discriminator(real), ones).backward()
        fake = generator(torch.randn(options.batch, 32))
        binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros).backward()
        of_discriminator.step()
        truth.calls += 3
        truth.optimizer_steps += 1
        truth.lap("discriminator", options.batch)
    generator.zero_grad()
    loss = binary_cross_entropy_with_logits(discriminator(fake), ones)
    loss.backward()
    of_generator.step()
    truth.calls += 1
    truth.optimizer_steps += 1
    truth.lap("generator", options.batch)
truth.say(loss=round(loss.item(), 6))
