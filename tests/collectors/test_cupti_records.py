"""CUPTI's records become spans: fabricated ones, as plain objects and of cupti-python's own classes."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakecupti import (
    DRIVER,
    END,
    KERNEL,
    MARKER,
    MEMCPY,
    MEMSET,
    OVERHEAD,
    RUNTIME,
    START,
    SYNCHRONIZATION,
    FakeCupti,
    FakeLibcupti,
    packed,
    record,
)

from xsp.correlate.evidence import correlate
from xsp.schema import Level, Span, spans_of
from xsp.testing import spans, tree
from xsp_collectors.cuda import calls, recordbuffers
from xsp_collectors.cuda.activities import Activity, ApiCall, Table
from xsp_collectors.cuda.cupti import CuptiActivities, ThreadNumbers
from xsp_collectors.cuda.libcupti import find_library
from xsp_collectors.cuda.recordobjects import RecordObjects


@pytest.fixture(params=["plain objects", "cupti-python"])
def binding(request: pytest.FixtureRequest) -> Any:
    if request.param == "plain objects":
        return None
    return pytest.importorskip("cupti.cupti", reason="cupti-python is not installed: its own classes are not read")


FORM = ["objects"]
"""How `decoded` delivers plain records."""


@pytest.fixture(params=["objects", "buffers"], autouse=True)
def form(request: pytest.FixtureRequest) -> Any:
    FORM[0] = request.param
    yield
    FORM[0] = "objects"


objects_only = pytest.mark.parametrize("form", ["objects"], indirect=True)
buffers_only = pytest.mark.parametrize("form", ["buffers"], indirect=True)


def decoded(records: list[Any], collector: CuptiActivities | None = None) -> list[Span]:
    """Feed records through the callback of a collector that stopped at 1 ms, and return the spans."""
    collector = collector or CuptiActivities()
    collector._names = type(collector._names)(FakeCupti())
    collector._stopped_ns = 1_000_000
    if FORM[0] == "buffers" and all(type(each) is SimpleNamespace for each in records):
        library = FakeLibcupti()
        collector._records = buffers(library)
        half = len(records) // 2
        for part in (records[:half], records[half:]):  # the second buffer continues the first
            library.deliver(b"".join(map(packed, part)))
    else:
        collector._records.complete(records)
    return [span._replace(process=1) for span in collector.spans()]


def buffers(library: FakeLibcupti) -> recordbuffers.RecordBuffers:
    """Return the buffers of a library, registered with it."""
    made = recordbuffers.of_loaded(library)
    assert made is not None
    made.register(None)
    return made


def launch(correlation: int, start: int, thread: int = 1, kind: int = RUNTIME, **fields: Any) -> Any:
    number = 211 if kind == RUNTIME else 307
    return record(
        kind, thread, start=start, end=start + 2000, cbid=number, correlation_id=correlation, **fields
    )  # fmt: skip


def kernel(correlation: int, start: int, name: str = "relu", **fields: Any) -> Any:
    return record(KERNEL, start=start, end=start + 10_000, correlation_id=correlation, name=name, **fields)


def test_a_librarys_own_buffers_are_read_only_where_they_are_asked_for(monkeypatch, tmp_path):
    loaded: list[str] = []
    of_c = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(path) or FakeLibcupti() if path else of_c(path))
    monkeypatch.delenv(recordbuffers.CHOICE, raising=False)
    assert recordbuffers.of_library(tmp_path) is None
    assert not loaded
    monkeypatch.setenv(recordbuffers.CHOICE, "1")
    assert recordbuffers.of_library(tmp_path) is not None
    assert loaded == [str(tmp_path)]


def test_one_tree_from_the_model_to_the_kernel(binding):
    seen = decoded(
        [
            record(MARKER, 1, binding, timestamp=22_000, flags_=START, id=1, name="cublasGemmEx(m=64)"),
            record(RUNTIME, 1, binding, start=23_000, end=25_000, cbid=211, correlation_id=9),
            record(MARKER, 1, binding, timestamp=26_000, flags_=END, id=1),
            record(KERNEL, 1, binding, start=50_000, end=60_000, correlation_id=9, name="_Z4gemmPfS_i"),
        ]
    )
    assert tree([*spans("step net 0-100\nmodule fc 10-40 depth=0\nop aten::addmm 20-30"), *seen]) == (
        "step net\n  module fc\n    op aten::addmm\n      call cublasGemmEx\n"
        "        launch cudaLaunchKernel\n        kernel gemm(float*, float*, int)"
    )


def test_what_a_kernel_was_launched_with(binding):
    (span,) = decoded(
        [record(KERNEL, 1, binding, start=5000, end=9000, correlation_id=3, name="k", graph_node_id=77)]
    )  # fmt: skip
    assert (span.level, span.device, span.stream, span.start_ns, span.dur_ns) == (Level.KERNEL, 0, 7, 5000, 4000)
    assert json.loads(span.attributes or "") == {
        "grid": [4, 1, 1], "block": [128, 1, 1], "registers": 32, "shared_bytes": 1024,
        "graph": True, "graph_node": 77, "context": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)", "PyTorch"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(float)", "cuDNN"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "cuBLAS"),
        ("triton_poi_fused_relu_0", "Triton"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(int)", None),
    ],
)
def test_where_no_call_names_itself_a_kernels_name_may_tell_the_library(name, library):
    (span,) = decoded([kernel(1, 5000, name)])
    told = json.loads(span.attributes or "")
    assert (told.get("library"), told.get("evidence")) == (library, "name" if library else None)


def test_copies_and_memsets(binding):
    copy, memset = decoded(
        [
            record(MEMCPY, 1, binding, start=1000, end=2000, correlation_id=1, copy_kind=2, bytes=64),
            record(MEMSET, 1, binding, start=3000, end=4000, correlation_id=2, bytes=32),
        ]
    )
    assert [(each.kind, each.name) for each in (copy, memset)] == [("copy", "Memcpy DtoH"), ("copy", "Memset")]
    assert json.loads(copy.attributes or "") == {"bytes": 64, "copy": "DtoH", "context": 1}
    assert json.loads(memset.attributes or "") == {"bytes": 32, "copy": "memset", "context": 1}


def test_a_drivers_call_in_a_runtimes_call_is_the_same_launch_and_one_alone_is_a_launch():
    seen = decoded([launch(1, 1000), launch(1, 1200, kind=DRIVER), launch(2, 9000, kind=DRIVER), kernel(2, 20_000)])
    host = [(span.kind, span.name, span.attributes) for span in seen if span.level == Level.RUNTIME]
    assert host == [("launch", "cudaLaunchKernel", '{"driver": "cuLaunchKernel"}'), ("launch", "cuLaunchKernel", None)]
    rows = correlate([*spans("step net 0-100\nop triton_poi 8-15"), *seen])
    (found,) = [row for row in rows if row.kind == "kernel"]
    assert (found.parent_rule, [row.name for row in rows if row.span_id == found.parent_id]) == (
        "correlation",
        ["triton_poi"],
    )


def test_kernels_find_their_operator_on_two_threads_streams_and_in_two_processes():
    ops = [
        span._replace(thread=thread, process=process)
        for span in spans("op work 0-9")
        for thread, process in ((1, 1), (2, 1), (1, 2))
    ]
    one = decoded([launch(5, 1000), launch(6, 1000, thread=2), kernel(5, 30_000), kernel(6, 31_000, stream_id=8)])
    other = [span._replace(process=2) for span in decoded([launch(5, 1000), kernel(5, 30_000)])]
    rows = correlate([*ops, *one, *other])
    place = {row.span_id: (row.process, row.thread) for row in rows}
    kernels = [(row.process, row.stream, place[row.parent_id or ""]) for row in rows if row.kind == "kernel"]
    assert sorted(kernels) == [(1, 7, (1, 1)), (1, 8, (1, 2)), (2, 7, (2, 1))]


def test_what_a_call_waited_for_stands_at_the_call(binding):
    waiting = record(RUNTIME, 1, binding, start=1000, end=9000, cbid=165, correlation_id=4)
    (span,) = decoded([waiting, record(SYNCHRONIZATION, 1, binding, type=4, start=1100, end=8900, correlation_id=4)])
    assert (span.kind, span.name, span.attributes) == ("sync", "cudaDeviceSynchronize", '{"sync": "device"}')


@pytest.mark.parametrize(
    ("call", "sync"),
    [("cudaStreamSynchronize", "stream"), ("cudaEventSynchronize", "event"), ("cuCtxSynchronize", "context")],
)
def test_a_call_whose_wait_was_not_recorded_says_by_its_name_what_it_waits_for(call, sync):
    made = ApiCall(start=1000, end=2000, cbid=1, process_id=1, thread_id=1, correlation_id=4, return_value=0)
    table = Table.of_rows(ApiCall, [Activity.RUNTIME], [made], [None])
    (span,) = calls.calls(table, [], lambda interface, number: call, lambda thread: thread)
    assert (span.kind, span.attributes) == ("sync", json.dumps({"sync": sync}))


def test_device_work_of_several_kinds_keeps_its_order_and_its_own_description():
    rows = [
        kernel(1, 5000, "a", grid_x=1),
        record(MEMCPY, 1, start=6000, end=7000, correlation_id=2, copy_kind=1, bytes=64),
        kernel(3, 8000, "a", grid_x=2),
        record(MEMSET, 1, start=9000, end=9500, correlation_id=4, bytes=32),
        kernel(1, 5000, "a", grid_x=1, device_id=1),
    ]
    seen = decoded(rows)
    assert [(span.name, span.correlation_id, span.device) for span in seen] == [
        ("a", 1, 0), ("Memcpy HtoD", 2, 0), ("a", 3, 0), ("Memset", 4, 0), ("a", 1, 1),
    ]  # fmt: skip
    assert [json.loads(span.attributes or "").get("grid") for span in seen] == [
        [1, 1, 1],
        None,
        [2, 1, 1],
        None,
        [1, 1, 1],
    ]


def test_calls_of_one_name_keep_their_own_results_and_drivers():
    seen = decoded(
        [
            launch(1, 1000),
            launch(1, 1200, kind=DRIVER),
            launch(2, 2000),
            launch(3, 3000, return_value=700),
            launch(4, 4000),
        ]
    )
    assert [span.attributes for span in seen] == [
        '{"driver": "cuLaunchKernel"}', None, '{"returned": 700}', None,
    ]  # fmt: skip


@pytest.mark.parametrize("is_on", [True, False])
def test_the_search_for_cycles_is_as_the_program_had_it(is_on, monkeypatch):
    if not is_on:
        gc.disable()
    try:
        decoded([launch(1, 1000)])
        assert gc.isenabled() == is_on
        monkeypatch.setattr(calls, "calls", None)
        with pytest.raises(TypeError):
            decoded([launch(1, 1000)])
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_spans_of_columns_are_those_made_one_by_one():
    made = list(spans_of({"name": ["a", "b"], "start_ns": [1, 2]}, level=Level.OP, kind="op"))
    assert made == [Span(level=Level.OP, kind="op", name=name, start_ns=start) for name, start in (("a", 1), ("b", 2))]
    assert list(spans_of({"name": []})) == []
    with pytest.raises(ValueError, match="shorter"):
        list(spans_of({"name": ["a", "b"], "start_ns": [1]}))


def test_the_profilers_own_work_is_overhead_on_its_thread(binding):
    (span,) = decoded([record(OVERHEAD, 5, binding, start=1000, end=4000, overhead_kind=5 << 16)])
    assert (span.kind, span.name, span.thread, span.dur_ns) == ("overhead", "lazy function loading", 5, 3000)


def test_a_range_of_the_programs_own_is_a_users_block():
    seen = decoded(
        [
            record(MARKER, timestamp=1000, flags_=START, id=1, name="epoch", domain=""),
            record(MARKER, timestamp=5000, flags_=END, id=1, domain=""),
        ]
    )
    assert [(span.level, span.kind, span.name, span.dur_ns) for span in seen] == [
        (Level.APPLICATION, "user", "epoch", 4000)
    ]


@objects_only
def test_what_was_cut_off_is_counted_and_not_stored():
    collector = CuptiActivities()
    unfinished = record(KERNEL, start=5000, end=0, correlation_id=1, name="still running")
    end = record(MARKER, timestamp=900, flags_=END, id=3)
    broken = record(KERNEL, start=5000, end=None, correlation_id=1, name="k")
    broken.kind = "no number"
    assert decoded([unfinished, end, broken], collector) == []
    assert sorted(collector.notes()) == [
        "1 ends of NVTX ranges that began before the step",
        "1 kernels or copies that had not ended when the step's records were flushed",
        "1 records that could not be read",
    ]
    assert list(collector.notes()) == []


def test_calls_that_xsp_makes_after_the_steps_end_are_not_the_programs():
    collector = CuptiActivities()
    collector._stopping_thread = 1
    late = [launch(1, 2_000_000), launch(2, 2_000_000, thread=2)]
    assert [span.thread for span in decoded(late, collector)] == [2]


@objects_only
def test_a_field_that_this_version_does_not_have_is_unknown():
    older = record(KERNEL, start=5000, end=9000, correlation_id=3, name="k")
    del older.registers_per_thread, older.graph_node_id
    (span,) = decoded([older])
    assert "registers" not in json.loads(span.attributes or "")


def test_threads_are_the_operating_systems_also_where_records_name_them_as_posix_does():
    here, posix = threading.get_native_id(), threading.get_ident() & 0xFFFFFFFF
    numbers = ThreadNumbers()
    assert [numbers(number) for number in (here, posix, 2**22 + 7, None)] == [here, here, 2**22 + 7, None]
    numbers = ThreadNumbers()
    numbers.has_native_ids = False
    assert (numbers(posix), numbers(2**22 + 7), numbers.unknown_count) == (here, None, 1)


# --- records in arrays of NumPy, as cupti-python 13.0 has them ------------------------------------------------


class InArray:
    """A record whose fields lie in an array; reading one as an attribute is what the collector must not do."""

    def __init__(self, dtype: list[Any] | dict[str, Any], **fields: Any) -> None:
        numpy = pytest.importorskip("numpy")
        self._data = numpy.recarray(1, dtype=numpy.dtype(dtype, align=True))
        numpy.ndarray.fill(self._data, 0)
        for name, value in fields.items():
            numpy.ndarray.__getitem__(self._data, name)[0] = value

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was read as an attribute")


@objects_only
def test_records_in_arrays_are_unpacked_with_their_texts_and_what_they_do_not_have_is_none():
    kept = ctypes.create_string_buffer(b"relu")
    times = [("kind", "<i4"), ("small", "u1"), ("start", "<u8"), ("end", "<u8")]
    where = [("device_id", "<u4"), ("stream_id", "<u4"), ("context_id", "<u4"), ("correlation_id", "<u4")]
    sizes = [(f"{what}_{axis}", "<i4") for what in ("grid", "block") for axis in "xyz"]
    ran = {"kind": int(Activity.CONCURRENT_KERNEL), "start": 5, "end": 9, "stream_id": 7, "correlation_id": 3}
    kernel_in = InArray([*times, *where, *sizes, ("name", "<i8")], **ran, grid_x=4, name=ctypes.addressof(kept))
    thread = [("process_id", "<u4"), ("thread_id", "<u4")]
    objects = {"names": ["pt", "dcs"], "formats": [thread, [("device_id", "<u4")]], "offsets": [0, 0], "itemsize": 12}
    mark = [("kind", "<i4"), ("flags_", "<i4"), ("timestamp", "<u8"), ("id", "<u4"), ("object_kind", "<i4")]
    marker = InArray([*mark, ("object_id", objects), ("name", "<i8"), ("domain", "<i8")], kind=12, id=1, flags_=4)
    marker._data["object_id"]["pt"]["thread_id"][0] = 77
    records = RecordObjects()
    records.complete([kernel_in, marker, InArray([("kind", "<i4")], kind=48)])
    (first, row), (second, other) = records.take().rows()
    assert (first, second, records.unreadable, records.unrequested) == (
        Activity.CONCURRENT_KERNEL,
        Activity.MARKER,
        0,
        1,
    )
    assert (row.start, row.end, row.stream_id, row.correlation_id, row.grid_x, row.name) == (5, 9, 7, 3, 4, "relu")
    assert (row.registers_per_thread, row.graph_node_id) == (None, None)
    assert (other.id, other.flags_, other.object_id_pt_thread_id, other.name) == (1, 4, 77, None)


# --- records in buffers ---------------------------------------------------------------------------------------


def test_each_kind_of_record_has_the_same_rows_from_objects_and_from_buffers(form):
    made = [
        record(MARKER, 3, timestamp=500, flags_=START, id=1, name="cublasGemmEx"),
        record(RUNTIME, 3, start=1000, end=2000, cbid=211, correlation_id=1, return_value=700),
        record(DRIVER, 3, start=1100, end=1900, cbid=307, correlation_id=1),
        record(KERNEL, start=5000, end=9000, correlation_id=1, name="relu", registers_per_thread=40, graph_node_id=9),
        record(MEMCPY, start=5100, end=5200, correlation_id=2, copy_kind=10, bytes=1 << 33, graph_node_id=1 << 40),
        record(MEMSET, start=5300, end=5400, correlation_id=3, bytes=77),
        record(SYNCHRONIZATION, type=3, start=6000, end=6100, correlation_id=4, stream_id=0xFFFFFFFF),
        record(OVERHEAD, 8, start=1, end=2, overhead_kind=1 << 16),
        record(MARKER, 3, timestamp=7000, flags_=END, id=1),
        record(KERNEL, start=8000, end=0, correlation_id=5, name=None, grid_x=1 << 30, device_id=3),
    ]
    library = FakeLibcupti()
    of_buffers, of_objects = buffers(library), RecordObjects()
    of_objects.complete(made)
    library.deliver(b"".join(map(packed, made[:4])))
    library.deliver(b"".join(map(packed, made[4:])))
    rows = of_buffers.take().rows()
    assert len(rows) == len(made)
    assert rows == of_objects.take().rows()
    assert len(of_buffers.take()) == 0


@buffers_only
def test_a_copy_between_devices_is_read_at_its_own_offsets():
    fields = {"device_id": 1, "stream_id": 7, "context_id": 1, "copy_kind": 10, "bytes": 64, "graph_node_id": 5}
    (span,) = decoded([SimpleNamespace(kind=22, start=1000, end=2000, correlation_id=6, **fields)])
    assert (span.name, span.device, span.correlation_id) == ("Memcpy PtoP", 1, 6)
    assert json.loads(span.attributes or "")["graph_node"] == 5


@buffers_only
def test_texts_are_copied_while_the_buffer_is_handed_over_because_their_memory_may_be_used_again():
    library = FakeLibcupti()
    records = buffers(library)
    text = ctypes.create_string_buffer(b"first ")
    for name in (b"first ", b"second"):
        text.value = name
        library.deliver(packed(kernel(1, 5000, ctypes.addressof(text))))
    assert [row.name for _, row in records.take().rows()] == ["first ", "second"]


@buffers_only
def test_what_is_not_a_record_ends_the_reading_of_its_buffer_and_is_counted():
    library = FakeLibcupti()
    records = buffers(library)
    whole = packed(launch(1, 1000))
    for rest in (b"", bytes(40), b"\xff" * 40, whole[:24]):
        library.deliver(whole + rest)
    library.deliver(packed(SimpleNamespace(kind=39)) + whole)
    assert (len(records.take()), records.unreadable, records.unrequested) == (5, 3, 1)
    complete = library._callbacks[1]
    complete(None, 0, ctypes.addressof(ctypes.create_string_buffer(whole)), 40, 40)  # a buffer of another client
    assert (len(records.take()), records.unrequested) == (0, 2)


@buffers_only
def test_buffers_are_used_again_and_more_than_two_are_not_kept():
    library = FakeLibcupti()
    records = buffers(library)
    request, complete = library._callbacks
    lent = []
    for _ in range(4):
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        request(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
        lent.append(buffer.value)
    assert len(set(lent)) == 4
    for address in lent:
        complete(None, 0, address, size.value, 0)
    assert (len(records._free), len(records._lent)) == (2, 0)


@pytest.mark.parametrize("version", [130300, 120800])
@buffers_only
def test_versions_whose_structures_are_not_known_are_left_to_the_binding(version):
    assert recordbuffers.of_loaded(FakeLibcupti(version=version)) is None


@pytest.mark.parametrize("sizes", [{KERNEL: 232}, {MARKER: 48}])
@buffers_only
def test_structures_of_other_sizes_are_left_to_the_binding(sizes):
    library = FakeLibcupti(sizes=sizes)
    with pytest.raises(OSError, match="not known"):
        buffers(library)
    assert library._callbacks is None


@buffers_only
def test_a_shorter_kernel_of_an_earlier_version_is_read():
    library = FakeLibcupti(version=130000, sizes={KERNEL: 216})
    records = buffers(library)
    library.deliver(packed(kernel(1, 5000))[:216] + packed(launch(1, 1000)))
    assert [type(row).__name__ for _, row in records.take().rows()] == ["Kernel", "ApiCall"]


C_NAMES = {
    "Kernel": ("Kernel9", "Kernel10", "Kernel11"),
    "Copy": ("Memcpy5", "Memcpy6"),
    "Memset": ("Memset4",),
    "ApiCall": ("API",),
    "Wait": ("Synchronization", "Synchronization2"),
    "Overhead": ("Overhead2", "Overhead3"),
    "Marker": ("Marker2",),
}
"""Names of NVIDIA's structures, in the order of the sizes."""


