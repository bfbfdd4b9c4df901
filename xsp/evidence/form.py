"""The JSON form: the content of a document, its size limit, and its schema.

A document has its kind (`kind`), its run (`source`), and the results: statements, tables, advice or spans. `left_out`
counts what did not fit, with the request that returns it. `schema.json` in this folder describes the whole form.
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
"""Version of the form, increased when a field changes its meaning or is removed, not when fields are added."""

MOST_BYTES = 48 << 10
"""Default limit of a document in bytes of UTF-8: as much as a model can read at once."""

MOST_BYTES_OF_A_FILE = 1 << 20
"""Limit in bytes of a document that a command prints."""

LEAST_BYTES = 2 << 10
MOST_LETTERS = 400
"""Maximum number of characters of a text; names of kernels can have thousands."""

MOST_DEPTH = 8
MOST_KEYS = 60
MOST_ITEMS = 200
"""Maximum depth, keys and items of JSON values in a trace, such as attributes."""

Document = dict[str, Any]


class Citation(NamedTuple):
    """The spans that a statement or row refers to: the ids of the longest ones, and their total number."""

    spans: list[str]
    in_all: int


NONE = Citation([], 0)


def document(kind: str, source: Mapping[str, Any] | None = None, **parts: Any) -> Document:
    """Return a document with the given parts of the schema: `statements`, `tables`, `advice`, `spans`, …"""
    parts.setdefault("statements", [])
    parts.setdefault("left_out", [])
    return {"xsp_evidence": VERSION, "xsp": __version__, "kind": kind, "source": source, **parts}


def statement(
    says: str, figures: Mapping[str, Any], cited: Citation, source: str | None = None, **further: Any
) -> Document:
    """Return one statement.

    Args:
        says: a sentence.
        figures: the figures behind it, with the unit in the name; unknown values are null.
        cited: the spans that it refers to.
        source: the analysis, or the part of xsp, that it comes from.
        further: `subject` and `severity` of a finding.
    """
    return {
        "says": says,
        "figures": dict(figures),
        "spans": cited.spans,
        "spans_in_all": cited.in_all,
        "source": source,
        **further,
    }


def error(reason: str) -> Document:
    """Return the document for a question that cannot be answered, with the reason."""
    return document("error", error=reason)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents (draft 2020-12)."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))
    return found


def dumps(said: Document, most: int = MOST_BYTES) -> str:
    """Return a document as one line of JSON of at most `most` bytes; see `fitted`."""
    return text(fitted(said, most))


# --- within bounds ----------------------------------------------------------------------------------------------


def fitted(said: Document, most: int = MOST_BYTES) -> Document:
    """Return a document as plain data within a size limit.

    Texts are cut, and terminal control characters in them are replaced; numbers that are not finite become null. Then
    the longest list is cut until the document fits, and `left_out` counts what was removed.

    Args:
        said: a document.
        most: limit in bytes of UTF-8; at least `LEAST_BYTES`.
    """
    most = max(most, LEAST_BYTES)
    content: Document = cleaned({**said, "left_out": []})
    content["left_out"] = [cleaned(note) for note in said["left_out"][:MOST_ITEMS]]
    shelves = _shelves(content)
    while (size := _size(content)) > most:
        longest = max(shelves, key=_Shelf.size, default=None)
        if longest is None or not longest.rows:
            return error(f"the answer is longer than {most} bytes and cannot be cut: ask for less")
        excess = (size - most) / max(1, longest.size())
        longest.cut(max(1, math.ceil(min(1.0, excess) * len(longest.rows) * 0.9)))
        content["left_out"] = [
            *(cleaned(note) for note in said["left_out"][:MOST_ITEMS]),
            *(shelf.left_out() for shelf in shelves if shelf.gone),
        ]
    return content


@dataclass
class _Shelf:
    """A list of a document that can be cut at its end, together with its parallel lists."""

    of: str
    rows: list[Any]
    beside: Sequence[list[Any]] = ()
    first: int = 0
    gone: int = 0
    ask: str | None = "first="
    """The request for the removed rows, to which the index of the first one is appended; None if there is none."""

    def size(self) -> int:
        return sum(_size(rows) for rows in (self.rows, *self.beside)) if self.rows else 0

    def cut(self, count: int) -> None:
        for rows in (self.rows, *self.beside):
            del rows[len(rows) - count :]
        self.gone += count

    def left_out(self) -> Document:
        # pages of spans contain only children; the span itself and its ancestors come first
        shown = sum(not isinstance(row, dict) or row.get("role", "child") == "child" for row in self.rows)
        return left_out(self.of, self.gone, None if self.ask is None else f"{self.ask}{self.first + shown}")


def left_out(of: str, count: int, ask: str | None) -> Document:
    """Return a note on what a document lacks: what, how many, and the request that returns it, if there is one."""
    return {"of": of, "count": count, "ask": ask}


def _shelves(content: Document) -> list[_Shelf]:
    is_named = content["kind"] not in _PAGED
    shelves = [
        _Shelf(f"rows of {table['name']}", table["rows"], [table[beside] for beside in _BESIDE if beside in table],
               table["first"], ask=f"tables with analysis={table['name']}, first=" if is_named else "first=")
        for table in content.get("tables", ())
    ]  # fmt: skip
    unpaged = ("runs",) if content["kind"] == "health" else ("runs", "statements")
    return shelves + [
        _Shelf(name, content[name], first=content.get("first", 0), ask=None if name in unpaged else "first=")
        for name in ("statements", "advice", "spans", "runs", "analyses")
        if content.get(name)
    ]


_PAGED = ("table", "compare")
"""Kinds of documents whose question takes the index of a table's first row."""


_BESIDE = ("row_spans", "row_spans_in_all", "row_spans_b", "row_spans_b_in_all")


def text(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _size(value: Any) -> int:
    return len(text(value).encode())


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return a value as plain JSON data: text of bounded length, finite numbers, bounded depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Decimal)):
        return _short(float(value)) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _mapping(value, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [cleaned(element, depth + 1) for element in value] if depth < MOST_DEPTH else cut(str(value))
    return cut(value if isinstance(value, str) else str(value))


def _short(value: float) -> float:
    """Return a number with nine significant digits: more would exceed the precision of measurements and cost bytes."""
    return float(f"{value:.9g}")


def _mapping(value: Mapping[Any, Any], depth: int) -> Any:
    if depth >= MOST_DEPTH:
        return cut(str(dict(value)))
    return {cut(str(key)): cleaned(element, depth + 1) for key, element in value.items()}


def bounded(value: Any, depth: int = 0) -> Any:
    """Return a JSON value of a trace with a limited number of keys and items, and a note on how many are left out."""
    if isinstance(value, dict):
        entries = {key: bounded(element, depth + 1) for key, element in list(value.items())[:MOST_KEYS]}
        return entries | ({"…": f"{len(value) - MOST_KEYS} more"} if len(value) > MOST_KEYS else {})
    if isinstance(value, list):
        elements = [bounded(element, depth + 1) for element in value[:MOST_ITEMS]]
        return elements + ([f"… {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else [])
    return value


def cut(whole: str, most: int = MOST_LETTERS) -> str:
    """Return a text without control characters; a long text is cut, with a note on the number of missing characters."""
    shown = plain(whole[:most])
    return shown if len(whole) <= most else f"{shown}… ({len(whole) - most} more letters)"
