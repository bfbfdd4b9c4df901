"""The questions on a device's time: its pieces of advice, computed once and divided among the questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xsp import account
from xsp.advise import device
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere
from xsp.advise.registry import question
from xsp.errors import AnalysisError


def _answer(name: str) -> Callable[[AdviceContext], Iterator[Advice]]:
    def answer(context: AdviceContext) -> Iterator[Advice]:
        trace = context.required_trace
        accounted = account.of(trace)
        main = accounted.job
        if main is None or main.device is None:
            raise CoveredElsewhere(f"{trace.name!r} has no device work")
        blocking = next((doubt for doubt in accounted.doubts if "busy" in doubt.forbids), None)
        if blocking is not None:
            raise AnalysisError(blocking.text)
        found = context.cached("device pieces", lambda: device.pieces(context.answers, accounted, context.known_only))
        step = context.step
        if step is not None:
            yield from (piece.advice(step, main) for piece in found if piece.question == name)

    answer.__qualname__ = name
    return answer


for _name, _title, _number in (
    ("device-idle", "Why do devices wait?", "Q4"),
    ("device-communication", "Which communication does not overlap with computation?", "Q2"),
    ("device-copies", "Which copies do not overlap with computation?", "Q4"),
    ("device-attention", "Is attention fused?", "Q5"),
    ("device-layout", "Do convolutions change layouts?", "Q3"),
    ("device-fusion", "Which kernels could be fused?", "Q5"),
    ("device-tensor-cores", "Do matrix products use tensor cores?", "Q6"),
    ("device-double", "Does a device work in double precision?", "Q6"),
    ("device-gradients", "Are gradients of embeddings dense?", "Q4"),
    ("device-memory", "Is memory of a device returned to the driver and requested again?", "Q4"),
    ("device-roof", "Which kernel is furthest from the device's roofline?", "Q3"),
):
    question(_name, _title, number=_number)(_answer(_name))
