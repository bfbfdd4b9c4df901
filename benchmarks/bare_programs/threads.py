"""Three threads serve one model: each takes the next request when it has answered one."""

from __future__ import annotations

import threading

import torch
from clock import Clock
from torch import nn

THREADS = 3
clock = Clock()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).eval()
lock = threading.Lock()


def serve() -> None:
    """Answer requests until the loop ends; a lap ends with each request, of whichever thread."""
    with torch.inference_mode():
        while True:
            with lock:
                if not clock.runs():
                    return
            model(torch.randn(16, 512)).sum().item()
            with lock:
                clock.lap("inference")


threads = [threading.Thread(target=serve) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
clock.say()
