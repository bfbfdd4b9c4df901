"""An engine that serves requests of drawn lengths, and reads its own clock around each step and each request."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque

import numpy as np

from xsp import models
from xsp.evaluate.generation.batching import CausalSequences
from xsp.serving import Engine

SOURCE = "transformers:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=1000"
SLOTS, WARM_UP = 4, 8

parser = argparse.ArgumentParser()
parser.add_argument("--requests", type=int, default=200)
options = parser.parse_args()
built = models.build(SOURCE, models.Settings(prefill=1))
assert isinstance(built, models.ModelCall)
sequences, engine = CausalSequences(built.model.eval(), "cpu"), Engine("engine", built.model)
chance = np.random.default_rng(0)
lengths = chance.integers(16, 65, (options.requests + WARM_UP, 2))
waiting = deque((number, chance.integers(0, 1000, prompt), answer) for number, (prompt, answer) in enumerate(lengths))
arrivals: dict[int, float] = {}
running: dict[int, int] = {}
steps: list[float] = []
latencies: list[float] = []
while waiting or running:
    while waiting and len(running) < SLOTS:  # as many users: each sends a request when the last one is answered
        number, prompt, answer = waiting.popleft()
        arrivals[number] = time.perf_counter()
        engine.arrive(number, len(prompt))
        with engine.step([(number, "prefill", len(prompt))]):
            sequences.begin(number, prompt)
        running[number] = int(answer) - 1
    began = time.perf_counter()
    with engine.step([(number, "decode", 1) for number in running]):
        found = sequences.step()
    steps.append(time.perf_counter() - began)
    for number in found:
        running[number] -= 1
    if complete := [number for number, left in running.items() if left <= 0]:
        sequences.end(complete)
        for number in complete:
            del running[number]
            engine.finish(number)
            if number >= WARM_UP:
                latencies.append(time.perf_counter() - arrivals[number])
print(json.dumps({"steps": steps, "latencies": latencies}), flush=True)
