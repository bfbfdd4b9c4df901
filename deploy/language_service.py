"""A small language model behind OpenAI's completions, traced from a request to the layers of its engine's steps.

    docker compose -f deploy/docker-compose.yml up
    pip install 'xsp[models,otel]'
    python deploy/language_service.py --load 100

`--load` sends requests to it, and prints what these clients measured; without it the service runs until it is
interrupted. In Jaeger (http://localhost:16686) a request, `POST /v1/completions` of the service `shop`, has its time in
the queue, its prompt and its tokens below it, and links to the steps that computed them, each a trace of its own.
Tokens are bytes, and the weights are random: the text means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Generator
from typing import Any

import completions
import torch
from completions import NAME, message
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import xsp


def build() -> LlamaForCausalLM:
    """Return a model with weights from a seed, whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Engine:
    """Transformers' continuous batching, and a thread that hands out its tokens. xsp sees its steps by itself."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=16),
        )
        self._manager.start()
        self._answers: dict[str, queue.Queue[Any]] = {}
        self._numbers = itertools.count(1)
        threading.Thread(target=self._hand_out, daemon=True).start()

    def tokens(self, prompt: str, count: int) -> Generator[int, None, None]:
        """Yield the tokens of an answer as they come; closing it before the last one cancels the request.

        Raises:
            RuntimeError: the engine failed.
        """
        name, answers = f"r{next(self._numbers)}", queue.Queue[Any]()
        self._answers[name] = answers
        # called in the span of the request, so that this is the parent of what xsp sends of it
        self._manager.add_request(list(prompt.encode()) or [0], request_id=name, max_new_tokens=count, streaming=True)
        given, is_complete = 0, False
        try:
            while not is_complete:
                result = answers.get()
                if result.error:
                    raise RuntimeError(result.error)
                is_complete = result.is_finished()
                yield from result.generated_tokens[given:]
                given = len(result.generated_tokens)
        finally:
            del self._answers[name]
            if not is_complete:
                self._manager.cancel_request(name)

    def _hand_out(self) -> None:
        while True:
            result = self._manager.get_result(timeout=1)
            if result is not None and (answers := self._answers.get(result.request_id)) is not None:
                answers.put(result)

    def stop(self) -> None:
        """Stop it."""
        self._manager.stop(block=True)


class Handler(completions.Handler):
    """Answers `/v1/completions`, streamed or whole, and `/v1/models`."""

    engine: Engine

    def do_POST(self) -> None:
        """Complete a text."""
        asked = self.asked()
        context = propagate.extract(dict(self.headers))
        with trace.get_tracer("shop").start_as_current_span(f"POST {self.path}", context, trace.SpanKind.SERVER):
            prompt, count = str(asked["prompt"]), int(asked.get("max_tokens") or 16)
            with contextlib.closing(self.engine.tokens(prompt, count)) as tokens:
                if asked.get("stream"):
                    self.stream(
                        message(int(time.time()), chr(token), "length" if number == count else None)
                        for number, token in enumerate(tokens, 1)
                    )
                    return
                text = bytes(tokens).decode("latin-1")
            usage = {"prompt_tokens": len(prompt.encode()), "completion_tokens": len(text)}
            usage["total_tokens"] = sum(usage.values())
            self.answer(message(int(time.time()), text, "length") | {"usage": usage})


def load(address: str, requests: int, rate: float) -> dict[str, float]:
    """Send requests of drawn lengths at random times, and return what their clients measured."""
    draw, firsts, latencies, counts = random.Random(0), [], [], []

    def ask(prompt: str, count: int) -> None:
        body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": count, "stream": True}).encode()
        came = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body), timeout=120) as answer:
            lines = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
        firsts.append(lines[0] - came)
        latencies.append(lines[-1] - came)
        counts.append(len(lines))

    threads = []
    for _ in range(requests):
        time.sleep(draw.expovariate(rate))
        prompt = "".join(chr(draw.randrange(32, 127)) for _ in range(draw.randint(8, 400)))
        threads.append(threading.Thread(target=ask, args=(prompt, draw.randint(5, 40))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {
        "requests": len(latencies), "tokens": sum(counts), "first_token_ms": round(1e3 * statistics.median(firsts), 1),
        "latency_ms": round(1e3 * statistics.median(latencies), 1),
    }  # fmt: skip


def main() -> None:
    """Serve, and send the load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--to", default="http://localhost:4318", help="a receiver of OTLP over HTTP")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the requests that are recorded")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="send N requests, and end")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of --load")
    options = parser.parse_args()

    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{options.to}/v1/traces")))
    trace.set_tracer_provider(provider)
    model = build()
    with xsp.instrument(model, sample=options.sample, otlp=options.to):
        Handler.engine = Engine(model)
        server = completions.Server(("127.0.0.1", options.port), Handler)
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            if options.load:
                print(json.dumps(load(f"http://127.0.0.1:{server.server_address[1]}", options.load, options.rate)))
            else:
                threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            Handler.engine.stop()
    provider.shutdown()


if __name__ == "__main__":
    main()
