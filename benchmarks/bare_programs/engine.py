"""An engine that serves requests of drawn lengths; each of its steps is an iteration, of prefill or of decoding."""

from __future__ import annotations

import argparse
import time
from itertools import count

import numpy as np
from clock import Clock

from xsp import models
from xsp.evaluate.generation.batching import CausalSequences
from xsp.serving import Engine

SOURCE = "transformers:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=1000"
SLOTS, WARM_UP = 4, 8

parser = argparse.ArgumentParser()
parser.add_argument("--requests", type=int, help="end after that many (default: by the clock)")
clock = Clock(parser)
built = models.build(SOURCE, models.Settings(prefill=1))
assert isinstance(built, models.ModelCall)
sequences, engine = CausalSequences(built.model.eval(), clock.device), Engine("engine", built.model)
chance = np.random.default_rng(0)
numbers = count() if clock.options.requests is None else iter(range(clock.options.requests + WARM_UP))
arrivals: dict[int, float] = {}
left: dict[int, int] = {}
latencies: list[float] = []
for _ in clock.iterations():
    # as many users as slots: each sends a request when the last one is answered
    number = next(numbers, None) if len(left) < SLOTS else None
    if number is not None:
        prompt_tokens, answer_tokens = map(int, chance.integers(16, 65, 2))
        prompt = chance.integers(0, 1000, prompt_tokens)
        arrivals[number] = time.perf_counter()
        engine.arrive(number, prompt_tokens)
        with engine.step([(number, "prefill", prompt_tokens)]):
            sequences.begin(number, prompt)
        left[number] = answer_tokens - 1
        clock.lap("prefill")
        continue
    with engine.step([(number, "decode", 1) for number in left]):
        found = sequences.step()
    for each in found:
        left[each] -= 1
    if complete := [each for each in found if left[each] <= 0]:
        sequences.end(complete)
        for each in complete:
            del left[each]
            engine.finish(each)
            if each >= WARM_UP:
                latencies.append(time.perf_counter() - arrivals[each])
    clock.lap("decode")
    if not left and number is None and clock.options.requests is not None:
        break
clock.say(latencies=latencies)
