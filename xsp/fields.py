"""JSON objects with typed fields, read leniently, because any program may have written them.

A field with a value of another type gets its default and is listed in `misfits`; an unknown field is kept. Control
characters in texts are replaced, because texts are shown in terminals.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from xsp.scrub import plain

INT64_LIMIT = 1 << 63

Count = Annotated[int, "not negative, and what a column of the table holds"]
Number = Annotated[float, "finite"]
Id = Annotated[str, re.compile(r"[0-9a-f]{1,32}")]
Names = tuple[str, ...]


class Misfit(ValueError):
    """A value that is not of the type of its field."""


T = TypeVar("T", bound="Fields")


@dataclass(frozen=True, eq=False)
class Fields(Mapping[str, Any]):
    """A JSON object whose known fields are typed attributes; it is also a mapping of all its fields.

    A field that is null or missing has its default. A field without a default is required.
    """

    content: Mapping[str, Any] = field(repr=False)
    """The object as in the file, including fields of other versions and tools, and fields that do not fit."""

    misfits: Names = field(repr=False)
    """Names of the fields that are not of their type: their attributes have the default, and they are not keys."""

    @classmethod
    def of(cls: type[T], content: Mapping[str, Any]) -> T:
        """Return the typed form of a JSON object.

        Raises:
            Misfit: a required field is missing or not of its type; or, unless the class is lenient, any field is not.
        """
        if isinstance(content, cls):
            return content
        plain_content = _plain(content)
        values: dict[str, Any] = {}
        misfits = []
        for name, (hint, required) in _field_types(cls).items():
            value = plain_content.get(name)
            if value is None and not required:
                continue
            try:
                values[name] = _converted(hint, value)
            except Misfit:
                if required or not cls._LENIENT:
                    raise Misfit(name) from None
                misfits.append(name)
        return cls(content=plain_content, misfits=tuple(misfits), **values)

    _LENIENT = False
    """Whether a field that does not fit is left out, instead of rejecting the whole object."""

    @property
    def unknown(self) -> Names:
        """Names of the fields that this version does not know: from another version or another tool."""
        return tuple(name for name in self.content if name not in _field_types(type(self)))

    def __getitem__(self, name: str) -> Any:
        if name in self.misfits:
            raise KeyError(name)
        return self.content[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.content if name not in self.misfits)

    def __len__(self) -> int:
        return len(self.content) - len(self.misfits)

    def __or__(self: T, changes: Mapping[str, Any]) -> T:
        """Return a copy with other values of some fields, in the form of `run.json`."""
        return type(self).of({**self.content, **changes})


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits into a column."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < INT64_LIMIT


@cache
def _field_types(kind: type[Fields]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each known field and whether it is required, by its name in the file."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        attribute.name: (hints[attribute.name], attribute.default is MISSING and attribute.default_factory is MISSING)
        for attribute in fields(kind)
        if attribute.name not in ("content", "misfits")
    }


def _converted(hint: Any, value: Any) -> Any:
    """Return a JSON value converted to the type of an attribute.

    Raises:
        Misfit: it is not of that type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _converted_union(args, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_converted(args[0], element) for element in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _converted(args[1], element) for name, element in value.items()}
    if origin is None and issubclass(hint, Fields) and isinstance(value, dict):
        return hint.of(value)
    if _is_scalar(hint, value):
        return value
    raise Misfit


def _converted_union(hints: Iterable[Any], value: Any) -> Any:
    for hint in hints:
        if hint is not type(None):
            try:
                return _converted(hint, value)
            except Misfit:
                continue
        elif value is None:
            return None
    raise Misfit


def _is_scalar(hint: Any, value: Any) -> bool:
    """Return whether a value is of a scalar type: text, flag, count, number or id."""
    if hint == Count:
        return is_count(value)
    if hint == Number:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < INT64_LIMIT
    if hint == Id:
        return isinstance(value, str) and Id.__metadata__[0].fullmatch(value) is not None  # type: ignore[attr-defined]
    return hint in (str, bool) and isinstance(value, hint)


def _plain(value: Any) -> Any:
    """Return a JSON value with all its texts made safe for a terminal."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Fields):
        return value.content
    if isinstance(value, Mapping):
        return {plain(str(name)): _plain(element) for name, element in value.items()}
    return [_plain(element) for element in value] if isinstance(value, (list, tuple)) else value
