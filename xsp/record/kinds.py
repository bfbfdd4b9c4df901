"""The kind of each step, recorded or not, from the outline of its calls.

Two steps are of the same kind if they made the same outermost calls, of the same modules, with inputs of about the same
shape, and the same backward passes and optimizer steps, in the same order. Sizes are compared by powers of two, so that
sentences of 100 and of 120 words are of one kind, but a prefill of 40 words and a decode of one word are not. Runs of
equal outline words are also compared by powers of two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from xsp.collector import Signal, Token
from xsp.schema import Kind
from xsp.stats import percentile
from xsp.subjects import InputLayout

MOST_KINDS = 64
"""Limit on kinds; further kinds are merged into one: a program whose steps all differ has no kinds."""

MOST_KNOWN = 4096
"""Limit on the outlines that are remembered verbatim."""

MOST_WORDS = 1 << 16
"""Limit on the words of these outlines, together some ten megabytes."""

LATEST_SUCCESSORS = 9
"""Number of latest steps after steps of a kind from which the next one is predicted."""

CONTEXTS = (8, 3, 1)
"""Numbers of last kinds from which the next one is predicted, the first that occurred `FEWEST_SEEN` times: programs
repeat patterns, such as two steps of a discriminator and one of a generator, or a skipped optimizer step in seven."""

MOST_TIMED = 64
"""Limit on the latest steps of a kind whose hooks were timed."""

FEWEST_SEEN = 2
MOST_CONTEXTS = 4096
"""Limit on the sequences of kinds that are remembered."""

OTHER = "other steps"
NO_CALL = "steps without a module's call"


class Batch(NamedTuple):
    """The number of samples in a step, and its source."""

    size: int | None
    source: str | None
    """`input`: from its one input, by the layout of its module; `guess`: from several calls, or if the module does not
    determine the layout; `stated`: by the program; None if unknown."""


class Classification(NamedTuple):
    """The kind and the batch of a step."""

    kind: StepKind
    batch: Batch


class StepKind:
    """One kind of step."""

    def __init__(self, number: int, tokens: Sequence[Token], name: str, batch: Batch) -> None:
        self.number = number
        self.name = name
        self.signal_counts = {
            Signal.CALL_END: sum(token.kind is Kind.FORWARD for token in tokens),
            Signal.BACKWARD_END: sum(token.kind is Kind.BACKWARD for token in tokens),
            Signal.OPTIMIZER_END: sum(token.kind is Kind.OPTIMIZER for token in tokens),
        }
        """Numbers of the signals in one of its steps. A step that is found at signals ends with the last of a kind."""

        self.modules = frozenset(token.subject for token in tokens if token.kind is Kind.FORWARD)
        """Numbers of the modules that it calls."""

        self.ended_by: Signal | None = None
        """The signal with which its last step ended, if steps are found at signals."""

        self.trains = any(token.kind in (Kind.BACKWARD, Kind.OPTIMIZER) for token in tokens)
        self.calls = [_call_content(token) for token in tokens[:20]]
        self.batch = batch
        self.words: set[tuple[Any, ...]] = set()
        """The words of the outlines of its steps, as collectors note them."""

        self.step_count = 0
        """Steps of this kind that ended."""

        self.hooks_ns: deque[int] = deque(maxlen=MOST_TIMED)
        """What hooks of xsp took in the latest of its steps that were not recorded and in which that was measured."""

    def content(self) -> dict[str, Any]:
        """Return its content for `run.json`."""
        return {
            "kind": self.number,
            "name": self.name,
            "training": self.trains,
            "calls": self.calls,
            "batch_size": self.batch.size,
            "batch_source": self.batch.source,
            "steps": self.step_count,
            **({"hooks_ns": percentile(list(self.hooks_ns), 0.5)} if self.hooks_ns else {}),
        }


class Kinds:
    """The kinds of steps that a program has run so far, and the prediction of the next one."""

    def __init__(self, layouts: Mapping[int, InputLayout | None] | None = None) -> None:
        """Start without kinds.

        Args:
            layouts: layouts of the inputs of modules, by the module's number, see `xsp.subjects`.
        """
        self._layouts = layouts if layouts is not None else {}
        self.all: list[StepKind] = []
        self._by_outline: dict[tuple[Any, ...], Classification] = {}
        self._word_count = 0
        self._by_form: dict[tuple[Any, ...], StepKind] = {}
        self._by_first_word: dict[tuple[Any, ...], list[StepKind]] = {}
        self._instances: dict[type | None, dict[int, int]] = {}
        self._last: deque[int] = deque(maxlen=max(CONTEXTS))
        self._successors: dict[tuple[int, ...], deque[int]] = {}
        """The latest kinds after each sequence of last kinds."""

    def expected_kind(self, first_word: tuple[Any, ...] | None = None) -> int | None:
        """Return the number of the likely kind of the next step.

        Args:
            first_word: the first word of its outline, if it is known.

        Returns:
            The kind that usually follows the last one. With `first_word`, if that kind never began with this word, the
            most frequent kind that did. None if unknown.
        """
        expected = self._usual_successor()
        if first_word is None:
            return expected
        candidates = self._by_first_word.get(_form(Token(*first_word)), [])
        if expected is not None and self.all[expected] in candidates:
            return expected
        return max(candidates, key=lambda kind: kind.step_count).number if candidates else None

    def _usual_successor(self) -> int | None:
        """Return the kind that most of the latest steps after the last ones had; None before the first.

        One rare step among many (a smaller last batch, a skipped optimizer step) does not change it.
        """
        last = tuple(self._last)
        for length in CONTEXTS:
            latest_first = list(reversed(self._successors.get(last[-length:], ()))) if len(last) >= length else []
            if len(latest_first) >= FEWEST_SEEN or (latest_first and length == min(CONTEXTS)):
                return max(latest_first, key=latest_first.count)  # the latest one of equals
        return None

    def _count_successor(self, kind: int) -> None:
        last = tuple(self._last)
        if len(self._successors) >= MOST_CONTEXTS:
            self._successors.clear()
        for length in CONTEXTS:
            if len(last) >= length:
                self._successors.setdefault(last[-length:], deque(maxlen=LATEST_SUCCESSORS)).append(kind)
        self._last.append(kind)

    def count_step(
        self, outline: Sequence[tuple[Any, ...]], stated_samples: int | None = None, is_next: bool = True
    ) -> Classification:
        """Count a step, and return its kind and batch.

        Args:
            outline: outline of the step.
            stated_samples: samples in the step according to the program; None if it does not state them.
            is_next: whether it follows the last counted step; False for one that ran beside others.
        """
        words = tuple(outline)
        entry = self._by_outline.get(words)
        if entry is None:
            entry = self._classify(words)
        kind = entry.kind
        kind.step_count += 1
        if is_next:
            self._count_successor(kind.number)
        if stated_samples is not None:
            kind.batch = Batch(stated_samples, "stated")
            return Classification(kind, kind.batch)
        return entry

    def count_equal_steps(self, words: tuple[tuple[Any, ...], ...], count: int) -> StepKind:
        """Count consecutive steps of one outline, at least one, as `count_step` does each, and return their kind."""
        remembered = LATEST_SUCCESSORS + max(CONTEXTS)  # what came before them leaves no trace
        for _ in range(min(count, remembered)):
            kind = self.count_step(words).kind
        kind.step_count += max(0, count - remembered)
        return kind

    def _classify(self, words: tuple[tuple[Any, ...], ...]) -> Classification:
        outline = _without_recomputed([Token(*word) for word in words])
        tokens = [token for token in outline if token.kind is not Kind.OPTIMIZER or token.subject]
        form = tuple((word, _rounded(len(list(group)))) for word, group in groupby(map(_form, tokens)))
        kind = self._by_form.get(form)
        if kind is None:
            kind = self._new(tokens, batch_of(outline, self._layouts))
            if kind.name != OTHER:
                self._by_form[form] = kind
        self._word_count += len(words)
        if len(self._by_outline) >= MOST_KNOWN or self._word_count > MOST_WORDS:
            self._by_outline.clear()
            self._word_count = len(words)
        entry = self._by_outline[words] = Classification(kind, batch_of(outline, self._layouts))
        if len(kind.words) < MOST_KNOWN:
            kind.words.update(words)
        if tokens:
            candidates = self._by_first_word.setdefault(_form(tokens[0]), [])
            if kind not in candidates:
                candidates.append(kind)
        return entry

    def _new(self, tokens: Sequence[Token], batch: Batch) -> StepKind:
        if len(self.all) >= MOST_KINDS:
            if self.all[-1].name != OTHER:
                self.all.append(StepKind(len(self.all), (), OTHER, batch))
            return self.all[-1]
        name = self._name(tokens)
        used_names = {kind.name for kind in self.all}
        if name in used_names and (optimizers := _optimizers(tokens)):
            name += f", {' + '.join(optimizers)}"
        numbered_names = (f"{name} #{number}" for number in range(2, MOST_KINDS + 2))
        unique_name = next(candidate for candidate in (name, *numbered_names) if candidate not in used_names)
        self.all.append(StepKind(len(self.all), tokens, unique_name, batch))
        return self.all[-1]

    def _name(self, tokens: Sequence[Token]) -> str:
        """Return a readable name: `training ResNet 32×3×224×224`, `Encoder 8×16 + Decoder 8×1`."""
        calls = [(self._instance(token), token.shape) for token in tokens if token.kind is Kind.FORWARD]
        if not calls:
            optimizers = " + ".join(_optimizers(tokens))
            if any(token.kind is Kind.BACKWARD for token in tokens):
                return f"training by {optimizers}" if optimizers else "training"
            return f"{optimizers} alone" if optimizers else NO_CALL
        distinct = list(dict.fromkeys(calls))
        labels = [
            f"{calls.count(call)}× {_text(*call)}" if calls.count(call) > 1 else _text(*call) for call in distinct[:3]
        ]
        suffix = f" + {len(distinct) - 3} more" if len(distinct) > 3 else ""
        trains = any(token.kind in (Kind.BACKWARD, Kind.OPTIMIZER) for token in tokens)
        return f"{'training ' if trains else ''}{' + '.join(labels)}{suffix}"

    def _instance(self, token: Token) -> str:
        """Return the name of a module's class, with a number if there are several of that class."""
        numbers = self._instances.setdefault(token.type, {})
        number = numbers.setdefault(token.subject, len(numbers))
        return f"{_type_name(token)}{f'({number + 1})' if number else ''}"

    def content(self) -> list[dict[str, Any]]:
        """Return the content of all kinds for `run.json`."""
        return [kind.content() for kind in self.all]


