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

MOST_FILE_BYTES = 1 << 20
"""Limit in bytes of a document that a command prints."""

LEAST_BYTES = 2 << 10
MOST_CHARACTERS = 400
"""Maximum number of characters of a text; names of kernels can have thousands."""

MOST_DEPTH = 8
MOST_KEYS = 60
MOST_ITEMS = 200
"""Maximum depth, keys and items of JSON values in a trace, such as attributes."""

Document = dict[str, Any]


class Citation(NamedTuple):
    """The spans that a statement or row refers to: the ids of the longest ones, and their total number."""

    spans: list[str]
    total: int


NONE = Citation([], 0)


def document(kind: str, source: Mapping[str, Any] | None = None, **parts: Any) -> Document:
    """Return a document with the given parts of the schema: `statements`, `tables`, `advice`, `spans`, …"""
    parts.setdefault("statements", [])
    parts.setdefault("left_out", [])
    return {"xsp_evidence": VERSION, "xsp": __version__, "kind": kind, "source": source, **parts}


def statement(
    sentence: str, figures: Mapping[str, Any], citation: Citation, source: str | None = None, **extra: Any
) -> Document:
    """Return one statement.

    Args:
        sentence: a sentence.
        figures: the figures behind it, with the unit in the name; unknown values are null.
        citation: the spans that it refers to.
        source: the analysis, or the part of xsp, that it comes from.
        extra: `subject` and `severity` of a finding.
    """
    return {
        "says": sentence,
        "figures": dict(figures),
        "spans": citation.spans,
        "spans_in_all": citation.total,
        "source": source,
        **extra,
    }


def error(reason: str) -> Document:
    """Return the document for a question that cannot be answered, with the reason."""
    return document("error", error=reason)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents (draft 2020-12)."""
    content: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    )
    return content


def dumps(answer: Document, max_bytes: int = MOST_BYTES) -> str:
    """Return a document as one line of JSON of at most `max_bytes` bytes; see `fit`."""
    return text(fit(answer, max_bytes))


# --- within bounds ----------------------------------------------------------------------------------------------


def fit(answer: Document, max_bytes: int = MOST_BYTES) -> Document:
    """Return a document as plain data within a size limit.

    Texts are cut, and terminal control characters in them are replaced; numbers that are not finite become null. Then
    the longest list is cut until the document fits, and `left_out` counts what was removed.

    Args:
        answer: a document.
        max_bytes: limit in bytes of UTF-8; at least `LEAST_BYTES`.
    """
    max_bytes = max(max_bytes, LEAST_BYTES)
    content: Document = clean({**answer, "left_out": []})
    content["left_out"] = [clean(note) for note in answer["left_out"][:MOST_ITEMS]]
    lists = _cuttable_lists(content)
    while (size := _size(content)) > max_bytes:
        longest = max(lists, key=_CuttableList.size, default=None)
        if longest is None or not longest.rows:
            return error(f"the answer is longer than {max_bytes} bytes and cannot be cut: ask for less")
        excess = (size - max_bytes) / max(1, longest.size())
        longest.cut(max(1, math.ceil(min(1.0, excess) * len(longest.rows) * 0.9)))
        content["left_out"] = [
            *(clean(note) for note in answer["left_out"][:MOST_ITEMS]),
            *(part.left_out() for part in lists if part.removed_count),
        ]
    return content


@dataclass
class _CuttableList:
    """A list of a document that can be cut at its end, together with its parallel lists."""

    name: str
    rows: list[Any]
    parallel: Sequence[list[Any]] = ()
    first: int = 0
    removed_count: int = 0
    request: str | None = "first="
    """The request for the removed rows, to which the index of the first one is appended; None if there is none."""

    def size(self) -> int:
        return sum(_size(rows) for rows in (self.rows, *self.parallel)) if self.rows else 0

    def cut(self, count: int) -> None:
        for rows in (self.rows, *self.parallel):
            del rows[len(rows) - count :]
        self.removed_count += count

    def left_out(self) -> Document:
        # pages of spans contain only children; the span itself and its ancestors come first
        shown = sum(not isinstance(row, dict) or row.get("role", "child") == "child" for row in self.rows)
        return left_out(
            self.name, self.removed_count, None if self.request is None else f"{self.request}{self.first + shown}"
        )


def left_out(subject: str, count: int, request: str | None) -> Document:
    """Return a note on what a document lacks: what, how many, and the request that returns it, if there is one."""
    return {"of": subject, "count": count, "ask": request}


def _cuttable_lists(content: Document) -> list[_CuttableList]:
    is_named = content["kind"] not in _PAGED_KINDS
    lists = [
        _CuttableList(
            f"rows of {table['name']}",
            table["rows"],
            [table[column] for column in _PARALLEL_LISTS if column in table],
            table["first"],
            request=f"tables with analysis={table['name']}, first=" if is_named else "first=",
        )
        for table in content.get("tables", ())
    ]
    unpaged = ("runs",) if content["kind"] == "health" else ("runs", "statements")
    return lists + [
        _CuttableList(name, content[name], first=content.get("first", 0), request=None if name in unpaged else "first=")
        for name in ("statements", "advice", "spans", "runs", "analyses")
        if content.get(name)
    ]


_PAGED_KINDS = ("table", "compare")
"""Kinds of documents whose question takes the index of a table's first row."""


_PARALLEL_LISTS = ("row_spans", "row_spans_in_all", "row_spans_b", "row_spans_b_in_all")


def text(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _size(value: Any) -> int:
    return len(text(value).encode())


def clean(value: Any, depth: int = 0) -> Any:
    """Return a value as plain JSON data: text of bounded length, finite numbers, bounded depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Decimal)):
        # nine significant digits: more would exceed the precision of measurements and cost bytes
        return float(f"{float(value):.9g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        if depth >= MOST_DEPTH:
            return cut(str(dict(value)))
        return {cut(str(key)): clean(element, depth + 1) for key, element in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(element, depth + 1) for element in value] if depth < MOST_DEPTH else cut(str(value))
    return cut(value if isinstance(value, str) else str(value))


def limit_items(value: Any, depth: int = 0) -> Any:
    """Return a JSON value of a trace with a limited number of keys and items, and a note on how many are left out."""
    if isinstance(value, dict):
        entries = {key: limit_items(element, depth + 1) for key, element in list(value.items())[:MOST_KEYS]}
        return entries | ({"…": f"{len(value) - MOST_KEYS} more"} if len(value) > MOST_KEYS else {})
    if isinstance(value, list):
        elements = [limit_items(element, depth + 1) for element in value[:MOST_ITEMS]]
        return elements + ([f"… {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else [])
    return value


def cut(string: str, max_length: int = MOST_CHARACTERS) -> str:
    """Return a text without control characters; a long text is cut, with a note on the number of missing characters."""
    prefix = plain(string[:max_length])
    return prefix if len(string) <= max_length else f"{prefix}… ({len(string) - max_length} more characters)"
