"""The advice printed at the end of a run: the best piece that the trace alone supports."""

from __future__ import annotations

import shlex
import textwrap

from xsp.advise import advisor
from xsp.advise.advice import Advice, Needs
from xsp.advise.text import WIDTH, a_step
from xsp.errors import XspError
from xsp.record.output import display_path
from xsp.scrub import plain
from xsp.store.trace import Trace

MOST_SPANS = 200_000
"""Maximum number of spans of a run for questions to be asked: they read all spans, about 0.1 s of CPU for 20,000."""


def remark(trace: Trace) -> str | None:
    """Return the piece of advice that gains most and needs no trial, what to do, and the command that shows the rest.

    Returns:
        None if the trace shows no flaw; a line that names the command if the run has too many spans to be searched.
    """
    source = shlex.quote(display_path(trace.path) if trace.path is not None else trace.name)
    ((span_count,),) = trace.con.execute("SELECT count(*) FROM spans").fetchall()
    if span_count > MOST_SPANS:
        return f"advice: not searched for among {span_count:,} spans; xsp advise {source} does"
    try:
        result = advisor.of(trace, max_needs=Needs.TRACE)
    except XspError:
        return None
    faults = [piece for piece in result.advice if piece.gain_known and not piece.option]
    if not faults:
        return None
    return _lines(faults[0], a_step(result.step), f"xsp advise {source}", len(result.advice) - 1)


def _lines(piece: Advice, unit: str, command: str, more_count: int) -> str:
    gain = f"{'at most' if piece.at_most else 'about'} {piece.of_step_percent:.0f} % of {unit}"
    more_text = f" and {more_count} more piece{'s' * (more_count > 1)}" if more_count else ""
    text = f"advice: {plain(piece.what)}. To save {gain}: {plain(piece.do)}."
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="        ", break_on_hyphens=False)
    return "\n".join([*wrapped, f"        why, where{more_text}: {command}"])
