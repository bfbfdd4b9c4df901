"""Small steps for a GPU: a convolutional net, a transformer, a replayed graph, compiled code.

python small.py            marks the kernels of one training step of the convolutional net for Nsight Compute
python small.py STEPS      runs that many training steps of it
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], object]


def training(model: nn.Module, value: torch.Tensor) -> Step:
    """Return a training step of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(value).square().mean().backward()
        optimizer.step()

    return step


def conv() -> Step:
    """Return a training step of convolutions, cuDNN's work."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return training(model.cuda(), torch.randn(8, 3, 64, 64, device="cuda"))


def transformer() -> Step:
    """Return a training step of attention and matrix products, cuBLAS's work."""
    return training(_encoder(), torch.randn(4, 64, 128, device="cuda"))


def graph() -> Step:
    """Return the replay of a CUDA graph; the graph is captured when the step first runs."""
    model, value = _encoder().eval(), torch.randn(4, 64, 128, device="cuda")
    captured: list[torch.cuda.CUDAGraph] = []

    @torch.inference_mode()
    def step() -> None:
        if not captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(value)
            torch.cuda.current_stream().wait_stream(side)
            captured.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(captured[0]):
                model(value)
        captured[0].replay()

    return step


def compiled() -> Step:
    """Return a training step of compiled code, Triton's work; it is compiled when it first runs."""
    return training(torch.compile(_encoder()), torch.randn(4, 64, 128, device="cuda"))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()


STEPS: dict[str, Callable[[], Step]] = {
    "conv": conv, "transformer": transformer, "graph": graph, "compiled": compiled,
}  # fmt: skip


if __name__ == "__main__":
    one = conv()
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        one()
    torch.cuda.synchronize()
    if len(sys.argv) == 1:
        torch.cuda.profiler.start()
        one()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