@buffers_only
def test_offsets_and_sizes_are_those_of_nvidias_header(tmp_path):
    library, compiler = find_library(), shutil.which("cc")
    include = library.parent.parent / "include" if library is not None else Path("/none")
    if compiler is None or not (include / "cupti_activity_deprecated.h").exists():
        pytest.skip("there is no compiler, or no header of CUPTI")
    questions, answers = [], []
    for structure in recordbuffers.STRUCTURES:
        names = ("MemcpyPtoP4",) if Activity.MEMCPY2 in structure.kinds else C_NAMES[structure.row_type.__name__]
        for name, size in zip(names, structure.sizes, strict=True):
            questions.append(f"sizeof(CUpti_Activity{name})")
            answers.append(size)
            for field, (offset, code) in structure.fields.items():
                member = "objectId.pt.threadId" if field.startswith("object_id") else camel(field)
                questions.append(f"offsetof(CUpti_Activity{name}, {member})")
                questions.append(f"sizeof(((CUpti_Activity{name} *)0)->{member})")
                answers += [offset, int(code[-1])]
    source = tmp_path / "offsets.c"
    lines = "".join(f'printf("%zu\\n", (size_t){question});\n' for question in questions)
    headers = "".join(
        f"#include <{name}>\n"
        for name in ("stdio.h", "stddef.h", "cuda.h", "cupti_activity.h", "cupti_activity_deprecated.h")
    )
    source.write_text(f"{headers}int main(void) {{\n{lines}return 0;\n}}\n")
    done = subprocess.run(
        [compiler, "-w", f"-I{include}", "-o", str(tmp_path / "offsets"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"the header is of another version: {done.stderr[:200]}")
    printed = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True).stdout
    assert dict(zip(questions, map(int, printed.split()), strict=True)) == dict(zip(questions, answers, strict=True))


def camel(field: str) -> str:
    """Return NVIDIA's name of a field."""
    first, *others = field.rstrip("_").split("_")
    return first + "".join(part.capitalize() for part in others)
