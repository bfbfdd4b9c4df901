"""A Lightning module with manual optimization and two optimizers: a small GAN."""

from __future__ import annotations

import argparse
import logging
import warnings

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
torch.manual_seed(0)
truth = Truth()


class Gan(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 1))

    def training_step(self, batch, index):
        of_generator, of_discriminator = self.optimizers()
        (real,) = batch
        fake = self.generator(torch.randn(len(real), 16))
        scores = self.discriminator(real), self.discriminator(fake.detach())
        loss = functional.softplus(-scores[0]).mean() + functional.softplus(scores[1]).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        truth.lap("discriminator", len(real))
        loss = functional.softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        truth.lap("generator", len(real))
        truth.calls += 4
        truth.optimizer_steps += 2

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-4),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4),
        )


class Start(lightning.Callback):
    def on_train_epoch_start(self, trainer, module):
        truth.start()


trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Start()],
)
module = Gan()
trainer.fit(module, DataLoader(TensorDataset(torch.randn(options.iterations * options.batch, 64)), options.batch))
truth.say(weights=round(sum(float(p.detach().abs().sum()) for p in module.parameters()), 4))
