"""One thread for large matrix products that all cores could share."""

import os

import torch
from running import FLAWED, predict

torch.set_num_threads(1 if FLAWED else len(os.sched_getaffinity(0)))
predict(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))), torch.rand(256, 1024))
