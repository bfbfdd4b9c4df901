"""The JSON form: what a document holds, how it is kept within its bound, and its schema.

A document says what it is (`kind`), of which run (`source`), and what was found: statements, tables, advice or spans.
What did not fit is counted in `left_out`, with how to ask for it. `schema.json` beside this file describes all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from typing import Any, NamedTuple

from xsp.scrub import plain
from xsp.version import __version__

VERSION = 1
"""Rises when a field changes its meaning or goes away; fields that are only added do not raise it."""

MOST_BYTES = 48 << 10
"""Bytes of a document as UTF-8, unless told otherwise: what a model can read at once."""

MOST_BYTES_OF_A_FILE = 1 << 20
"""Bytes of a document that a command prints."""

LEAST_BYTES = 2 << 10
MOST_LETTERS = 400
"""Letters of a text; names of kernels have thousands."""

MOST_DEPTH = 8
MOST_KEYS = 60
MOST_ITEMS = 200
"""Levels, keys and items of what a trace holds as JSON of its own, as attributes."""

Document = dict[str, Any]


class Citation(NamedTuple):
    """The spans that something is of: the longest ones, and how many there are in all."""

    spans: list[str]
    in_all: int


NONE = Citation([], 0)


def document(kind: str, source: Mapping[str, Any] | None = None, **parts: Any) -> Document:
    """Return a document; parts are those of the schema: `statements`, `tables`, `advice`, `spans`, …"""
    parts.setdefault("statements", [])
    parts.setdefault("left_out", [])
    return {"xsp_evidence": VERSION, "xsp": __version__, "kind": kind, "source": source, **parts}


def statement(
    says: str, figures: Mapping[str, Any], cited: Citation, told_by: str | None = None, **further: Any
) -> Document:
    """Return one statement.

    Args:
        says: a sentence.
        figures: that it rests on, with the unit in the name; what is not known is null.
        cited: the spans that it is of.
        told_by: the analysis, or the part of xsp, that says it.
        further: `subject`, `severity` of a finding.
    """
    return {
        "says": says,
        "figures": dict(figures),
        "spans": cited.spans,
        "spans_in_all": cited.in_all,
        "told_by": told_by,
        **further,
    }


def error(reason: str) -> Document:
    """Return the document of a question that cannot be answered, with the reason."""
    return document("error", error=reason)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents (draft 2020-12)."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))
    return found


def dumps(said: Document, most: int = MOST_BYTES) -> str:
    """Return a document as one line of JSON of at most so many bytes; see `fitted`."""
    return text(fitted(said, most))


# --- within bounds ----------------------------------------------------------------------------------------------


def fitted(said: Document, most: int = MOST_BYTES) -> Document:
    """Return a document that is plain, and no longer than a bound.

    Texts are cut, and controls of a terminal in them become signs; numbers that are not finite are null. Then the
    longest list is cut until the document fits; what is left out is counted in `left_out`.

    Args:
        said: a document.
        most: bytes as UTF-8; at least `LEAST_BYTES`.
    """
    most = max(most, LEAST_BYTES)
    made: Document = cleaned({**said, "left_out": []})
    made["left_out"] = [cleaned(each) for each in said["left_out"][:MOST_ITEMS]]
    shelves = _shelves(made)
    while (size := _size(made)) > most:
        longest = max(shelves, key=_Shelf.size, default=None)
        if longest is None or not longest.rows:
            return error(f"the answer is longer than {most} bytes and cannot be cut: ask for less")
        excess = (size - most) / max(1, longest.size())
        longest.cut(max(1, math.ceil(min(1.0, excess) * len(longest.rows) * 0.9)))
        made["left_out"] = [
            *(cleaned(each) for each in said["left_out"][:MOST_ITEMS]),
            *(each.left_out() for each in shelves if each.gone),
        ]
    return made


@dataclass
class _Shelf:
    """A list of a document that can be cut at its end, with the lists beside it."""

    of: str
    rows: list[Any]
    beside: Sequence[list[Any]] = ()
    first: int = 0
    gone: int = 0

    def size(self) -> int:
        return sum(_size(each) for each in (self.rows, *self.beside)) if self.rows else 0

    def cut(self, count: int) -> None:
        for each in (self.rows, *self.beside):
            del each[len(each) - count :]
        self.gone += count

    def left_out(self) -> Document:
        return left_out(self.of, self.gone, f"first={self.first + len(self.rows)}")


def left_out(of: str, count: int, ask: str | None) -> Document:
    """Return a note of what is not in a document: of what, how many, and how to ask for it, if that can be."""
    return {"of": of, "count": count, "ask": ask}


def _shelves(made: Document) -> list[_Shelf]:
    found = [
        _Shelf(f"rows of {each['name']}", each["rows"], [each[beside] for beside in _BESIDE if beside in each],
               each["first"])
        for each in made.get("tables", ())
    ]  # fmt: skip
    lists = ("statements", "advice", "spans", "runs", "analyses")
    return found + [_Shelf(name, made[name], first=made.get("first", 0)) for name in lists if made.get(name)]


_BESIDE = ("row_spans", "row_spans_in_all", "row_spans_b", "row_spans_b_in_all")


def text(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _size(value: Any) -> int:
    return len(text(value).encode())


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it: plain text of bounded length, finite numbers, bounded depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Decimal)):
        return _short(float(value)) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _mapping(value, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [cleaned(each, depth + 1) for each in value] if depth < MOST_DEPTH else cut(str(value))
    return cut(value if isinstance(value, str) else str(value))


def _short(value: float) -> float:
    """Return a number with nine digits: more is no measurement, and bytes."""
    return float(f"{value:.9g}")


def _mapping(value: Mapping[Any, Any], depth: int) -> Any:
    if depth >= MOST_DEPTH:
        return cut(str(dict(value)))
    return {cut(str(key)): cleaned(each, depth + 1) for key, each in value.items()}


def bounded(value: Any, depth: int = 0) -> Any:
    """Return what a trace holds as JSON of its own, with few keys and items; how many more there are is said in it."""
    if isinstance(value, dict):
        kept = {key: bounded(each, depth + 1) for key, each in list(value.items())[:MOST_KEYS]}
        return kept | ({"…": f"{len(value) - MOST_KEYS} more"} if len(value) > MOST_KEYS else {})
    if isinstance(value, list):
        kept_items = [bounded(each, depth + 1) for each in value[:MOST_ITEMS]]
        return kept_items + ([f"… {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else [])
    return value


def cut(whole: str, most: int = MOST_LETTERS) -> str:
    """Return a text that a terminal only shows, and of a long one its beginning and how much more there is."""
    shown = plain(whole[:most])
    return shown if len(whole) <= most else f"{shown}… ({len(whole) - most} more letters)"
