"""Several threads that run steps: they overlap, take turns, or evaluate while another one trains."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=("overlap", "turns", "async", "models", "evaluation", "training", "inside"))
parser.add_argument("--calls", type=int, default=160)
parser.add_argument("--threads", type=int, default=4)
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, seconds: float, parts: int = 0) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(32, 32), seconds
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if self.parts:
            x = torch.stack(list(pool.map(lambda part: part(x), self.parts))).sum(0)
        return self.layer(x)


calls: dict[str, int] = {}
call_s: list[float] = []  # of each prediction with the pause after it, as its own thread sees it
lock = threading.Lock()


def count(name: str) -> None:
    with lock:
        calls[name] = calls.get(name, 0) + 1


def predict(net: Net, name: str, batch: int = options.batch) -> None:
    began = time.perf_counter()
    with torch.no_grad():
        net(torch.randn(batch, 32)).sum().item()
    count(name)
    time.sleep(0.002)
    call_s.append(time.perf_counter() - began)


def train(net: Net, name: str, times: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(times):
        net(torch.randn(options.batch, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        count(name)
        time.sleep(0.002)


async def serve(net: Net) -> None:
    loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(options.threads)

    async def request() -> None:
        async with gate:
            await loop.run_in_executor(pool, predict, net, "a")

    await asyncio.gather(*(request() for _ in range(options.calls)))


torch.optim.SGD([torch.zeros(1)], lr=1e-3).step()  # imports what it needs
pool = ThreadPoolExecutor(options.threads)
a, b = Net(0.006, parts=3 if options.how == "inside" else 0), Net(0.012)
a.train(options.how in ("evaluation", "training"))
b.train(options.how == "training")
began = time.perf_counter()
if options.how == "overlap":
    list(pool.map(lambda _: predict(a, "a"), range(options.calls)))
elif options.how == "turns":
    for _ in range(options.calls):
        pool.submit(predict, a, "a").result()
elif options.how == "async":
    asyncio.run(serve(a))
elif options.how == "inside":
    for _ in range(options.calls):
        predict(a, "a")
else:
    other = threading.Thread(
        target=train if options.how == "training" else lambda *_: [predict(b, "b", 16) for _ in range(60)],
        args=(b, "b", 60),
    )
    other.start()
    if options.how == "models":
        for _ in range(options.calls):
            predict(a, "a")
    else:
        train(a, "a", options.calls)
    other.join()
seconds = time.perf_counter() - began
said = {"calls": calls, "seconds": seconds, "per_s": {name: n / seconds for name, n in calls.items()}}
print(json.dumps(said | {"call_s": sum(call_s) / max(1, len(call_s))}))
