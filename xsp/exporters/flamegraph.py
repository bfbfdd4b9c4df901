"""A flame graph as an SVG that needs nothing else: time to the right, depth downwards, siblings by their first start.

A click on a frame makes it the whole width, a click on the first row shows all again; without scripts it is a picture.
"""

from __future__ import annotations

import html
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xsp.schema import Level

WIDTH = 1200
"""Pixels that stand for all time."""

NARROWEST = 0.2
"""Pixels; a frame that is narrower is part of the one around it."""

_ROW, _TOP, _LETTER = 18, 44, 6.7
_LONGEST_TITLE = 600
_HUES = {
    Level.APPLICATION: (220, 6), Level.MODEL: (222, 22), Level.LAYER: (214, 62), Level.OP: (158, 42),
    Level.LIBRARY: (84, 42), Level.RUNTIME: (44, 74), Level.KERNEL: (14, 72),
}  # fmt: skip
"""Hue and saturation of each level."""

_SCRIPT = """
const frames = [...document.querySelectorAll('g.f')], letter = 6.7;
function zoom(from, width) {
  for (const g of frames) {
    const x = (g.dataset.x - from) / width * 1200, w = g.dataset.w / width * 1200;
    const left = Math.max(x, 0), right = Math.min(x + w, 1200);
    g.style.display = right - left > 0.05 ? '' : 'none';
    if (right <= left) continue;
    const [rect, text] = [g.querySelector('rect'), g.querySelector('text')];
    const room = Math.floor((right - left - 6) / letter);
    rect.setAttribute('x', left); rect.setAttribute('width', right - left); text.setAttribute('x', left + 3);
    text.textContent = room < 3 ? '' : g.dataset.n.length <= room ? g.dataset.n : g.dataset.n.slice(0, room - 1) + '…';
  }
}
for (const g of frames) g.addEventListener('click', () => zoom(+g.dataset.x, +g.dataset.w));
"""


@dataclass
class Frame:
    """Spans that have the same names above them, as one."""

    name: str
    level: int
    above: int | None
    """Number of the frame around it."""

    own_ns: int = 0
    """Time that was spent in it and in nothing inside it."""

    spans: int = 0


@dataclass
class Drawn:
    """The picture, and how many spans are in frames that it does not show."""

    text: str
    hidden: int


@dataclass
class _Picture:
    frames: Mapping[int, Frame]
    total_ns: dict[int, int]
    inside: dict[int | None, list[int]]
    boxes: list[str] = field(default_factory=list)
    hidden: int = 0
    rows: int = 0


def svg(frames: Mapping[int, Frame], title: str, weight: str) -> Drawn:
    """Draw frames.

    Args:
        frames: by number; each comes after the one around it.
        title: of the picture.
        weight: what the width is.
    """
    total: dict[int, int] = defaultdict(int)
    inside: dict[int | None, list[int]] = defaultdict(list)
    for number, frame in reversed(list(frames.items())):
        total[number] += frame.own_ns
        if frame.above is not None:
            total[frame.above] += total[number]
        inside[frame.above].insert(0, number)
    picture = _Picture(frames, total, inside)
    everything = sum(total[number] for number in inside[None])
    scale = WIDTH / max(everything, 1)
    picture.boxes.append(_box("all", 0, 0, WIDTH, "#d7dbe4", f"all: {_ms(everything)}"))
    _draw(picture, scale)
    height = _TOP + _ROW * (picture.rows + 1) + 8
    heading = f"{title}: {weight}, {_ms(everything)}"
    return Drawn("".join(_page(heading, height, picture.boxes)), picture.hidden)


def _draw(picture: _Picture, scale: float) -> None:
    """Draw what can be seen, and count what cannot."""
    pending: list[tuple[int | None, int, float]] = [(None, 1, 0.0)]
    while pending:
        above, row, x = pending.pop()
        for number in picture.inside[above]:
            frame, width = picture.frames[number], picture.total_ns[number] * scale
            if width < NARROWEST:
                picture.hidden += _spans_in(picture, number)
                continue
            picture.rows = max(picture.rows, row)
            picture.boxes.append(_box(frame.name, row, x, width, _colour(frame), _about(picture, number, scale)))
            pending.append((number, row + 1, x))
            x += width


def _spans_in(picture: _Picture, number: int) -> int:
    """Count the spans of a frame and of those inside it; what took no time at all cannot be narrow."""
    found, pending = 0, [number]
    while pending:
        here = pending.pop()
        found += picture.frames[here].spans if picture.total_ns[here] else 0
        pending += picture.inside[here]
    return found


def _about(picture: _Picture, number: int, scale: float) -> str:
    frame, total = picture.frames[number], picture.total_ns[number]
    own = f", {_ms(frame.own_ns)} of it its own" if frame.own_ns != total else ""
    return f"{frame.name[:_LONGEST_TITLE]}\n{_ms(total)}, {total * scale / WIDTH:.1%}{own}; {frame.spans:,} spans"


def _box(name: str, row: int, x: float, width: float, colour: str, about: str) -> str:
    room = int((width - 6) / _LETTER)
    label = "" if room < 3 else name if len(name) <= room else name[: room - 1] + "…"
    y = _TOP + row * _ROW
    return (
        f'<g class="f" data-x="{x:.3f}" data-w="{width:.3f}" data-n="{_safe(name[:_LONGEST_TITLE])}">'
        f"<title>{_safe(about)}</title>"
        f'<rect x="{x:.3f}" y="{y}" width="{width:.3f}" height="{_ROW - 1}" fill="{colour}"/>'
        f'<text x="{x + 3:.1f}" y="{y + 13}">{_safe(label)}</text></g>\n'
    )


def _colour(frame: Frame) -> str:
    """Return a level's colour, a little lighter or darker by the name, so that neighbours differ."""
    hue, saturation = _HUES.get(Level(frame.level), (280, 30)) if frame.level in set(Level) else (280, 30)
    return f"hsl({hue},{saturation}%,{66 + zlib.crc32(frame.name.encode()) % 14}%)"


def _page(heading: str, height: int, boxes: list[str]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="ui-monospace, monospace" font-size="11">\n'
        "<style>g.f{cursor:pointer} g.f:hover rect{stroke:#1c2330;stroke-width:1}</style>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n<text x="3" y="18" font-size="15">{_safe(heading)}</text>\n'
        '<text x="3" y="35" fill="#5d6780">colour: model grey, layer blue, operator green, library olive, runtime '
        "yellow, device red; click to zoom</text>\n"
    )
    yield from boxes
    yield f"<script><![CDATA[{_SCRIPT}]]></script>\n</svg>\n"


def _safe(text: str) -> str:
    """Return text that XML can hold."""
    return html.escape("".join(letter if letter >= " " or letter == "\n" else "?" for letter in text))


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"
