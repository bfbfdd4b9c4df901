"""The levels that are on together: XSP's letters, rungs, how users write them and how xsp shows them.

A **rung** is a set of levels that are on together, named by the deepest of them.
"""

from __future__ import annotations

from xsp.errors import LevelError
from xsp.schema import Level

LETTERS: dict[str, tuple[Level, ...]] = {
    "M": (Level.MODEL,),
    "L": (Level.LAYER, Level.OP),
    "G": (Level.KERNEL,),
}
"""XSP's letters and the rungs that each adds; KERNEL includes LIBRARY and RUNTIME."""

RUNG_NAMES = {
    Level.APPLICATION: "bare", Level.MODEL: "M", Level.LAYER: "M/L", Level.OP: "M/L/op", Level.KERNEL: "M/L/G",
}  # fmt: skip


DEPTHS = {
    Level.APPLICATION: "nothing", Level.MODEL: "steps and calls", Level.LAYER: "layers", Level.OP: "operators",
    Level.LIBRARY: "calls of libraries", Level.RUNTIME: "runtime calls", Level.KERNEL: "kernels",
}  # fmt: skip
"""What a rung records in addition to the rung before it, in words for the user."""


def depth(rung: int | str) -> str:
    """Return in words how deep a rung records; for a third party's rung, return its number.

    Args:
        rung: its deepest level, or its name as `rung_name` returns it.
    """
    if isinstance(rung, str):
        return next((words for level, words in DEPTHS.items() if rung_name(level) == rung), rung)
    return next((words for level, words in DEPTHS.items() if level == rung), str(rung))


def recording(rung: int | str) -> str:
    """Return the name of findings on the steps of a rung: `recording layers`; see `depth`."""
    return f"recording {depth(rung)}"


def rung_name(rung: int) -> str:
    """Return the name of a rung, which `parse_levels` reads: `M`, `M/L`, `M/L/op`, `M/L/op/library`, `M/L/G`.

    The name of a third party's level is its number.
    """
    try:
        level = Level(rung)
    except ValueError:
        return str(rung)
    name = level.name.lower()
    return RUNG_NAMES.get(level, name if level < Level.MODEL else f"{RUNG_NAMES[Level.OP]}/{name}")


def parse_levels(text: str) -> tuple[Level, ...]:
    """Read levels as a user writes them and return the rungs, outermost first.

    Args:
        text: XSP's letters (`M/L/G`) or names of levels (`model/layer/op`), separated by `/`, or the name of a rung,
            `M/L/op`.

    Returns:
        The deepest level of each rung. The first is always `Level.MODEL`.

    Raises:
        LevelError: an unknown level, a repeated level, a wrong order, no MODEL at the front, or not a text.
    """
    if not isinstance(text, str):
        raise LevelError(f"levels {text!r}: write them as one text, levels={_as_text(text)!r}")
    rungs: list[Level] = []
    letter = ""
    for part in map(str.strip, text.split("/")):
        if part.upper() in LETTERS:
            part_levels = LETTERS[part.upper()]
        elif part.upper() in Level.__members__ and part.upper() != "APPLICATION":
            part_levels = (Level[part.upper()],)
        else:
            raise LevelError(f"levels {text!r}: there is no level {part!r}; {_HOWTO}")
        letter, previous = part.upper(), letter
        if previous == "L" and part_levels == (Level.OP,):
            continue  # L includes it
        if rungs and part_levels[0] <= rungs[-1]:
            raise LevelError(f"levels {text!r}: {part!r} is not deeper than the level before it; {_HOWTO}")
        rungs.extend(part_levels)
    if rungs[0] is not Level.MODEL:
        raise LevelError(f"levels {text!r}: they begin with the model level; {_HOWTO}")
    return tuple(rungs)


def _as_text(levels: object) -> str:
    """Return the text for levels that were given as a list; `M/L/G` if the list is not valid."""
    parts = levels if isinstance(levels, (list, tuple)) else ()
    text = "/".join(level.name.lower() if isinstance(level, Level) else str(level) for level in parts)
    try:
        parse_levels(text)
    except LevelError:
        return "M/L/G"
    return text


_HOWTO = "write M, M/L or M/L/G, or names in this order: " + "/".join(
    level.name.lower() for level in Level if level is not Level.APPLICATION
)
