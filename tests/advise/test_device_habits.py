"""What programs do wrong on a device, each by its own evidence and in words of its own."""

from __future__ import annotations

import pytest
from asking import device_advice_of

from xsp import account
from xsp.advise import waits
from xsp.advise.advice import Advice
from xsp.callnames import REQUESTS_MEMORY, RETURNS_MEMORY
from xsp.device import kernelnames
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def bounded(pieces: list[Advice], trace: Trace) -> None:
    main = account.of(trace).main
    assert main is not None
    for piece in pieces:
        assert piece.gain.high <= main.bound_ms(piece.side, 1e9) + 1e-9


def drained(inside: str, copy: str | None = None) -> Trace:
    """Return a step in which the host waits ten times for the device and then issues the next kernel.

    `inside` is the operator that waits (with a copy of a name, if one is given); empty for a call of synchronize().
    """
    rows, at, number = ["step s 0-6000", "module net.block 5-5990 type=Block"], 10, 0
    for _ in range(10):
        number += 2
        rows += [
            f"launch cudaLaunchKernel {at}-{at + 5} correlation_id={number}",
            f"kernel sgemm {at + 10}-{at + 110} correlation_id={number}",
        ]
        if inside:
            rows.append(f"op {inside} {at + 20}-{at + 130}")
        if copy:
            rows += [
                f"launch cudaMemcpyAsync {at + 22}-{at + 25} correlation_id={number + 1}",
                f"copy {copy.replace(' ', '_')} {at + 112}-{at + 114} correlation_id={number + 1}",
            ]
        rows.append(f"sync cudaStreamSynchronize {at + 26}-{at + 120}")
        at += 500
    return trace_of(spans("\n".join(rows)))


@pytest.mark.parametrize(
    ("inside", "copy", "what", "do"),
    [
        ("", None, "the program calls synchronize() (10 times, in net.block", "from hooks, timers and loops"),
        ("aten::_local_scalar_dense", None, "single values are read (10 times", "read them together and once"),
        ("aten::nonzero", None, "have a size that depends on values", "torch.where(mask, x, 0)"),
        ("aten::copy_", "Memcpy DtoH", "results are copied to the host (10 times", "into pinned memory"),
        ("aten::copy_", "Memcpy HtoD", "inputs are copied to the device and waited for", "pin_memory=True"),
    ],
)
def test_what_the_host_waited_for_is_named(inside: str, copy: str | None, what: str, do: str) -> None:
    trace = drained(inside, copy)
    pieces = [piece for piece in device_advice_of(trace) if "the host had waited for it" in piece.what]
    assert len(pieces) == 1
    assert what in pieces[0].what
    assert do in pieces[0].do
    assert pieces[0].side == "host"
    bounded(pieces, trace)


def test_waits_of_several_causes_share_the_idle_time() -> None:
    text = ["step s 0-9000"]
    for place, (op, wait) in enumerate((("aten::nonzero", 300), ("", 200)) * 4):
        at = 10 + 1000 * place
        text += [
            f"launch cudaLaunchKernel {at}-{at + 5} correlation_id={place + 1}",
            f"kernel sgemm {at + 10}-{at + 15 + wait} correlation_id={place + 1}",
            *([f"op {op} {at + 12}-{at + 30 + wait}"] if op else []),
            f"sync cudaStreamSynchronize {at + 20}-{at + 20 + wait}",
        ]
    trace = trace_of(spans("\n".join(text)))
    pieces = [piece for piece in device_advice_of(trace) if "the host had waited for it" in piece.what]
    assert [("x[mask]" in piece.what, "synchronize()" in piece.what) for piece in pieces] == [
        (True, False), (False, True),
    ]  # fmt: skip
    device = account.of(trace).main.device
    assert sum(piece.gain.value for piece in pieces) <= device.ms(account.entries.DRAINED) + 1e-9
    assert pieces[0].gain.value == pytest.approx(1.5 * pieces[1].gain.value, rel=0.01)


