"""A model of torchvision or of transformers, in inference or in training."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from clock import Clock

parser = argparse.ArgumentParser()
parser.add_argument("model", help="of torchvision, or bert or gpt of transformers")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--size", type=int, default=224, help="pixels, or tokens")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--train", action="store_true")
parser.add_argument("--half", choices=("float16", "bfloat16"), help="of autocast")
parser.add_argument("--from-host", action="store_true", help="copy the image from pageable memory in each step")
clock = Clock(parser)
options = clock.options
torch.manual_seed(0)


def build() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model and its inputs."""
    shape = (options.batch, options.size)
    if options.model in ("bert", "gpt"):
        import transformers

        tokens = torch.randint(512, shape, device=clock.device)
        sizes = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        if options.model == "gpt":
            heads = options.hidden // 64
            gpt = transformers.GPT2Config(
                n_layer=options.layers, n_head=heads, n_embd=options.hidden, n_positions=options.size, **sizes
            )
            return transformers.GPT2LMHeadModel(gpt), {"input_ids": tokens, "labels": tokens}
        bert = transformers.BertConfig(
            num_hidden_layers=options.layers,
            hidden_size=options.hidden,
            num_attention_heads=options.hidden // 64,
            intermediate_size=4 * options.hidden,
            **sizes,
        )
        return transformers.BertForSequenceClassification(bert), {"input_ids": tokens}
    import torchvision

    image = torch.randn(options.batch, 3, options.size, options.size, device=clock.device)
    return torchvision.models.get_model(options.model, weights=None), {"x": image}


model, inputs = build()
model.to(clock.device).train(options.train)
host_image = inputs["x"].cpu() if options.from_host else torch.empty(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if options.train else None


def call() -> torch.Tensor:
    """Return the outputs, or the loss."""
    half = getattr(torch, options.half) if options.half else None
    if options.from_host:
        inputs["x"] = host_image.to(clock.device)
    with torch.autocast(clock.device, half, enabled=half is not None):
        outputs = model(**inputs)
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs[0] if "labels" in inputs else outputs.logits


if optimizer is not None:
    for _ in clock.iterations():
        optimizer.zero_grad()
        loss = call()
        (loss if loss.ndim == 0 else loss.float().square().mean()).backward()
        optimizer.step()
        clock.lap()
else:
    with torch.inference_mode():
        for _ in clock.iterations():
            call()
            clock.lap("inference")
clock.say()
