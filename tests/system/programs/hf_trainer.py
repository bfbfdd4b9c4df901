"""Hugging Face's `Trainer` on a GPT-2 of two layers that is built from a config."""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--batch", type=int, default=4, help="of a micro-batch")
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--evaluate", action="store_true", help="at the end")
options = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
texts = [{"input_ids": row, "labels": row} for row in torch.randint(128, (256, 32))]
truth = Truth()


class Laps(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        truth.start()

    def on_step_end(self, args, state, control, **kwargs):
        truth.lap("training", options.batch * options.micro_batches)

    def on_prediction_step(self, args, state, control, **kwargs):
        truth.calls += 1
        truth.lap("evaluation", 16)


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=options.iterations,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=options.micro_batches,
        logging_steps=20,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:64], callbacks=[Laps()])
    loss = trainer.train().training_loss
    if options.evaluate:
        truth.start()
        loss = trainer.evaluate()["eval_loss"]
truth.optimizer_steps = trainer.state.global_step
truth.calls += trainer.state.global_step * options.micro_batches
truth.say(loss=round(loss, 6))
