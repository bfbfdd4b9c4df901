"""Advice on a device's kernels themselves: attention, layouts, fusion, tensor cores, distance to the roof."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xsp.advise.advice import Place
from xsp.advise.device import Features, Piece, Row, places
from xsp.analyses.answers import Answers
from xsp.analyses.fusing import BATCHED, BETWEEN, EAGER, SOFTMAX
from xsp.device import ceilings
from xsp.device.kernelnames import DOUBLE, MATRIX
from xsp.errors import XspError
from xsp.schema import Kind
from xsp.table import literal
from xsp.texts import cut, ms_text

PRECISION_NOTE = "TF32 and FP16 keep 10 bits of the mantissa, BF16 keeps 7; FP16 ends at 65,504: scale gradients"

CONVOLUTION = r"conv(olution|_|[123]d)"
"""Pattern for operators whose kernels come from a library: torch.compile cannot fuse their memory-bound kernels."""

CONVOLUTION_CLASS = "convolution"
"""Class of the kernels of convolutions."""

LAYOUT_KERNEL = r"nchwToNhwc|nhwcToNchw|NCHW2|CNHW2|batched_transpose_[0-9]"
"""Pattern for kernels with which cuDNN and MIOpen change the layout of tensors."""


def pieces(
    answers: Answers, iterations: int, features: Features, known_only: bool = False, subject: str = "an iteration"
) -> Iterator[Piece]:
    """Yield the changes that help the kernels themselves.

    Args:
        answers: tables of the trace.
        iterations: recorded iterations of all devices together.
        features: what the program does already.
        known_only: leave out the changes whose gain is not known.
        subject: what times are of, in a sentence.
    """

    def share(ms: float) -> float:
        return float(ms) / iterations

    attention = [row for row in answers["attention"].dicts() if row["form"] == EAGER]
    if attention:
        percent = sum(row["percent_of_device_time"] for row in attention)
        saved_ms = sum(row["device_ms"] for row in attention if row["part"] in (SOFTMAX, BETWEEN))
        yield Piece(
            "device-attention",
            f"eager attention, {percent:.0f} % of GPU time, {ms_text(share(saved_ms))} of {subject} softmax and the "
            "operators between the products",
            "scaled_dot_product_attention or FlashAttention does not write the scores",
            share(saved_ms),
            "device",
            _attention_places(answers, f"part IN ({literal(SOFTMAX)}, {literal(BETWEEN)})"),
        )
    yield from _layouts(answers, share)
    yield from _fusible(answers, share, features, subject)
    yield from _without_tensor_cores(answers, share)
    yield from _in_double(answers, share, subject)
    yield from _dense_gradients(answers, share, subject)
    if not known_only:
        yield from _below_the_roof(answers, share, BATCHED if attention else ())


SINGLE_PRECISION = r"sgemm|f32f32|ffma|simt|_fp32|float32"
"""Pattern for kernels of matrix products in single precision."""


def _has_tf32(answers: Answers) -> bool:
    """Return whether the device multiplies in TF32: it is quoted for it, or of compute capability 8.0 or later."""
    machine = answers.trace.run.machine
    try:
        return "tf32" in ceilings.of_run(answers.trace.run, True).tensor
    except XspError:
        computes = [device.compute for device in machine.device_properties if device.compute]
        return any(float(compute) >= 8 for compute in computes if re.fullmatch(r"\d+(\.\d+)?", compute))


def _without_tensor_cores(answers: Answers, share: Callable[[float], float]) -> Iterator[Piece]:
    """Yield advice on products that do without tensor cores: of float32 in TF32, where the device has it."""
    for row in answers.classes():
        slow_ms = row["without_tensor_cores_ms"] or 0.0
        if row["class"] not in MATRIX or slow_ms <= (row["with_tensor_cores_ms"] or 0.0):
            continue
        condition = f"w.class = {literal(row['class'])} AND w.tensor_cores IS DISTINCT FROM 'yes'"
        ((single_ms,),) = answers.trace.con.execute(
            f"SELECT coalesce(sum(w.dur_ns), 0) / 1e6 FROM device_work w LEFT JOIN spans op ON op.rank = w.rank "
            f"AND op.trace_id = w.trace_id AND op.span_id = w.op_id WHERE {condition} "
            f"AND (op.dtype = 'float' OR regexp_matches(w.name, {literal(SINGLE_PRECISION)}, 'i'))"
        ).fetchall()
        what = (
            f"{row['class']}, {row['percent_of_device_time']:.0f} % of GPU time, {ms_text(share(slow_ms))} of an "
            "iteration without tensor cores"
        )
        do = "lower precision (BF16, FP16), sizes in multiples of 8; `tensor-cores` names the layers"
        if 2 * single_ms > slow_ms and _has_tf32(answers):
            what += ": float32 without TF32"
            setting = (
                "torch.backends.cudnn.allow_tf32 = True"
                if row["class"] == CONVOLUTION_CLASS
                else 'torch.set_float32_matmul_precision("high")'
            )
            do = f"{setting} allows TF32; or torch.autocast in bfloat16; `tensor-cores` names the layers"
        yield Piece(
            "device-tensor-cores", what, do, share(slow_ms), "device", places(answers.trace, condition), PRECISION_NOTE
        )


DOUBLE_RATIO = 2.0
"""Least ratio of the time in double to that in single precision: of the bytes, and of peak rates where they are
unknown."""


def _in_double(answers: Answers, share: Callable[[float], float], subject: str) -> Iterator[Piece]:
    """Yield advice on device work in double precision; single precision takes at best the inverse of the peak rates."""
    condition = f"(op.dtype IN ('double', 'float64') OR regexp_matches(w.name, {literal(DOUBLE)}))"
    rows = answers.trace.con.execute(
        f"SELECT w.class, sum(w.dur_ns) / 1e6 FROM device_work w LEFT JOIN spans op ON op.rank = w.rank "
        f"AND op.trace_id = w.trace_id AND op.span_id = w.op_id WHERE w.kind = '{Kind.KERNEL}' AND {condition} "
        "GROUP BY ALL"
    ).fetchall()
    if not rows:
        return
    ratio = DOUBLE_RATIO
    with contextlib.suppress(XspError):
        rates = ceilings.of_run(answers.trace.run, True).vector
        ratio = max(ratio, rates.get("fp32", 0.0) / (rates.get("fp64") or math.inf))
    ms = math.fsum(ms for _, ms in rows)
    saved_ms = math.fsum(ms * (1 - 1 / (ratio if kind in MATRIX else DOUBLE_RATIO)) for kind, ms in rows)
    yield Piece(
        "device-double",
        f"double precision: {ms_text(share(ms))} of {subject} on the device",
        "omit .double() and dtype=torch.float64; NumPy arrays are doubles: torch.from_numpy(x).float()",
        share(saved_ms),
        "device",
        places(answers.trace, condition),
        "24 bits of mantissa instead of 53",
    )


def _dense_gradients(answers: Answers, share: Callable[[float], float], subject: str) -> Iterator[Piece]:
    """Yield advice on gradients of embeddings that are dense: all rows are written, of which few were read."""
    condition = (
        "op.name IN ('aten::embedding_dense_backward', 'aten::embedding_backward', "
        "'aten::_embedding_bag_dense_backward')"
    )
    ((ms,),) = answers.trace.con.execute(
        "SELECT coalesce(sum(w.dur_ns), 0) / 1e6 FROM device_work w JOIN spans op ON op.rank = w.rank AND "
        f"op.trace_id = w.trace_id AND (op.span_id = w.op_id OR op.span_id = w.parent_id) WHERE {condition}"
    ).fetchall()
    if ms:
        yield Piece(
            "device-gradients",
            f"gradients of embeddings are dense, {ms_text(share(ms))} of {subject}: all rows of the table are written",
            "torch.nn.Embedding(..., sparse=True) with SparseAdam or SGD, if a step reads few rows; its optimizer then "
            "updates only these",
            share(ms),
            "device",
            places(answers.trace, condition),
        )


def _attention_places(answers: Answers, condition: str) -> tuple[Place, ...]:
    """Return the operators that take most time in `kernel_parts`, a table that the analysis of attention creates."""
    rows = answers.trace.con.execute(
        f"SELECT op, count(*) FROM kernel_parts WHERE {condition} GROUP BY op ORDER BY sum(dur_ns) DESC, op LIMIT 3"
    ).fetchall()
    return tuple(Place(None, op, (), count) for op, count in rows if op)


def _layouts(answers: Answers, share: Callable[[float], float]) -> Iterator[Piece]:
    """Yield advice on the time that convolutions take to change the layout of their inputs and outputs."""
    condition = f"regexp_matches(w.name, {literal(LAYOUT_KERNEL)}) AND w.class = 'copy'"
    ((ms, count),) = answers.trace.con.execute(
        f"SELECT coalesce(sum(w.dur_ns), 0) / 1e6, count(*) FROM device_work w WHERE {condition}"
    ).fetchall()
    if not count:
        return
    total_ms = sum(row["device_ms"] for row in answers.classes())
    yield Piece(
        "device-layout",
        f"{count:,} changes of layout around convolutions, {100 * ms / total_ms:.0f} % of GPU time",
        "keep channels last: model and input .to(memory_format=torch.channels_last); with MIOpen, PyTorch may need "
        "PYTORCH_MIOPEN_SUGGEST_NHWC=1 as well",
        share(ms),
        "device",
        places(answers.trace, condition),
        is_certain=True,
    )


def _fusible(answers: Answers, share: Callable[[float], float], features: Features, subject: str) -> Iterator[Piece]:
    fusible = [row for row in answers["fusible"].dicts() if not re.search(CONVOLUTION, row["op"] or "")]
    saved_ms, chained_ms = (sum(row[name] or 0.0 for row in fusible) for name in ("saved_ms", "chained_ms"))
    if not saved_ms:
        return
    largest = _by_op([row for row in fusible if row["chained_ms"]])[:3]
    listing = ", ".join(cut(row["op"] or row["class"], 30) for row in largest)
    hint = "it is compiled already: look for what is not (graph breaks)" if features.is_compiled else "torch.compile"
    yield Piece(
        "device-fusion",
        f"chains of elementwise kernels, {ms_text(share(chained_ms))} of {subject} ({listing}): fused they would "
        f"still take {ms_text(share(chained_ms - saved_ms))} to read and write their tensors once",
        f"fuse them; {hint}",
        share(saved_ms),
        "device",
        tuple(Place(None, row["op"], (), row["kernels"]) for row in largest if row["op"]),
    )


def _below_the_roof(answers: Answers, share: Callable[[float], float], excluded: Sequence[str] = ()) -> Iterator[Piece]:
    """Yield the operators with the largest gain if their kernels ran at the roof of the device for their intensity."""
    rows = [
        row
        for row in answers["ops"].dicts()
        if row["device_ms"] and row["tflop_per_s"] and row["percent_of_device_time"] is not None
        if row["roof_percent"] is not None and row["roof_percent"] < 100 and row["name"] not in excluded
        if row["device"] is None
    ]
    total_ms = float(sum(row["device_ms"] for row in answers.classes()))

    def lost_ms(row: Row) -> float:
        return float(row["percent_of_device_time"]) / 100 * total_ms * (1 - float(row["roof_percent"]) / 100)

    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    worst = sorted(by_name.items(), key=lambda item: -sum(map(lost_ms, item[1])))[:_MOST_ROOFS]
    for name, group in worst:
        worst_row = max(group, key=lost_ms)
        shapes = f" {cut(str(worst_row['shapes']), 40)}" if worst_row["shapes"] else ""
        more_text = f" and {len(group) - 1} more shapes" if len(group) > 1 else ""
        percent = sum(row["percent_of_device_time"] for row in group)
        ms = sum(map(lost_ms, group))
        reached_percent = 100 * (1 - ms / (percent / 100 * total_ms)) if percent else 0.0
        yield Piece(
            "device-roof",
            f"{name}{shapes}{more_text}, {percent:.0f} % of GPU time, runs at {reached_percent:.0f} % of the "
            "device's roofline",
            "sizes, layout or another kernel; `ops` has the rates",
            share(ms),
            "device",
            (Place(None, name, (), sum(row["calls"] or 0 for row in group) or None),),
            gain_known=False,
        )


_MOST_ROOFS = 2
"""Maximum number of operators that are listed for their distance to the roof."""


def _by_op(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `fusible` summed by operator, the largest percentage first."""
    sums: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for row in rows:
        total = sums.setdefault(
            (row["op"], None if row["op"] else row["class"]), {**row, "percent_of_device_time": 0.0, "kernels": 0}
        )
        total["percent_of_device_time"] += row["percent_of_device_time"]
        total["kernels"] += row["kernels"]
    return sorted(sums.values(), key=lambda row: -row["percent_of_device_time"])
