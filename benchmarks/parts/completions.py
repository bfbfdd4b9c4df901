"""A small server with OpenAI's completions, streamed, of a language model with weights from a seed.

It prints its port, and ends when its standard input does. Requests join a batch at any step; a prompt is the numbers of
its tokens, or text, in which each byte is a token.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from xsp import models
from xsp.evaluate.generation.batching import CausalSequences
from xsp.serving import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy"))

import completions
from completions import NAME, message

SOURCE = "transformers:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=1000"


class Generation:
    """The model, on a thread of its own."""

    def __init__(self, source: str, slots: int) -> None:
        built = models.build(source, models.Settings(prefill=1))
        assert isinstance(built, models.ModelCall)
        self._sequences, self._slots = CausalSequences(built.model.eval(), "cpu"), slots
        self._waiting: queue.Queue[tuple[int, Any, int, queue.Queue[int]]] = queue.Queue()
        self._engine, self._numbers = Engine("completions", built.model, NAME), itertools.count(1)
        threading.Thread(target=self._work, daemon=True).start()

    def request(self, prompt: Any, count: int) -> queue.Queue[int]:
        """Return a queue to which each token will be added."""
        tokens: queue.Queue[int] = queue.Queue()
        number = next(self._numbers)
        self._engine.arrive(number, len(prompt))
        self._waiting.put((number, prompt, count, tokens))
        return tokens

    def _work(self) -> None:
        running: dict[int, list[Any]] = {}
        while True:
            while len(running) < self._slots and (not running or not self._waiting.empty()):
                number, prompt, count, tokens = self._waiting.get()
                with self._engine.step([(number, "prefill", len(prompt))]):
                    first = self._sequences.begin(number, prompt)
                tokens.put(first)
                running[number] = [count - 1, tokens]
                self._end(running)
            if running:
                with self._engine.step([(key, "decode", 1) for key in running]):
                    found = self._sequences.step()
                for key, token in found.items():
                    running[key][0] -= 1
                    running[key][1].put(token)
                self._end(running)

    def _end(self, running: dict[int, list[Any]]) -> None:
        if complete := [key for key, (left, _) in running.items() if not left]:
            self._sequences.end(complete)
            for key in complete:
                del running[key]
                self._engine.finish(key)


class Handler(completions.Handler):
    """Answers `/health`, `/v1/models`, `/v1/completions`; and `/times`, the times of each completion, and forgets them.

    The times are nanoseconds: when the request had been read, then when each token was sent.
    """

    generation: Generation
    times: ClassVar[list[list[int]]] = []

    def do_GET(self) -> None:
        if self.path == "/times":
            seen, Handler.times = Handler.times, []
            self.answer(seen)
            return
        super().do_GET()

    def do_POST(self) -> None:
        asked = self.asked()
        times = [time.perf_counter_ns()]
        prompt = asked["prompt"]
        if isinstance(prompt, str):
            prompt = list(prompt.encode())
        count = asked.get("max_tokens") or 16
        tokens = self.generation.request(np.array(prompt, np.int64), count)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        if not asked.get("stream"):
            text = "".join(f" w{tokens.get()}" for _ in range(count))
            self.answer(message(0, text, "length") | {"usage": usage})
            return

        def parts() -> Iterator[dict[str, Any]]:
            for place in range(count):
                yield message(0, f" w{tokens.get()}", "length" if place == count - 1 else None)
                times.append(time.perf_counter_ns())  # it was sent
            self.times.append(times)
            if (asked.get("stream_options") or {}).get("include_usage"):
                yield message(0, None) | {"usage": usage}

        self.stream(parts())


@contextlib.contextmanager
def served(*options: str, run: Path | None = None) -> Iterator[str]:
    """Run the server in a process of its own, recorded as a run if that is given, and yield its address."""
    recorded = ["-m", "xsp.cli", "run", "-q", "--overwrite", "-o", str(run)] if run is not None else []
    process = subprocess.Popen(
        [sys.executable, *recorded, "-m", "parts.completions", *options], cwd=Path(__file__).parents[1], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def times_of(address: str) -> list[list[int]]:
    """Return what `/times` answers."""
    with urllib.request.urlopen(f"{address}/times", timeout=30) as answer:
        times: list[list[int]] = json.load(answer)
    return times


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--slots", type=int, default=4)
    options = parser.parse_args()
    Handler.generation = Generation(options.source, options.slots)
    server = completions.Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    server.shutdown()  # threads of requests are daemons


if __name__ == "__main__":
    main()
