"""Language models as two steps: `prefill(n)` reads n tokens, `decode(n)` adds the n-th with a cache of those before it.

The model itself makes the cache from n - 1 tokens (keys and values, the last tokens of a sliding window, states of a
recurrent layer); a decoding step like the measured one reads the last of them. Each step starts from the same cache. So
a step can be repeated, and no structure of the cache is assumed. The model has already imported torch.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xsp.errors import ModelError, PhaseError, first_sentence

CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Names under which models return their cache and take it as an argument; since transformers 5.24 mostly the first."""

MIN_VERSION = 5, 5
"""First version of transformers in which every cache holds what a step needs, such as a sliding window's tokens."""

MAX_SPARE_ROWS = 8
"""Most rows that a table of positions may have beyond `max_position_embeddings`."""


def check_config(transformers: Any, name: str, config: Any) -> None:
    """Raise if transformers has no causal language model for a configuration.

    Raises:
        ModelError: it has none; the message says what to type instead.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise PhaseError(_encoder_decoder_message(f"transformers:{name}"))
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise PhaseError(f"transformers:{name} is not a causal language model: omit --decode and --prefill")


def arguments(spec: str, model: Any, batch: int, prefill: int | None, decode: int | None) -> tuple[dict[str, Any], Any]:
    """Return the keyword arguments of a step of a language model, and the tokens before it; None if there are none.

    Args:
        spec: name of the model, for messages.
        model: a model of transformers.
        batch: number of sequences.
        prefill: tokens that the step reads.
        decode: tokens after the step, which adds the last of them.

    Raises:
        ModelError: the model does not generate text, or takes fewer tokens.
    """
    if (prefill is None) == (decode is None):
        raise ModelError("--prefill and --decode are different steps: give one of them")
    tokens = prefill if decode is None else decode
    assert tokens is not None
    _check(spec, model, tokens, decode is not None)
    torch = sys.modules["torch"]
    vocabulary = getattr(model.config, "vocab_size", None) or model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (batch, tokens))
    kwargs = {"input_ids": ids if decode is None else ids[:, -1:].clone(), "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = 1  # as `generate` does
    return kwargs, None if decode is None else ids[:, :-1].clone()


def _check(spec: str, model: Any, tokens: int, is_decoding: bool) -> None:
    """Check that a model generates token by token, and that there are enough tokens, and not too many.

    Raises:
        PhaseError: the model does not generate.
        ModelError: the number of tokens does not fit.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings") or getattr(model, "main_input_name", "") == "":
        raise PhaseError(f"{spec}: --decode and --prefill are for language models of transformers")
    if (version := _version()) is not None and tuple(map(int, version.split(".")[:2])) < MIN_VERSION:
        min_version = ".".join(map(str, MIN_VERSION))
        raise PhaseError(
            f"{spec}: --decode and --prefill need transformers {min_version} or later, not {version}: "
            f"pip install 'transformers>={min_version}'"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise PhaseError(_encoder_decoder_message(spec))
    if model.main_input_name != "input_ids" or "use_cache" not in inspect.signature(model.forward).parameters:
        raise PhaseError(f"{spec} keeps no cache between calls: omit --decode and --prefill")
    if tokens < 1 + is_decoding:
        raise ModelError(f"--decode {tokens}: there is no token before it; --decode counts the tokens after the step")
    max_tokens = _max_tokens(model)
    if max_tokens is not None and tokens > max_tokens:
        raise ModelError(
            f"{spec} takes up to {max_tokens:,} tokens, the size of its table of positions; {tokens:,} were requested"
        )


def _version() -> str | None:
    """Return the version of the imported transformers; None if it is not imported."""
    return getattr(sys.modules.get("transformers"), "__version__", None)


def _encoder_decoder_message(spec: str) -> str:
    return (
        f"{spec} is an encoder-decoder, whose decoding step reads the encoder's output: omit --decode and --prefill, "
        "and give --sequence N"
    )


def _max_tokens(model: Any) -> int | None:
    """Return how many tokens a model with a table of positions takes; None if positions are computed."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    embedding = model.get_input_embeddings()
    for module in model.modules():
        rows = getattr(module, "num_embeddings", None)
        if module is not embedding and isinstance(rows, int) and positions <= rows <= positions + MAX_SPARE_ROWS:
            return positions
    return None


def cache_maker(spec: str, model: Any, prefix: Any) -> Callable[[], dict[str, Any]]:
    """Read the tokens before a step, and return a function that returns a fresh keyword argument with their cache.

    Args:
        spec: name of the model, for messages.
        model: the model, on the device of the tokens.
        prefix: the tokens.

    Raises:
        ModelError: the model keeps no cache, or does not take the tokens.
    """
    torch = sys.modules["torch"]
    try:
        with torch.inference_mode():
            has_several = prefix.shape[1] > 1
            name, cache = find_cache(model, model(input_ids=prefix[:, :-1] if has_several else prefix, use_cache=True))
            if name and has_several:
                name, cache = find_cache(model, model(input_ids=prefix[:, -1:], use_cache=True, **{name: cache}))
    except Exception as error:
        raise ModelError(f"{spec} cannot read {prefix.shape[-1]:,} tokens ({first_sentence(error)})") from error
    if not name:
        raise PhaseError(
            f"{spec} keeps no cache between calls, so it has no decoding step: omit --decode and --prefill"
        )
    return lambda: {name: _copy(cache)}


def find_cache(model: Any, output: Any) -> tuple[str, Any]:
    """Return the cache in a call's output, after its argument name in the next call; `("", None)` if there is none."""
    parameters = inspect.signature(model.forward).parameters
    outputs = output.items() if isinstance(output, Mapping) else ()
    caches = ((name, value) for name, value in outputs if name in parameters and (name in CACHES or _is_cache(value)))
    return next(((name, cache) for name, cache in caches if any(True for _ in tensors(cache))), ("", None))


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a cache, each once."""
    torch = sys.modules["torch"]
    visited: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, (list, tuple)):
            stack += part
        elif isinstance(part, dict):
            stack += part.values()
        elif _is_cache(part):
            stack += vars(part).values()


def _is_cache(value: Any) -> bool:
    return type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__")


def _copy(cache: Any) -> Any:
    """Return a copy of a cache that a step may change; it shares the tensors of the original."""
    if isinstance(cache, (list, tuple)):
        return type(cache)(map(_copy, cache))
    if isinstance(cache, dict):
        return {name: _copy(value) for name, value in cache.items()}
    if not _is_cache(cache) or type(cache).__name__.endswith("Config"):
        return cache
    result = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, (list, dict)) or _is_cache(value):
            setattr(result, name, _copy(value))
    return result
