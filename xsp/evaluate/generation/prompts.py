"""The prompt and the number of generated tokens of each request, drawn from a seed before the first request."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from xsp.evaluate.load.requests import Times
from xsp.evaluate.manifest import Generation, Lengths


@dataclass(frozen=True)
class Prompts:
    """What each request asks for."""

    tokens: tuple[Times, ...]
    """The numbers of each prompt's tokens."""

    output_counts: Times
    """How many tokens each request generates."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> Times:
        """Number of tokens of each prompt."""
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return int((self.counts + self.output_counts).max())

    @property
    def checksum(self) -> str:
        """SHA-256 of all prompts and output lengths."""
        digest = hashlib.sha256(self.output_counts.tobytes())
        for tokens in self.tokens:
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
        return f"sha256:{digest.hexdigest()}"


def draw(generation: Generation, requests: int, seed: int) -> Prompts:
    """Draw the prompts and output lengths of a number of requests; those of request i depend only on seed and i.

    Args:
        generation: the distributions.
        requests: number of requests.
        seed: of the lengths and of the tokens.
    """
    tokens, counts = [], []
    for number in range(requests):
        rng = np.random.default_rng([seed, number])
        length, count = _length(generation.prompt, rng), _length(generation.output, rng)
        tokens.append(rng.integers(0, generation.vocabulary, length))
        counts.append(count)
    return Prompts(tuple(tokens), np.array(counts, np.int64))


def _length(lengths: Lengths, rng: np.random.Generator) -> int:
    mean, std = lengths.mean or 0.0, lengths.std
    if lengths.distribution == "values":
        return int(rng.choice(lengths.values))
    if lengths.distribution == "uniform":
        return int(rng.integers(lengths.least, lengths.most, endpoint=True))
    if lengths.distribution == "normal":
        mean = rng.normal(mean, std)
    elif lengths.distribution == "lognormal":
        sigma = math.sqrt(math.log1p((std / mean) ** 2))
        mean *= math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
    return int(min(max(round(mean), lengths.least), lengths.most))


def longest(lengths: Lengths) -> int:
    """Return an upper bound of the lengths of a distribution."""
    if lengths.distribution == "values":
        return max(lengths.values)
    if lengths.distribution == "fixed":
        return min(max(round(lengths.mean or 0), lengths.least), lengths.most)
    return lengths.most
