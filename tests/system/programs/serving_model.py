"""A small language model that serves requests by transformers' continuous batching, one of them with a long prompt."""

from __future__ import annotations

import argparse
import random
import threading
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--long", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of a step")
    parser.add_argument("--batch-requests", type=int, default=16, help="most requests of a step")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(
            num_blocks=1024, max_batch_tokens=options.batch_tokens, max_requests_per_batch=options.batch_requests
        ),
    )
    manager.start()
    draw = random.Random(0)

    def send() -> None:
        for number in range(options.requests):
            time.sleep(draw.expovariate(options.rate))
            length = options.long if number == options.requests // 2 else draw.randint(8, 64)
            prompt = [draw.randrange(1024) for _ in range(length)]
            manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=draw.randint(5, 40))

    sender = threading.Thread(target=send)
    sender.start()
    tokens = 0
    for _ in range(options.requests):
        while (result := manager.get_result(timeout=1)) is None:
            pass
        tokens += len(result.generated_tokens)
    sender.join()
    manager.stop(block=True)
    print(f"{options.requests} requests, {tokens} tokens")


if __name__ == "__main__":
    main()
