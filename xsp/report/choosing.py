"""The choice and the order of the rows of a table: `--where` and `--sort`.

A condition is parsed here and written as new SQL: names must be columns of the table, values become literals. Nothing
that a user types reaches the engine unparsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import duckdb

from xsp import table
from xsp.errors import UsageError, nearest

COMPARISONS = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
PATTERNS = ("~", "!~", "like")
"""Comparisons of text, ignoring case: a regular expression matches or does not; `%` and `_` as in SQL's LIKE."""

EXAMPLE = "--where \"device_ms > 1 and name ~ 'gemm'\""

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*') | (?P<quoted>"[^"]*") | (?P<mark><=|>=|<>|!=|==|!~|[<>=~()])
        | (?P<word>[^\s()<>=!~'"]+) | (?P<unknown>\S))""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BOOLEANS = {"yes": "true", "true": "true", "no": "false", "false": "false"}


class _Token(NamedTuple):
    kind: str
    text: str

    def is_one_of(self, *words: str) -> bool:
        """Return whether the token is one of these words or marks."""
        return self.kind in ("word", "mark") and self.text.lower() in words


_END = _Token("end", "")


def select_rows(
    relation: duckdb.DuckDBPyRelation, name: str, where: Sequence[str] = (), sort: str | None = None
) -> duckdb.DuckDBPyRelation:
    """Return the rows of a table that meet all conditions, in the requested order.

    Args:
        relation: the table.
        name: its name in messages.
        where: conditions: a column, a comparison and a value, combined with and, or, not and parentheses.
        sort: columns, with commas between them; numbers begin with the largest and text with A, unless `:asc` or
            `:desc` follows a column. Nulls come last.

    Raises:
        UsageError: a column that the table does not have, or a condition that cannot be read.
    """
    for condition in where:
        relation = relation.filter(_Condition(relation, name, condition).sql())
    return relation.order(", ".join(_orders(relation, name, sort))) if sort else relation


def sort_columns(relation: duckdb.DuckDBPyRelation, name: str, sort: str | None) -> list[str]:
    """Return the columns by which a table is sorted, by their names in the table.

    Raises:
        UsageError: the table has no such column.
    """
    return [column for column, _ in _sorting(relation, name, sort)] if sort else []


def _sorting(relation: duckdb.DuckDBPyRelation, name: str, sort: str) -> list[tuple[str, str]]:
    keys = []
    for entry in sort.split(","):
        column, mark, direction = entry.strip().partition(":")
        if direction.lower() not in ("asc", "desc") and mark:
            raise UsageError(
                f"--sort {entry.strip()}: a column is followed by :asc or :desc, as in --sort {column}:asc"
            )
        keys.append((_column(relation, name, column, "--sort"), direction.lower()))
    return keys


def _orders(relation: duckdb.DuckDBPyRelation, name: str, sort: str) -> list[str]:
    kinds = _kinds(relation)
    return [
        f"{table.quoted(column)} {direction or ('asc' if kinds[column] == 'text' else 'desc')} NULLS LAST"
        for column, direction in _sorting(relation, name, sort)
    ]


def _column(relation: duckdb.DuckDBPyRelation, name: str, heading: str, option: str) -> str:
    """Return a column by its name, or by its heading, which has spaces instead of underscores."""
    by_name = {column.lower(): column for column in relation.columns}
    match = by_name.get(re.sub(r"\s+", "_", heading.strip()).lower())
    if match is None:
        columns = ", ".join(relation.columns)
        raise UsageError(
            f"{option}: {name} has no column {heading!r}{nearest(heading, relation.columns)}; its columns: {columns}"
        )
    return match


def _kinds(relation: duckdb.DuckDBPyRelation) -> dict[str, str]:
    """Return the kind of each column: number, text or boolean."""
    kinds = ["text" if str(dtype) == "VARCHAR" else "boolean" if str(dtype) == "BOOLEAN" else "number"
             for dtype in relation.types]  # fmt: skip
    return dict(zip(relation.columns, kinds, strict=True))


class _Condition:
    """A parser of one condition, from left to right."""

    def __init__(self, relation: duckdb.DuckDBPyRelation, name: str, text: str) -> None:
        self._relation, self._name, self._text = relation, name, text
        self._kinds = _kinds(relation)
        self._tokens = [_Token(str(match.lastgroup), str(match.group(str(match.lastgroup))))
                        for match in _TOKEN.finditer(text)]  # fmt: skip
        self._position = 0

    def sql(self) -> str:
        """Return the condition as SQL.

        Raises:
            UsageError: it cannot be parsed.
        """
        condition = self._disjunction()
        if self._next_token is not _END:
            raise self._error(f"{self._next_token.text!r} is not understood there")
        return condition

    @property
    def _next_token(self) -> _Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    def _accept(self, *words: str) -> bool:
        is_accepted = self._next_token.is_one_of(*words)
        self._position += is_accepted
        return is_accepted

    def _error(self, reason: str) -> UsageError:
        return UsageError(f"--where {self._text!r}: {reason}; write a condition like {EXAMPLE}")

    def _disjunction(self) -> str:
        return self._joined("or", lambda: self._joined("and", self._operand))

    def _joined(self, word: str, parse: Callable[[], str]) -> str:
        parts = [parse()]
        while self._accept(word):
            parts.append(parse())
        return f"({f' {word.upper()} '.join(parts)})"

    def _operand(self) -> str:
        if self._accept("not"):
            return f"(NOT coalesce({self._operand()}, false))"
        if self._accept("("):
            condition = self._disjunction()
            if not self._accept(")"):
                raise self._error("a parenthesis is not closed")
            return condition
        return self._predicate()

    def _predicate(self) -> str:
        """Parse the comparison of a column with a value, a pattern or null."""
        token = self._next_token
        if token.kind not in ("word", "quoted"):
            raise self._error("a column is missing" if token is _END else f"{token.text!r} is no column")
        self._position += 1
        column = _column(self._relation, self._name, token.text.strip('"'), "--where")
        if self._accept("is"):
            negated = self._accept("not")
            if not self._accept("null"):
                raise self._error("`is` is followed by null or not null")
            return f"({table.quoted(column)} IS {'NOT ' * negated}NULL)"
        negated = self._accept("not")
        mark = self._next_token.text.lower()
        if not self._next_token.is_one_of(*(PATTERNS if negated else (*COMPARISONS, *PATTERNS))):
            raise self._error(f"after {column} a comparison is missing: {' '.join((*COMPARISONS, *PATTERNS))}")
        self._position += 1
        comparison = self._pattern(column, mark) if mark in PATTERNS else self._comparison(column, COMPARISONS[mark])
        return f"(NOT {comparison})" if negated else comparison

    def _value(self) -> str:
        token = self._next_token
        if token.kind not in ("word", "text", "quoted"):
            raise self._error("a value is missing")
        self._position += 1
        return token.text[1:-1].replace("''", "'") if token.kind != "word" else token.text

    def _comparison(self, column: str, mark: str) -> str:
        value, kind = self._value(), self._kinds[column]
        if kind == "number" and not _NUMBER.fullmatch(value):
            raise self._error(f"{column} holds numbers, and {value!r} is none")
        if kind == "boolean" and value.lower() not in _BOOLEANS:
            raise self._error(f"{column} is yes or no, and {value!r} is neither")
        literal = {"number": value, "boolean": _BOOLEANS.get(value.lower(), ""), "text": table.literal(value)}[kind]
        return f"({table.quoted(column)} {mark} {literal})"

    def _pattern(self, column: str, mark: str) -> str:
        pattern = self._value()
        if self._kinds[column] != "text":
            raise self._error(f"{column} holds no text; compare it with < or >")
        if mark == "like":
            return f"({table.quoted(column)} ILIKE {table.literal(pattern)})"
        try:
            duckdb.execute("SELECT regexp_matches('', $1)", [pattern])
        except duckdb.Error:
            raise self._error(f"{pattern!r} is no regular expression") from None
        expression = f"regexp_matches({table.quoted(column)}, {table.literal(pattern)}, 'i')"
        return f"(NOT {expression})" if mark == "!~" else f"({expression})"
