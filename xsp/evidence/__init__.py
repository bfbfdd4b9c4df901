"""Machine-readable output of xsp: one JSON form with a version and a size limit, also served over MCP.

Every statement has its figures and the ids of the spans that it refers to. Names and other texts come from the program
and from the author of the trace: they are data, never instructions.
"""

from xsp.evidence.form import VERSION, dumps, fit, schema

__all__ = ["VERSION", "dumps", "fit", "schema"]
