"""Untrusted YAML as plain data: tags create no objects, aliases cannot inflate it, and each value has its line.

Versions, identities and checksums stay text: YAML would turn the version 1.10 into the number 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xsp.errors import ManifestError, first_line
from xsp.plugins import importing

if TYPE_CHECKING:
    from yaml.nodes import Node

MOST_BYTES = 256 << 10
MOST_DEPTH = 40
MOST_VALUES = 10_000
"""Maximum number of values, where each use of an alias counts."""

TEXT_KEYS = re.compile(r"(.*_)?(id|version|checksum|md5|sha1|sha256|commit|hash)")
"""Keys whose values are always text."""

_STANDARD_TAGS = ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")

ValuePath = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


@dataclass(frozen=True)
class Text:
    """The content of a document."""

    content: Any
    name: str
    """Name of the file, for messages."""

    lines: Mapping[ValuePath, int] = field(default_factory=dict)
    """Line of each value, from 1."""

    def location(self, path: ValuePath) -> str:
        """Return file and line of a value, or of the closest enclosing value."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


def read(text: str, name: str) -> Text:
    """Return plain data: mappings with text as keys, lists, text, numbers, true, false and null.

    Args:
        text: one document.
        name: name of its file, for messages.

    Raises:
        ManifestError: it is not YAML, has tags for objects, or is larger, deeper or longer than manifests are.
    """
    yaml = _library()
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        raise ManifestError(f"{name}: larger than {MOST_BYTES >> 10} KiB, the limit for a manifest")
    try:
        _check_depth(yaml, text, name)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ManifestError(f"{name}:{line}: not YAML ({error.problem or error.context})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not YAML ({first_line(error)})") from error
    if node is None:
        raise ManifestError(f"{name}: empty; docs/use/evaluate.md has an example of a manifest")
    converter = _Converter(name)
    return Text(converter.convert(node, (), frozenset()), name, converter.lines)


def write(content: Any) -> str:
    """Return plain data as YAML, keys in their order."""
    yaml = _library()
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))


def _library() -> Any:
    with importing(ManifestError, "manifests need PyYAML and pydantic: pip install 'xsp[evaluate]'"):
        import yaml
    return yaml


def _check_depth(yaml: Any, text: str, name: str) -> None:
    """Refuse documents that are too deep for the recursive readers that follow."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1
        if depth > MOST_DEPTH:
            raise ManifestError(f"{name}:{line}: nested more than {MOST_DEPTH} levels, the limit for a manifest")
        if count > 2 * MOST_VALUES:
            raise ManifestError(f"{name}:{line}: more than {MOST_VALUES:,} values, the limit for a manifest")


class _Converter:
    """Converts nodes to data."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[ValuePath, int] = {}

    def convert(self, node: Node, path: ValuePath, parents: frozenset[int], key: str = "") -> Any:
        self.lines[path] = line = node.start_mark.line + 1
        if len(self.lines) > MOST_VALUES:
            raise ManifestError(
                f"{self.name}:{line}: more than {MOST_VALUES:,} values, counting the targets of aliases"
            )
        if id(node) in parents:
            raise ManifestError(f"{self.name}:{line}: an alias refers to a value that contains it")
        kind = str(node.tag).rpartition(":")[2]
        if not str(node.tag).startswith("tag:yaml.org,2002:") or kind not in _STANDARD_TAGS:
            raise ManifestError(f"{self.name}:{line}: the tag {node.tag!r} is not supported: manifests are plain data")
        ancestors = parents | {id(node)}
        if node.id == "sequence":
            return [self.convert(child, (*path, index), ancestors) for index, child in enumerate(node.value)]
        if node.id == "mapping":
            return self._mapping(node, path, ancestors)
        value = str(node.value)
        if kind == "null":
            return None
        if kind == "bool" and value in (*_TRUE, *_FALSE):  # yes, no, on and off are text here
            return value in _TRUE
        if kind in ("int", "float") and not TEXT_KEYS.fullmatch(key):
            return self._number(node, value, kind)
        return value

    def _mapping(self, node: Node, path: ValuePath, ancestors: frozenset[int]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            location = f"{self.name}:{key.start_mark.line + 1}"
            if key.id != "scalar":
                raise ManifestError(f"{location}: a key is not text")
            if key.tag.endswith(":merge"):
                raise ManifestError(f"{location}: merge keys (<<) are not supported; write the fields out")
            child_path = (*path, key.value)
            converted = self.convert(value, child_path, ancestors, key.value)
            if key.value in mapping and mapping[key.value] != converted:  # published manifests have equal duplicates
                raise ManifestError(f"{location}: {key.value!r} is given twice, with different values")
            mapping[key.value] = converted
            self.lines[child_path] = key.start_mark.line + 1
        return mapping

    def _number(self, node: Node, value: str, kind: str) -> Any:
        """Return the number that a text is, or the text if only YAML 1.1 would read it as one."""
        digits = value.replace("_", "")
        try:
            number: float = int(digits, 0) if kind == "int" else float(digits)
        except ValueError:  # 010, 1:30, .nan: numbers in YAML 1.1 that other readers interpret differently
            return value
        if number in (float("inf"), float("-inf")) or abs(number) > 1e300:
            raise ManifestError(f"{self.name}:{node.start_mark.line + 1}: {value[:20]} is too large a number")
        return number
