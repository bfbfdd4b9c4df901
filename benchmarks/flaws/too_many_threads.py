"""Four times as many threads as cores, which wait for each other."""

import os

import torch
from running import FLAWED, images, predict

torch.set_num_threads(4 * len(os.sched_getaffinity(0)) if FLAWED else len(os.sched_getaffinity(0)))
layers = [torch.nn.Sequential(torch.nn.Conv2d(3 if not n else 32, 32, 3, padding=1), torch.nn.ReLU()) for n in range(8)]
predict(torch.nn.Sequential(*layers), images(8, 3, 96))
