"""Batch norm after convolution in evaluation mode, where it could be folded into the convolution."""

import torch
from running import FLAWED, images, predict
from torch.nn.utils.fusion import fuse_conv_bn_eval


def block(first: int, width: int = 32) -> torch.nn.Module:
    convolution = torch.nn.Conv2d(first, width, 3, padding=1, bias=False)
    norm = torch.nn.BatchNorm2d(width)
    if FLAWED:
        return torch.nn.Sequential(convolution, norm, torch.nn.ReLU())
    return torch.nn.Sequential(fuse_conv_bn_eval(convolution.eval(), norm.eval()), torch.nn.ReLU(inplace=True))


predict(torch.nn.Sequential(*(block(32 if n else 3) for n in range(8))), images(8, 3, 96))
