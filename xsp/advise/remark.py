"""What is said at the end of a run: the best piece of advice that the trace alone tells."""

from __future__ import annotations

import textwrap

from xsp.advise import advisor
from xsp.advise.advice import Advice, Needs
from xsp.advise.text import WIDTH, a_step
from xsp.errors import XspError
from xsp.record.output import shown
from xsp.scrub import plain
from xsp.store.trace import Trace

MOST_SPANS = 200_000
"""Of a run with more nothing is asked: the questions read all spans, about 0.1 s of CPU for 20,000."""


def remark(trace: Trace) -> str | None:
    """Return the piece of advice that gains most and needs no trial, what to do, and what to type for the rest.

    Returns:
        None if nothing is wrong, as far as the trace tells; a line that says so where the run is too large to be asked.
    """
    where = shown(trace.path) if trace.path is not None else trace.name
    ((spans,),) = trace.con.execute("SELECT count(*) FROM spans").fetchall()
    if spans > MOST_SPANS:
        return f"advice: not looked for among {spans:,} spans; xsp advise {where} does"
    try:
        found = advisor.of(trace, most=Needs.TRACE)
    except XspError:
        return None
    faults = [piece for piece in found.advice if piece.gain_known and not piece.option]
    if not faults:
        return None
    return _lines(faults[0], a_step(found.step), f"xsp advise {where}", len(found.advice) - 1)


def _lines(piece: Advice, whole: str, command: str, others: int) -> str:
    gain = f"{'at most' if piece.at_most else 'about'} {piece.of_step_percent:.0f} % of {whole}"
    more = f" and {others} more piece{'s' * (others > 1)}" if others else ""
    text = f"advice: {plain(piece.what)}. What helps, by {gain}: {plain(piece.do)}."
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="        ", break_on_hyphens=False)
    return "\n".join([*wrapped, f"        why, where{more}: {command}"])