def batch_of(tokens: Sequence[Token], layouts: Mapping[int, InputLayout | None]) -> Batch:
    """Return the samples of a step, summed over micro-batches: the first dimension, unless a layout gives another one.

    Between two backward passes the largest first dimension counts: the calls of several modules, or several calls of
    one (siamese networks), process one batch. The same holds inside an optimizer's step, whose closure may compute the
    same batch several times. Passes that return their gradients count only if there are no others: a penalty or an
    attack computes them on the same batch. The result is certain for one call; for several it is a guess. An input of
    one dimension may be one sample without a batch, as in reinforcement learning, or a batch of ids: also a guess.
    """
    least = min((token.subject for token in tokens if token.kind is Kind.BACKWARD and token.subject), default=1)
    parts: list[tuple[int, int]] = [(0, 0)]  # by a layout, which has priority; by the first dimension
    in_optimizer = False
    calls = [token for token in tokens if token.kind is Kind.FORWARD and token.shape]
    for token in tokens:
        if token.kind is Kind.FORWARD and token.shape:
            layout = layouts.get(token.subject)
            sample_count = layout.samples(token.shape) if layout is not None else 0
            if sample_count is None:
                continue
            parts[-1] = max(parts[-1][0], sample_count), max(parts[-1][1], token.shape[0])
        elif token.kind is Kind.OPTIMIZER:
            in_optimizer = not token.subject
        elif token.kind is Kind.BACKWARD and not in_optimizer and token.subject == least:
            parts.append((0, 0))
    total = sum(sample_count or first_dimension for sample_count, first_dimension in parts)
    if not total:
        return Batch(None, None)
    if len(calls) != 1:
        return Batch(total, "guess")
    layout, shape = layouts.get(calls[0].subject), calls[0].shape or ()
    is_known = layout.is_known(shape) if layout is not None else len(shape) > 1
    return Batch(total, "input" if is_known else "guess")


