"""Reports of Nsight Compute are read, joined to kernels, and analyses stand on them.

No report here is a real one: they are fabricated after the output of ncu 2025.3 (page raw) and 2024.1 (page details).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ncureports import BF16, FFMA, FULL_REPORT, OCCUPANCY, READ, WRITE, ZEROS, raw, report, run_of_kernels

from xsp import rundir
from xsp.analyses import ANALYSES
from xsp.cli import main
from xsp.counters import joining, reading, storing
from xsp.device import metrics
from xsp.errors import TraceError, UsageError
from xsp.ingest import load
from xsp.store.trace import Trace

# --- reading ------------------------------------------------------------------------------------------


def test_a_raw_page_is_read(tmp_path: Path) -> None:
    text = raw(
        {"name": "gemm<1, 2>(T1)", "in": "xsp.step xsp.layer#0#fc", READ: "1,234.5", FFMA: "n/a"}, units={READ: "Kbyte"}
    )
    (row,) = reading.read(report(tmp_path, text))
    assert row == reading.ReplayedKernel(
        "gemm<1, 2>(T1)", (8, 1, 1), (128, 1, 1), (9, 0), ("xsp.step", "xsp.layer#0#fc"), {READ: 1_234_500}
    )


def test_a_page_of_details_is_read(tmp_path: Path) -> None:
    start = '"{}","7","python","h","{}","1","7","(128, 1, 1)","(8, 1, 1)","0","8.0","Command line profiler metrics"'
    text = (
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
        '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'
        f'{start.format(0, "first")},"{READ}","Mbyte","1.5"\n{start.format(0, "first")},"{WRITE}","byte","2,048"\n'
        f'{start.format(1, "second")},"{READ}","byte","64"\n'
    )
    assert [(row.name, row.values) for row in reading.read(report(tmp_path, text))] == [
        ("first", {READ: 1_500_000, WRITE: 2048}),
        ("second", {READ: 64}),
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({READ: "27,595,520", OCCUPANCY: "65.77"}, (27_595_520, 65.77)),
        ({READ: "27.595.520", OCCUPANCY: "65,77"}, (27_595_520, 65.77)),
        ({READ: "27\u202f595\u202f520", OCCUPANCY: "65,77"}, (27_595_520, 65.77)),
        ({READ: "27'595'520", OCCUPANCY: "65.77"}, (27_595_520, 65.77)),
        ({READ: "2.7595520e+07", OCCUPANCY: "100"}, (27_595_520, 100)),
        ({READ: "2.048", OCCUPANCY: "0,5"}, (2_048, 0.5)),
    ],
)
def test_numbers_are_read_as_the_country_writes_them(
    tmp_path: Path, written: dict[str, str], meant: tuple[float, float]
) -> None:
    (row,) = reading.read(report(tmp_path, raw({"name": "k", **written})))
    assert (row.values[READ], row.values[OCCUPANCY]) == meant


def test_numbers_in_two_ways_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"two formats, '1\.5' and '2,5'"):
        reading.read(report(tmp_path, raw({"name": "k", READ: "1.5", WRITE: "2,5"})))


def test_output_of_the_program_around_the_table_is_skipped(tmp_path: Path) -> None:
    text = raw({"name": "k", READ: "1"}, header='epoch 1, loss "0.5\n"half a quotation, "and more\n')
    assert [row.name for row in reading.read(report(tmp_path, text, "utf-16"))] == ["k"]


def test_columns_that_make_no_figures_may_hold_anything(tmp_path: Path) -> None:
    text = raw({"name": "k", "device__driver": "535.104.05", "profiler__note": "1,5", READ: "12.5"})
    assert [row.values for row in reading.read(report(tmp_path, text))] == [{READ: 12.5}]


def test_each_process_has_a_header_of_its_own(tmp_path: Path) -> None:
    text = raw({"name": "first", READ: "1", WRITE: "2"}) + raw({"name": "second", WRITE: "3"})
    assert [row.values for row in reading.read(report(tmp_path, text))] == [{READ: 1, WRITE: 2}, {WRITE: 3}]


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n", '"a","b"\n"1","2"\n', raw()])
def test_a_report_without_kernels_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match=r"report\.csv: .*ncu --import"):
        reading.read(report(tmp_path, text))


def test_a_report_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.ncu-rep").write_bytes(b"NVR\x00\xff\xd0")
    with pytest.raises(TraceError, match="is not text"):
        reading.read(tmp_path / "report.ncu-rep")


FIELDS = st.sampled_from(
    ["Kernel Name", "Metric Name", "Metric Value", "ID", READ, "CC", "k", "9.0", "1,5", "1.5", "n/a"]
)
LINES = st.lists(st.lists(FIELDS | st.text(max_size=4), max_size=5).map(",".join), max_size=8)


@pytest.mark.slow
@given(LINES | st.lists(st.text()))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_is_rows_or_an_error(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "report.csv"
    path.write_text("\n".join(lines), encoding="utf-8", errors="ignore")
    try:
        rows = reading.read(path)
    except TraceError:
        return
    assert all(metrics.figures(row.values, row.capability) is not None for row in rows)


# --- figures ------------------------------------------------------------------------------------------


def figures(capability: tuple[int, int] | None = (9, 0), **changed: float | None) -> metrics.KernelFigures:
    values = dict.fromkeys(ZEROS, 0.0) | changed
    return metrics.figures({name: value for name, value in values.items() if value is not None}, capability)


def test_a_multiply_add_is_two_operations_and_packed_halves_are_twice_that() -> None:
    assert figures(**{FFMA: 10}).flops == 20
    assert figures(**{FFMA.replace("ffma", "hfma"): 10}).flops == 40
    assert figures(**{FFMA.replace("ffma", "dadd"): 10, BF16: 1000}).flops == 1010


def test_operations_of_tensor_cores_count_once_whichever_way_they_are_given() -> None:
    whole, parts = "sm__ops_path_tensor_src_fp16.sum", "sm__ops_path_tensor_src_fp16_dst_fp{}.sum"
    assert figures(**{whole: 64, parts.format(16): 24, parts.format(32): 40}).flops == 64
    assert figures(**{whole: None, parts.format(16): 24, parts.format(32): 40}).flops == 64
    assert figures(**{BF16: None, f"{BF16[:-4]}_sparsity_off.sum": 64}).flops == 64


def test_of_several_ways_to_count_the_first_that_a_device_has_is_asked_for() -> None:
    whole, tf32 = "sm__ops_path_tensor_src_fp16", "sm__ops_path_tensor_src_tf32_dst_fp32_sparsity_"
    known = {whole, f"{whole}_dst_fp16", f"{whole}_dst_fp32", f"{tf32}on", f"{tf32}off", "dram__bytes_op_read"}
    assert metrics.requested(known) == [f"{whole}.sum", f"{tf32}off.sum", f"{tf32}on.sum", "dram__bytes_op_read.sum"]
    assert set(metrics.requested()) > set(metrics.requested(known))


def test_operations_are_unknown_where_tensor_cores_were_not_counted() -> None:
    sparse = {f"{BF16[:-4]}_sparsity_{state}.sum": None for state in ("on", "off")}
    pipe = {BF16: None, **sparse, metrics.PIPE: 4}
    assert figures((7, 5), **pipe).flops is None
    assert figures((7, 0), **pipe).flops == 2048
    assert figures((7, 5), **pipe | {metrics.PIPE: 0, FFMA: 1}).flops == 2
    assert figures((9, 0), **pipe | {metrics.PIPE: None}).flops is None
    assert figures(None, **{FFMA: None}).flops is None


def test_bytes_and_occupancy_go_by_several_names() -> None:
    assert metrics.figures({"dram__bytes_op_read.sum": 8, "Achieved Occupancy": 25}, (12, 0)) == (None, 8, None, 0.25)


# --- joining ------------------------------------------------------------------------------------------


def kernel(key: str, name: str, order: int, layer: str | None = None, grid: int | None = 8) -> joining.TimedKernel:
    shape = ((grid, 1, 1), (128, 1, 1)) if grid is not None else (None, None)
    return joining.TimedKernel(key, name, (order, 0), 10.0, *shape, layer)


def row(name: str, layer: str | None = None, grid: int | None = 8, marker: float = 0) -> reading.ReplayedKernel:
    shape = ((grid, 1, 1), (128, 1, 1)) if grid is not None else (None, None)
    return reading.ReplayedKernel(name, *shape, (9, 0), ("xsp.step", layer) if layer else (), {"marker": marker})


def test_the_kth_row_of_a_group_is_of_its_kth_launch() -> None:
    result = joining.join(
        [kernel("late", "a", 3), kernel("other", "b", 2), kernel("early", "a", 1)],
        [row("a", marker=1), row("b", marker=2), row("a", marker=3)],
    )
    assert {key: entry.values["marker"] for key, entry in result.rows.items()} == {"early": 1, "other": 2, "late": 3}


def test_a_group_with_other_numbers_is_not_joined_at_all() -> None:
    result = joining.join(
        [kernel("a1", "a", 1), kernel("a2", "a", 2), kernel("b", "b", 3), kernel("big", "a", 4, grid=99)],
        [row("a"), row("b"), row("a", grid=99), row("c")],
    )
    assert (set(result.rows), result.row_count) == ({"b", "big"}, 4)


def test_layers_keep_apart_what_is_alike() -> None:
    first, second = joining.layer_range(0, "fc"), joining.layer_range(1, "fc")
    result = joining.join(
        [kernel("1", "a", 1, first), kernel("2", "a", 2, second), kernel("back", "a", 3)],
        [row("a", second, marker=2), row("a", marker=3), row("a", first, marker=1), row("a", second, marker=4)],
    )
    assert {key: entry.values["marker"] for key, entry in result.rows.items()} == {"1": 1, "back": 3}


def test_a_kernel_of_unknown_layer_may_have_been_launched_in_any() -> None:
    result = joining.join([kernel("graph", "a", 1)], [row("a", joining.layer_range(0, "net"))])
    assert set(result.rows) == {"graph"}


def test_grid_and_block_that_one_side_does_not_tell_are_left_out() -> None:
    assert set(joining.join([kernel("k", "a", 1, grid=None)], [row("a")]).rows) == {"k"}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("void at::native::elementwise_kernel<4, at::Add<float> >(int, at::Add<float>)", "elementwise_kernel"),
        ("void at::elementwise_kernel<(int)4, T2>(T1, T2)", "elementwise_kernel"),
        ("void (anonymous namespace)::softmax<<unnamed>::F>(float*)", "softmax"),
        ("void cutlass::Kernel2<cutlass_80_simt>(T1::Params)", "Kernel2"),
        ("sm90_xmma_gemm_bf16bf16_tilesize128x128x64", "sm90_xmma_gemm_bf16bf16_tilesize128x128x64"),
        ("foo(int) [clone .kd]", "foo"),
    ],
)
def test_names_are_compared_without_what_tools_write_differently(name: str, plain: str) -> None:
    assert joining.function_name(name) == plain


# --- a run --------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of_kernels(tmp_path / "run")


def rows(trace: Trace, identity: str, *columns: str) -> list[tuple[object, ...]]:
    return ANALYSES[identity](trace).project(", ".join(columns)).fetchall()


@pytest.mark.slow
def test_analyses_stand_on_counters(run: Path, tmp_path: Path) -> None:
    assert rows(load.load(run), "A8", "flops", "flops_source")[1:] == [(None, None), (100, "shapes")]
    message = storing.attach(run, [report(tmp_path, FULL_REPORT)])
    trace = load.load(run)
    columns = (
        "flops",
        "flops_source",
        "dram_read_bytes",
        "dram_write_bytes",
        "bytes_source",
        "occupancy",
        "occupancy_source",
    )
    assert sorted(rows(trace, "A8", "name", *columns), key=str) == [
        ("gemm<4>()", 1000, "counter", 2000, 100, "counter", 0.75, "counter"),
        ("gemm<4>()", 6000, "counter", 1000, 500, "counter", 0.5, "counter"),
        ("prepare", 0, "counter", 10, 20, "counter", 0.125, "counter"),
    ]
    assert sorted(rows(trace, "A10", "name", "flops", "dram_read_bytes")) == [
        ("gemm<4>()", 7000, 3000),
        ("prepare", 0, 10),
    ]
    assert sorted(rows(trace, "A11", "layer_name", "flops", "dram_write_bytes")) == [
        ("conv", 6000, 520),
        ("fc", 1000, 100),
    ]
    assert rows(trace, "A15", "flops", "dram_read_bytes") == [(7000, 3010)]
    assert (message["with_counters"], message["device_time_percent"], message["rows_joined"]) == (3, 100.0, 3)
    assert trace.run["counters"] == message
    assert trace.run["absent"] == {}
    assert trace.run["notes"][-1]["text"].startswith("3 of 3 kernels (100.0 % of device time) have counters")


@pytest.mark.slow
def test_times_stay_as_they_were(run: Path, tmp_path: Path) -> None:
    query = "SELECT step, span_id, parent_id, name, start_ns, dur_ns, attributes FROM spans ORDER BY ALL"
    before = load.load(run).sql(query).fetchall()
    storing.attach(run, [report(tmp_path, FULL_REPORT)])
    assert load.load(run).sql(query).fetchall() == before


@pytest.mark.slow
def test_bytes_alone_leave_operations_to_the_shapes(run: Path, tmp_path: Path) -> None:
    storing.attach(run, [report(tmp_path, raw({"name": "gemm", READ: "1"}, {"name": "gemm", READ: "2"}))])
    found = rows(load.load(run), "A8", "flops", "flops_source", "dram_read_bytes", "bytes_source")
    assert (100, "shapes", 2, "counter") in found
    storing.attach(run, [report(tmp_path, FULL_REPORT)])
    assert (1000, "counter", 2000, "counter") in rows(
        load.load(run), "A8", "flops", "flops_source", "dram_read_bytes", "bytes_source"
    )


@pytest.mark.slow
def test_several_reports_complete_each_other(run: Path, tmp_path: Path) -> None:
    paths = []
    for name, value in ((READ, "7"), (OCCUPANCY, "25")):
        (tmp_path / name).mkdir()
        paths.append(report(tmp_path / name, raw({"name": "prepare", name: value})))
    storing.attach(run, paths)
    trace = load.load(run)
    result = rows(trace, "A8", "name", "dram_read_bytes", "occupancy", "occupancy_source")
    assert ("prepare", 7, 0.25, "counter") in result
    assert trace.run["notes"][-1]["text"].startswith("counters do not give the operations of kernels without s")


@pytest.mark.slow
def test_a_kernel_of_which_no_counter_is_known_is_joined_and_gets_no_figure(run: Path, tmp_path: Path) -> None:
    text = raw({"name": "prepare", READ: "n/a"}, {"name": "gemm", READ: "1"}, {"name": "gemm", READ: "2"})
    message = storing.attach(run, [report(tmp_path, text)])
    assert (message["with_counters"], message["rows_joined"]) == (2, 3)
    assert ("prepare", None) in rows(load.load(run), "A8", "name", "dram_read_bytes")


def test_what_fits_no_kernel_is_counted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = raw(*({"name": name, READ: "1"} for name in ("prepare", "gemm", "gemm", "gemm", "other")))
    assert main(["counters", str(run), str(report(tmp_path, text))]) == 0
    assert capsys.readouterr().out == (
        "xsp: 1 of 3 kernels have counters, 6.67 % of device time; 1 of 5 rows were joined\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (raw({"name": "other", READ: "1"}), "none of its 1 kernels matches one of the run's 3"),
        (raw({"name": "prepare", "launch__waves": "1"}), "holds none of the requested metrics"),
    ],
)
def test_a_report_that_fits_nothing_changes_nothing(run: Path, tmp_path: Path, text: str, message: str) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(TraceError, match=message):
        storing.attach(run, [report(tmp_path, text)])
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_set_of_runs_is_refused(tmp_path: Path) -> None:
    rundir.create(tmp_path / "set")
    rundir.write_run(tmp_path / "set", {"kind": "sweep", "parts": ["batch-0001"]})
    with pytest.raises(UsageError, match="batch-0001"):
        storing.attach(tmp_path / "set", [report(tmp_path, FULL_REPORT)])
