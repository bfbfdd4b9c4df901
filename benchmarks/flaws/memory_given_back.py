"""Large tensors whose memory the C library's allocator returns to the system, and gets again page by page.

Without the flaw, the program configures the allocator itself with `mallopt`; the usual way is to set MALLOC_TOP_PAD_
and MALLOC_MMAP_MAX_ before Python starts.
"""

import ctypes

import torch
from running import FLAWED, images, predict

M_TOP_PAD, M_MMAP_MAX = -2, -4

if not FLAWED:
    ctypes.CDLL(None).mallopt(M_TOP_PAD, 1 << 30)
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)


def block(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(width, width, 3, padding=1, groups=width), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 1)
    )


predict(torch.nn.Sequential(*(block(64) for _ in range(6))), images(8, 64, 56))