def test_the_texts_of_waits_have_a_place_for_each_cause() -> None:
    for cause in waits.WORDS:
        what, do = waits.words(waits.Wait(cause, 8, 1.0, ()), 2)
        assert "{" not in what + do
        assert "4 times" in what


def churn(steps: int, frees: bool) -> Trace:
    text = []
    for step in range(steps):
        at = step * 5000
        text.append(f"step s {at}-{at + 4000} step={step}")
        text.append(f"launch cudaLaunchKernel {at + 2010}-{at + 2015} step={step} correlation_id={step + 1}")
        text.append(f"kernel sgemm {at + 2020}-{at + 2200} step={step} correlation_id={step + 1}")
        for place in range(3):
            begin = at + 100 + 300 * place
            text.append(f"call cudaMalloc {begin}-{begin + 150} level=60 thread=1 step={step}")
            if frees:
                text.append(f"call cudaFree {begin + 150}-{begin + 280} level=60 thread=1 step={step}")
    return trace_of(spans("\n".join(text)))


def test_memory_that_goes_back_to_the_driver_in_each_iteration_is_named() -> None:
    trace = churn(3, True)
    (piece,) = [piece for piece in device_advice_of(trace) if piece.question == "device-memory"]
    assert "3 × free, 3 × malloc" in piece.what
    assert "torch.cuda.empty_cache()" in piece.do
    assert piece.gain.value <= 3 * (150 + 130) / 1e3 + 1e-9
    bounded([piece], trace)
    for other in (churn(3, False), churn(1, True)):  # a warm-up requests, and returns nothing
        assert not [piece for piece in device_advice_of(other) if piece.question == "device-memory"]


def work(op: str, kernel: str, dtype: str = "float") -> Trace:
    """Return a step in which the device is busy with one operator, launched early."""
    return trace_of(
        spans(
            f"step s 0-20\nop {op} 1-9 dtype={dtype}\nlaunch cudaLaunchKernel 2-3 correlation_id=1\n"
            f"kernel {kernel} 5-905 correlation_id=1"
        )
    )


def test_double_precision_and_dense_gradients_on_a_device_are_named_with_bounds() -> None:
    for trace, question, share in (
        (work("aten::mm", "void_gemm_kernel", "double"), "device-double", 0.5),
        (work("aten::add", "vectorized_elementwise_kernel_double"), "device-double", 0.5),
        (work("aten::embedding_dense_backward", "embedding_backward_kernel"), "device-gradients", 1.0),
    ):
        (piece,) = [piece for piece in device_advice_of(trace) if piece.question == question]
        assert piece.at_most
        assert piece.gain.value <= share * 0.9 + 1e-9
        assert piece.gain.value > 0
        bounded([piece], trace)
    quiet = device_advice_of(work("aten::mm", "ampere_sgemm_128x64"))
    assert not [piece for piece in quiet if piece.question in ("device-double", "device-gradients")]


def test_directions_of_copies_and_calls_for_memory_are_told_by_name() -> None:
    import re

    import duckdb

    for name, to_host, to_device in (
        ("Memcpy DtoH (Device -> Pageable)", True, False), ("Memcpy HtoD (Pinned -> Device)", False, True),
        ("CopyDeviceToHost", True, False), ("CopyHostToDevice", False, True), ("Memcpy DtoD", False, False),
    ):  # fmt: skip
        assert bool(re.search(kernelnames.TO_HOST, name)) is to_host, name
        assert bool(re.search(kernelnames.TO_DEVICE, name)) is to_device, name
    con = duckdb.connect()
    for name, expected in (
        ("cudaMalloc", (True, False)), ("cuMemAlloc_v2", (True, False)), ("cudaMallocAsync", (True, False)),
        ("hipFree", (False, True)), ("cudaFreeAsync", (False, True)), ("cudaLaunchKernel", (False, False)),
        ("cudaHostAlloc", (False, False)),
    ):  # fmt: skip
        found = con.execute(f"SELECT {REQUESTS_MEMORY}, {RETURNS_MEMORY} FROM (SELECT ? AS name)", [name]).fetchone()
        assert found == expected, name
