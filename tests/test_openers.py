"""Which functions open files: those of runs and results are opened by `xsp.inside` alone.

A function that opens anything else is listed here with the reason why it need not be careful. A new one is either
listed, because its file is none of a run or a result, or uses `xsp.inside`.
"""

from __future__ import annotations

import ast
from functools import cache

from sources import ROOT, sources, tree_of

OPENERS = {
    "open", "io.open", "os.open", "os.fdopen", "np.load", "np.fromfile", "np.memmap", "np.loadtxt", "np.genfromtxt",
    "json.load", "zipfile.ZipFile", "gzip.open", "tarfile.open", "bz2.open", "lzma.open", "tomllib.load", "onnx.load",
    "torch.load", "torch.export.load", "sqlite3.connect", "linecache.getline", "codecs.open", "mmap.mmap",
}  # fmt: skip
METHODS = {"read_text", "read_bytes"}
TABLES = {"table.parquet", "table.check_parquet", "parquet"}
"""They give a file to the table engine, which opens it by its name."""

OTHERS = {
    "the system's": """
        atomic.py _place _start_of; bench/moves.py _open_direct; bench/numanodes.py _numbers pair;
        device/processor.py Processor.begin; evaluate/contention.py _text; identity.py _trace_of_ranks host;
        launch/children.py _is_from_terminal; processes.py start_ns system_text; share/loadworker.py memory_of;
        share/pages.py large_page_bytes; cli/run.py _show
    """,
    "of this package": """
        device/ceilings.py _entries; version.py commit_of_package; evaluate/web/routes.py _asset;
        evidence/form.py schema; report/html.py _asset
    """,
    "in the user's cache": """
        advise/records.py history; bench/timings.py Timings._read_environment; cached.py read open_folder
        _is_intact _state _remove_folder; device/ceilings.py _cached_content; evaluate/sharing.py _read_note;
        predict/collectives.py _read_link
    """,
    "memory, or a descriptor that this process or its parent opened": """
        bench/moves.py _first_touch.batch _read_mapped _storage; bench/numanodes.py memory; bench/partner.py
        Channels.__init__; bench/turns.py Turns.__enter__; bench/worker.py work; evidence/tools.py main;
        processes.py Questions.__init__; share/client.py ask_large; share/devicestore.py main start_process;
        share/wire.py in_memory; evaluate/results.py _arrays
    """,
    "written by this process, or by a program that it started": """
        atomic.py move_into_place; comparison/turns.py _run _end_of; counters/ncu.py collect
        _export_table; evaluate/load/loadgen.py drive_loadgen; exporters/contract.py atomic_file; graph/corpus.py
        collect; importers/nsys_tables.py Export.__init__ Export._insert_rows; importers/repair.py mend;
        importers/traceevents.py _pieces
        _PieceReader._isolate; otlp/send.py _FileSender.__init__; record/output.py _belongs_to_job; report/tablefiles.py
        text; share/loadworker.py _build _time; share/measuring.py _drop _set_state resident_share; share/serving.py
        Serving.__init__; share/wire.py device_number; store/loop.py append
    """,
    "a folder, to lock it or to name its files": "rundir.py lock; table.py _by_descriptor",
    "named on the command line, in a manifest that is trusted, or by the program that is profiled": """
        bound/latencies.py read; cli/run.py _mentions; cli/share.py Estimate.run; counters/reading.py _text;
        evaluate/datasets.py _file_bytes;
        evaluate/predictors.py _load_exported checksum;
        evaluate/quality/choices.py prices; evaluate/sharing.py _configuration_hash; graph/captured.py _conditions;
        graph/corpus.py rows; graph/files.py load; graph/onnxfile.py _read; graph/program.py _check_archive load;
        graph/sources.py _kind; launch/program.py _shebang; launch/script.py prepare; otlp/transport.py
        GrpcSender.__init__;
        predict/configurations.py _read_csv _read_json; predict/fitfile.py _is_fit read; record/between.py
        _named; share/client.py _request_weights; share/weights.py shards
    """,
    "a trace of another tool, named on the command line": """
        cached.py content_hash; importers/contract.py open_bytes; importers/nsys.py _check;
        importers/outside.py end_of_last_event; importers/rocprof.py Rocprof.fill is_rocpd;
        ingest/tables.py _identity
    """,
    "the opener": "inside.py open_file _open_below read_text read_json",
}

TABLE_READERS = {
    "which `rundir.segments` or `rundir.portions` returned, or `rundir.check_inside` checked": """
        counters/storing.py _write; ingest/enginespans.py _annotated;
        ingest/load.py _readable_segments _load_files _create_sequence_view _create_samples_view
        _create_view; ingest/received.py _arrived_query;
        ingest/tables.py _attribute _combine_ranks _join_captures;
        otlp/delivery.py Delivery._create_step_view Delivery._last_end_ns Delivery._spans_before Delivery._steps_of
        Delivery.timed_steps _create_served_view steps_in; receiver/journal.py RunWriter._traces;
        receiver/directories.py RunDirectory.merge_small_files RunDirectory.summary; report/watch.py _read_steps;
        store/write.py StepWriter.finish resolve_run.read
    """,
    "written by this process": "report/tablefiles.py write",
    "which `inside.engine_path` opened": "evaluate/results.py _request_columns; store/loop.py _insert_parquet",
}


def listed(groups: dict[str, str]) -> set[tuple[str, str]]:
    result = set()
    for text in groups.values():
        for entry in text.replace("\n", " ").split(";"):
            module, *functions = entry.split()
            result |= {(module, function) for function in functions}
    return result


@cache
def calls() -> list[tuple[str, str, str, bool]]:
    """Return module, function, what is called, and whether that opens a file, for each call in xsp."""
    found = []
    for path in sources("xsp"):
        pending: list[tuple[ast.AST, str]] = [(tree_of(path), "")]
        while pending:
            node, place = pending.pop()
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                found.append((path.relative_to(ROOT / "xsp").as_posix(), place, name, opens(node, name)))
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    pending.append((child, f"{place}.{child.name}".lstrip(".")))
                else:
                    pending.append((child, place))
    return found


def opens(call: ast.Call, name: str) -> bool:
    """Return whether a call opens a file; `open` of a path has a mode as its first argument, or none."""
    if name.startswith("inside."):
        return False
    last = name.rpartition(".")[2]
    of_path = last == "open" and isinstance(call.func, ast.Attribute) and name not in OPENERS
    has_mode = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    named = any(keyword.arg in ("mode", "encoding") for keyword in call.keywords)
    return name in OPENERS or last in METHODS or (of_path and (has_mode or named))


def test_files_of_runs_and_results_are_opened_in_one_place() -> None:
    found = {(module, place) for module, place, _, is_opener in calls() if is_opener}
    assert found - listed(OTHERS) == set(), "open files of runs and results with xsp.inside; list others here"
    assert listed(OTHERS) - found == set(), "these open nothing any more"


def test_tables_of_runs_and_results_are_checked_before_the_engine_opens_them() -> None:
    found = {(module, place) for module, place, name, _ in calls() if name in TABLES and module != "table.py"}
    assert found - listed(TABLE_READERS) == set(), "check the tables of a run with rundir or inside, and list them here"
    assert listed(TABLE_READERS) - found == set(), "these read no table any more"
