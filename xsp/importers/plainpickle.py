"""Read pickles that hold plain values only: dictionaries, lists, tuples, texts, bytes and numbers.

A pickle is a program for a small machine. This machine knows only the instructions that such values need; it cannot
import or call anything. Its memory is a small multiple of the content: Python's own reader allocates as many places as
the largest index that a pickle names, and objects of 64 bytes for each byte of it.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

MAX_CONTAINERS = 8_000_000
"""Maximum number of dictionaries, lists and tuples."""

BYTES_PER_CONTAINER = 4
"""Bytes of the content for each container, at least; in a snapshot of memory there are 27."""

FREE_CONTAINERS = 1000
MAX_DEPTH = 100
"""Maximum number of marks, and of tuples within tuples."""

MAX_INTEGER_BYTES = 16

_SCALARS = (str, int, float, bool, bytes, type(None))
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {ord("K"): struct.Struct("<B"), ord("M"): struct.Struct("<H"), ord("J"): struct.Struct("<i"),
            ord("G"): struct.Struct(">d")}  # fmt: skip
_BYTE, _INT, _LONG = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_TEXTS = {0x8C: _BYTE, ord("X"): _INT, 0x8D: _LONG}
_BYTES = {ord("C"): _BYTE, ord("B"): _INT, 0x8E: _LONG}
_PUTS, _GETS = {ord("q"): _BYTE, ord("r"): _INT}, {ord("h"): _BYTE, ord("j"): _INT}
_INTEGERS = {0x8A: _BYTE, 0x8B: _INT}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_IGNORED = {0x80: 2, 0x95: 9}
"""The version, and the length of a frame, with the bytes of these instructions."""


class PickleError(ValueError):
    """A pickle that is damaged, or holds something else; the message says what."""


class Plain:
    """The value of a pickle."""

    def __init__(self, content: bytes) -> None:
        """Read a pickle.

        Raises:
            PickleError: it is damaged, too large for its content, or holds something else than plain values.
        """
        self._content = content
        self._memo: dict[int, Any] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._containers = 0
        self._most_containers = min(MAX_CONTAINERS, FREE_CONTAINERS + len(content) // BYTES_PER_CONTAINER)
        self._nested: dict[int, tuple[int, Any]] = {}
        """Tuples that hold tuples, with their depth, by id."""

        self.instructions = 0
        """Number of instructions; a value that is stated only once takes at least one."""

        try:
            self.value = self._run()
        except (IndexError, KeyError, struct.error) as error:
            raise PickleError(f"it is cut off or damaged ({type(error).__name__})") from error
        except UnicodeDecodeError as error:
            raise PickleError("a text in it is not UTF-8") from error

    def _run(self) -> Any:
        content, stack, memo, place, size = self._content, self._stack, self._memo, 0, len(self._content)
        while True:
            code = content[place]
            place += 1
            self.instructions += 1
            if code in _GETS:
                form = _GETS[code]
                stack.append(memo[form.unpack_from(content, place)[0]])
                place += form.size
            elif code == 0x94:
                memo[len(memo)] = stack[-1]
            elif code in _PUTS:
                form = _PUTS[code]
                memo[form.unpack_from(content, place)[0]] = stack[-1]
                place += form.size
            elif code in _NUMBERS:
                number = _NUMBERS[code]
                stack.append(number.unpack_from(content, place)[0])
                place += number.size
            elif code in _TEXTS or code in _BYTES:
                form = _TEXTS[code] if code in _TEXTS else _BYTES[code]
                start = place + form.size
                place = start + form.unpack_from(content, place)[0]
                if place > size:
                    raise PickleError("it is cut off in a text")
                piece = content[start:place]
                stack.append(str(piece, "utf-8", "surrogatepass") if code in _TEXTS else piece)
            elif code == ord("("):
                if len(self._marks) >= MAX_DEPTH:
                    raise PickleError(f"it is nested more than {MAX_DEPTH} levels deep")
                self._marks.append(len(stack))
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in _INTEGERS:
                form = _INTEGERS[code]
                start = place + form.size
                length = form.unpack_from(content, place)[0]
                place = start + length
                if length > MAX_INTEGER_BYTES or place > size:
                    raise PickleError("an integer in it is too large")
                stack.append(int.from_bytes(content[start:place], "little", signed=True))
            elif code == ord("."):
                return stack[-1]
            elif code in _IGNORED:
                place += _IGNORED[code] - 1
            else:
                self._build(code, place)

    def _build(self, code: int, place: int) -> None:
        """Carry out an instruction that makes or fills a container."""
        stack = self._stack
        if code == ord("s"):
            self._set([stack.pop(-2), stack.pop()])
        elif code == ord("u"):
            self._set(self._since_mark())
        elif code == ord("a"):
            self._extend([stack.pop()])
        elif code == ord("e"):
            self._extend(self._since_mark())
        elif code == ord("}"):
            self._add({})
        elif code == ord("]"):
            self._add([])
        elif code == ord(")"):
            self._add(())
        elif code == ord("t"):
            self._add_tuple(self._since_mark())
        elif code in _TUPLES:
            count = _TUPLES[code]
            if len(stack) < count:
                raise IndexError
            elements = stack[-count:]
            del stack[-count:]
            self._add_tuple(elements)
        elif code == ord("0"):
            stack.pop()
        elif code == ord("1"):
            self._since_mark()
        else:
            self._refuse(code, place)

    def _add(self, container: Any) -> None:
        self._containers += 1
        if self._containers > self._most_containers:
            raise PickleError(f"it makes more than {self._most_containers} lists and dictionaries, too many for it")
        self._stack.append(container)

    def _add_tuple(self, elements: list[Any]) -> None:
        depth = 1 + max((self._depth_of(element) for element in elements), default=0)
        if depth > MAX_DEPTH:
            raise PickleError(f"it is nested more than {MAX_DEPTH} levels deep")
        made = tuple(elements)
        self._add(made)
        if depth > 1:
            self._nested[id(made)] = depth, made  # it lives on, so that its id is not that of another one

    def _depth_of(self, value: Any) -> int:
        return 0 if type(value) is not tuple else self._nested[id(value)][0] if id(value) in self._nested else 1

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise PickleError("it appends to something that is no list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        table = self._stack[-1]
        if type(table) is not dict or len(values) % 2:
            raise PickleError("it sets items of something that is no dictionary")
        for index in range(0, len(values), 2):
            key = values[index]
            # A key is hashed, and hashing goes as deep as the key.
            if not isinstance(key, _SCALARS) and not (type(key) is tuple and all(isinstance(e, _SCALARS) for e in key)):
                raise PickleError(f"a key in it is a {type(key).__name__}")
            table[key] = values[index + 1]

    def _text(self, place: int) -> str:
        value = self._stack[place]
        return value if isinstance(value, str) else "?"

    def _refuse(self, code: int, place: int) -> NoReturn:
        if code in (ord("c"), ord("i")):
            module, name, *_ = [*self._content[place : place + 400].split(b"\n"), b"?"]
            names = module.decode("utf-8", "replace"), name.decode("utf-8", "replace")
        elif code == 0x93:
            names = self._text(-2), self._text(-1)
        elif code in (ord("P"), ord("Q")):
            raise PickleError("it refers to objects outside of the file")
        else:
            raise PickleError(f"it has the instruction {code:#04x}, which plain values do not need")
        named = ".".join(" ".join(name.split())[:80] for name in names)
        raise PickleError(f"it names {named}, which no memory snapshot does")
