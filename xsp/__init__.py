"""xsp: an across-stack profiler for deep learning that speaks distributed tracing.

>>> import xsp
>>> with xsp.profile("train", out="runs/train") as prof:      # doctest: +SKIP
...     for batch in loader:
...         with prof.step():
...             train_one(batch)
>>> trace = xsp.load("runs/train")                            # doctest: +SKIP
>>> xsp.analyses.A2(trace).show()                             # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xsp.errors import XspError
from xsp.schema import Kind, Level, Rule, Span
from xsp.version import __version__

if TYPE_CHECKING:
    from xsp import analyses, bound, graph
    from xsp.comparison import compare
    from xsp.ingest.load import load
    from xsp.instrumentation.instrument import instrument
    from xsp.record.blocks import span
    from xsp.record.session import profile
    from xsp.store.trace import Trace

__all__ = [
    "Kind",
    "Level",
    "Rule",
    "Span",
    "Trace",
    "XspError",
    "__version__",
    "analyses",
    "bound",
    "compare",
    "graph",
    "instrument",
    "load",
    "profile",
    "span",
]

# Imported on first access: a measured process must not load the table engine, nor a reading process the recorder.
_LAZY = {
    "Trace": "xsp.store.trace",
    "analyses": "xsp.analyses",
    "bound": "xsp.bound",
    "compare": "xsp.comparison",
    "graph": "xsp.graph",
    "instrument": "xsp.instrumentation.instrument",
    "load": "xsp.ingest.load",
    "profile": "xsp.record.session",
    "runs": "xsp.ingest.load",
    "span": "xsp.record.blocks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'xsp' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    attribute = module if name in {"analyses", "bound", "graph", "runs"} else getattr(module, name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted(__all__)
