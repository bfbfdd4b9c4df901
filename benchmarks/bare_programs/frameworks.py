"""The same small classifier in the loop of a framework: transformers' Trainer, Lightning, or accelerate."""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from typing import Any

import torch
from clock import Clock
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")


class Rows(Dataset[Any]):
    """Rows with their classes."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((256,), (index % 97) / 97), "labels": torch.tensor(index % 10)}


class Net(nn.Module):
    """Returns a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(self.layers(x), labels)}


def with_trainer(clock: Clock) -> None:
    """Train by transformers' Trainer."""
    import transformers

    class Laps(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.runs()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.lap()
            control.should_training_stop = not clock.runs()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=1 << 20, per_device_train_batch_size=32, logging_steps=50, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        transformers.Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[Laps()]).train()


def with_lightning(clock: Clock) -> None:
    """Train by Lightning."""
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Laps(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
            clock.runs()

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            clock.lap()
            trainer.should_stop = not clock.runs()

    trainer = lightning.Trainer(
        max_steps=1 << 20, min_epochs=0, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Laps()],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Rows(), 32))


def with_accelerate(clock: Clock) -> None:
    """Train by a loop of one's own with accelerate."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Rows(), 32))
    for batch in loader:
        if not clock.runs():
            break
        optimizer.zero_grad()
        accelerator.backward(net(**batch)["loss"])
        optimizer.step()
        clock.lap()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("trainer", "lightning", "accelerate"))
    own = Clock(parser)
    torch.manual_seed(0)
    {"trainer": with_trainer, "lightning": with_lightning, "accelerate": with_accelerate}[own.options.framework](own)
    own.say()