def _without_recomputed(tokens: Sequence[Token]) -> list[Token]:
    """Return an outline without the calls inside backward passes: the recomputation of activation checkpointing."""
    outer_tokens, depth = [], 0
    for token in tokens:
        if token.kind is Kind.BACKWARD:
            depth = max(0, depth + (-1 if token.subject else 1))
        if not depth and (token.kind is not Kind.BACKWARD or token.subject):
            outer_tokens.append(token)
    return outer_tokens


def _form(token: Token) -> tuple[Any, ...]:
    """Return a word with its sizes rounded to powers of two."""
    shape = tuple(map(_rounded, token.shape)) if token.shape is not None else None
    return token.kind, token.subject, token.trains, shape


def _rounded(size: int) -> int:
    return int(size).bit_length()


def _optimizers(tokens: Sequence[Token]) -> list[str]:
    return list(dict.fromkeys(_type_name(token) for token in tokens if token.kind is Kind.OPTIMIZER))


def _type_name(token: Token) -> str:
    return token.type.__name__ if token.type is not None else "?"


def _text(name: str, shape: tuple[int, ...] | None) -> str:
    return f"{name} {'×'.join(map(str, shape))}" if shape else name


def _call_content(token: Token) -> dict[str, Any]:
    call: dict[str, Any] = {"what": str(token.kind)}
    if token.type is not None:
        call["type"] = token.type.__name__
    if token.shape:
        call["shape"] = list(token.shape)
    if token.kind is Kind.FORWARD:
        call |= {"module": token.subject, "trains": token.trains}
    return call
