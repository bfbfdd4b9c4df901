"""A Lightning module with automatic optimization: its optimizer's step runs forward and backward in a closure."""

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
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batches", type=int, default=30, help="of an epoch")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--micro-batches", type=int, default=1)
options = parser.parse_args()

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
torch.manual_seed(0)
truth = Truth()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        x, y = batch
        truth.calls += 1
        return functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        truth.calls += 1
        self.log("val_loss", functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Laps(lightning.Callback):
    def on_train_epoch_start(self, trainer, module):
        truth.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step > truth.optimizer_steps:
            truth.optimizer_steps = trainer.global_step
            truth.lap("training", options.batch * options.micro_batches)

    def on_validation_epoch_start(self, trainer, module):
        truth.start()

    def on_validation_batch_end(self, trainer, module, outputs, batch, index):
        truth.lap("validation", options.batch)


def data(batches):
    samples = batches * options.batch
    return DataLoader(TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,))), options.batch)


trainer = lightning.Trainer(
    max_epochs=options.epochs,
    accumulate_grad_batches=options.micro_batches,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    callbacks=[Laps()],
)
module = Classifier()
trainer.fit(module, data(options.batches), data(5))
truth.say(weights=round(sum(float(p.detach().abs().sum()) for p in module.parameters()), 4))
