"""A backbone that is not trained, but whose gradients are computed."""

import torch
import torchvision
from running import FLAWED, images, train

backbone = torchvision.models.resnet18()
backbone.fc = torch.nn.Identity()
backbone.requires_grad_(FLAWED)
model = torch.nn.Sequential(backbone, torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
train(model, images(4), optimizer.step, optimizer.zero_grad)
