"""Removable work: calls that a step could omit without a change of its results."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.advise import Advice, AdviceContext, Needs, question
from xsp.graph.rewrite import RuleChange
from xsp.questions.rewriting import Gain, Prices

RULES = ("dead", "equal", "cast", "copy", "loop")


@question("removable", "Which calls can be removed?", number="Q4", needs=Needs.BOUND)
def removable(context: AdviceContext) -> Iterator[Advice]:
    """Calls whose results are not read, that recompute existing values, that copy or cast without need, and calls on
    the samples of a batch one by one. The gain is their time minus that of their replacement.

    A loop over samples in a trace is left to the question `samples` if the call on the whole batch is not timed."""
    prices: Prices = context.part("prices")
    for gain in prices.gains(RULES):
        if gain.at_most and gain.changes[0].rule == "loop" and context.trace is not None:
            continue
        yield prices.advice("removable", gain, problem_text(gain), remedy_text(gain.changes[0]))


def problem_text(gain: Gain) -> str:
    """Return the problem in one line."""
    first, count = gain.changes[0], len(gain.changes)
    text = first.description if count == 1 else f"{first.description}, {count} times"
    location = _location(first)
    return f"{location}: {text}" if location else text


def _location(change: RuleChange) -> str:
    """Return the module that contains all of a change, with the number of its call; empty for the outermost one."""
    if not change.modules:
        return ""
    paths = [module.split(".") for module in change.modules]
    if change.rule == "loop":  # each sample is another call of the same modules
        shared_parts = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        return ".".join(shared_parts)
    path, _, turn = change.modules[0].partition("#")
    return f"{path}, call {turn}" if turn else path


def remedy_text(change: RuleChange) -> str:
    """Return the change to make in the program."""
    location = f" in the forward of {_location(change).partition(',')[0]}" if _location(change) else ""
    if change.rule == "dead":
        return f"delete its computation{location}, or do not request it (need_weights=False, output_attentions=False)"
    if change.rule == "equal":
        return f"compute it once{location} and keep it: y = layer(x), then use y in both places"
    if change.rule == "cast":
        note = "" if change.changes_numbers is None else "; compare results, which are then computed in another type"
        return f"delete the casts (.double(), .float(), .to(dtype)){location}{note}"
    if change.rule == "copy":
        return f"delete the copy (.clone(), .contiguous(), F.pad by 0, torch.cat of one){location}"
    return f"call it once on the whole batch{location}: y = f(x) instead of torch.stack([f(each) for each in x])"
