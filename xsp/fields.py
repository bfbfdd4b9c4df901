"""JSON objects whose fields have types: what anybody may have written, taken in so far as it fits.

A field that is not of its type has its default, and is named in `misfits`; a field that nobody knows is kept. Text has
no control character, for it is shown in terminals.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from xsp.scrub import plain

INT64 = 1 << 63

Count = Annotated[int, "not negative, and what a column of the table holds"]
Number = Annotated[float, "finite"]
Id = Annotated[str, re.compile(r"[0-9a-f]{1,32}")]
Names = tuple[str, ...]


class Misfit(ValueError):
    """A value is not of the type that its field has."""


T = TypeVar("T", bound="Fields")


@dataclass(frozen=True, eq=False)
class Fields(Mapping[str, Any]):
    """A JSON object whose known fields are attributes, of their types, and which is a mapping of all that it holds.

    A field that is null, or not there, has its default. One without a default must be there.
    """

    content: Mapping[str, Any] = field(repr=False)
    """As it stands in the file, with fields of other versions and tools, and with those that do not fit."""

    misfits: Names = field(repr=False)
    """Fields that are not of their type, which have their default as attributes, and are no keys."""

    @classmethod
    def of(cls: type[T], content: Mapping[str, Any]) -> T:
        """Return what a JSON object says.

        Raises:
            Misfit: a field that has no default is missing or not of its type.
        """
        if isinstance(content, cls):
            return content
        held = _plain(content)
        values: dict[str, Any] = {}
        wrong = []
        for name, (hint, needed) in _known(cls).items():
            value = held.get(name)
            if value is None and not needed:
                continue
            try:
                values[name] = _taken(hint, value)
            except Misfit:
                if needed or not cls._LENIENT:
                    raise Misfit(name) from None
                wrong.append(name)
        return cls(content=held, misfits=tuple(wrong), **values)

    _LENIENT = False
    """Whether a field that does not fit is left out, instead of the whole object."""

    @property
    def unknown(self) -> Names:
        """Fields that this version does not know: of another one, or of another tool."""
        return tuple(name for name in self.content if name not in _known(type(self)))

    def __getitem__(self, name: str) -> Any:
        if name in self.misfits:
            raise KeyError(name)
        return self.content[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.content if name not in self.misfits)

    def __len__(self) -> int:
        return len(self.content) - len(self.misfits)

    def __or__(self: T, changes: Mapping[str, Any]) -> T:
        """Return the same with other values of some fields, as `run.json` has them."""
        return type(self).of({**self.content, **changes})


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that a column holds, and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < INT64


@cache
def _known(kind: type[Fields]) -> dict[str, tuple[Any, bool]]:
    """Return, by the name in the file, the type of each known field and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: (hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.name not in ("content", "misfits")
    }


def _taken(hint: Any, value: Any) -> Any:
    """Return a JSON value as an attribute of a type.

    Raises:
        Misfit: it is none of that type.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _of_several(inner, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_taken(inner[0], each) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _taken(inner[1], each) for name, each in value.items()}
    if origin is None and issubclass(hint, Fields) and isinstance(value, dict):
        return hint.of(value)
    if _is_single(hint, value):
        return value
    raise Misfit


def _of_several(hints: Iterable[Any], value: Any) -> Any:
    for hint in hints:
        if hint is not type(None):
            try:
                return _taken(hint, value)
            except Misfit:
                continue
        elif value is None:
            return None
    raise Misfit


def _is_single(hint: Any, value: Any) -> bool:
    """Return whether a value is the text, flag, count or number that a type asks for."""
    if hint == Count:
        return is_count(value)
    if hint == Number:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < INT64
    if hint == Id:
        return isinstance(value, str) and Id.__metadata__[0].fullmatch(value) is not None  # type: ignore[attr-defined]
    return hint in (str, bool) and isinstance(value, hint)


def _plain(value: Any) -> Any:
    """Return JSON with all of its texts as a terminal may show them."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Fields):
        return value.content
    if isinstance(value, Mapping):
        return {plain(str(name)): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
