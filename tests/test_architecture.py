"""Who may import whom: the layers of the design, read from the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import ROOT, name_of, sources, tree_of

from xsp.errors import causes

LAYERS = [
    {
        "atomic",
        "errors",
        "frameworks",
        "hosts",
        "identity",
        "inside",
        "processes",
        "schema",
        "scrub",
        "stats",
        "subjects",
    }
    | {"texts", "version"},
    {"fields"},
    {"cached", "callnames", "clock", "collector", "connections", "cost", "levels", "run", "transport"},
    {"causal", "micromodels", "modelinputs", "modelname", "plugins", "rundir", "semconv", "serving", "table"}
    | {"xsp_collectors"},
    {"device"},
    {"importers", "samples", "sections"},
    {"correlate", "terminal"},
    {"store"},
    {"account"},
    {"exporters", "health", "ingest", "models", "record", "spark", "testing"},
    {"analyses", "counters", "graph", "otlp", "receiver"},
    {"bench", "comparison", "doctor", "instrumentation", "launch", "trials"},
    {"advise", "bound"},
    {"predict", "questions", "share"},
    {"report"},
    {"evaluate", "evidence"},
    {"cli"},
]
"""Outermost last. A module imports from the layers before its own; those of one layer do not import each other."""

PLACE = {name: place for place, names in enumerate(LAYERS) for name in names}

TABLE_OF_CONTENTS = "__init__"
"""`xsp/__init__.py` shows what stands in other modules, so it may import all of them."""

COMMAND = "__main__"
"""`python -m xsp` calls the command line, and nobody imports it."""

FOR_COLLECTORS = {
    "callnames",
    "clock",
    "collector",
    "cost",
    "errors",
    "plugins",
    "processes",
    "schema",
    "scrub",
    "serving",
    "subjects",
    "testing",
}
"""What of xsp may enter the measured process with a collector."""

MOST_LINES = 800
"""About 450, and some room: a file of 400 lines with one subject is better than two with half a subject each."""

TO_AVOID = {
    "base", "common", "engine", "event", "events", "helper", "helpers", "manager", "utils",
    "again", "around", "courier", "doors", "handing", "placing", "saying", "underway",
}  # fmt: skip
"""`record` is a package: there it is the verb."""


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return each imported module by its full name, and whether it is imported when the file is."""
    package = path.relative_to(ROOT).parent.parts
    found: list[tuple[str, bool]] = []
    pending: list[tuple[ast.AST, bool]] = [(tree_of(path), True)]
    while pending:
        node, at_once = pending.pop()
        inside = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, inside and not _for_type_checkers(node)) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            found += [(alias.name, at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(
                [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module or ""]
            )
            found += [(f"{origin}.{alias.name}".replace("..", "."), at_once) for alias in node.names]
    return found


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def part(module: str) -> str:
    """Return which part of xsp a full name lies in: `xsp.analyses.layer.A2` → `analyses`."""
    names = module.split(".")[1:]
    here = ROOT / "xsp" / names[0] if names else ROOT
    return names[0] if names and (here.is_dir() or here.with_suffix(".py").is_file()) else TABLE_OF_CONTENTS


@pytest.mark.parametrize("path", sources("xsp"), ids=name_of)
def test_a_module_imports_from_the_layers_before_its_own(path: Path) -> None:
    here = part(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if here in (TABLE_OF_CONTENTS, COMMAND):
        return
    assert here in PLACE, f"{here} has no layer; say in LAYERS where it stands"
    for module, _ in imports(path):
        if module.split(".")[0] != "xsp":
            continue
        there = part(module)
        if there == here:
            continue
        assert there in PLACE, f"{path.name} imports {module}, which has no layer"
        assert PLACE[there] < PLACE[here], f"{path.name} imports {module}, which is no layer further in"


def test_the_design_shows_these_layers() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\d+)\. (.*)$", page.partition("## Layers\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(LAYERS) + 1))
    assert [set(re.findall(r"`(\w+)`", names)) for _, names in listed] == LAYERS


def test_no_file_is_longer_than_a_subject_needs() -> None:
    long = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources("xsp")}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_xsp_never_imports_a_collector_by_name() -> None:
    result = [
        f"{path.name}: {module}"
        for path in sources("xsp")
        for module, _ in imports(path)
        if module.split(".")[0] == "xsp_collectors"
    ]
    assert result == []


@pytest.mark.parametrize("path", sources("collectors"), ids=lambda path: path.name)
def test_a_collector_brings_nothing_into_the_measured_process_but_what_it_observes(path: Path) -> None:
    for module, _ in imports(path):
        top = module.split(".")[0]
        if top == "xsp":
            assert part(module) in FOR_COLLECTORS, module
        else:
            assert top in {"cupti", "numpy", "torch", "xsp_collectors", *sys.stdlib_module_names}, module


@pytest.mark.parametrize(
    "module",
    ["collector", "clock", "record.session", "record.calibration", "record.writer", "record.autostep"],
)
def test_the_table_engine_does_not_load_in_the_measured_process(module: str) -> None:
    """Follow what is imported at once, not what a function imports when it is called."""
    seen: set[Path] = set()
    pending = [f"xsp.{module}"]
    while pending:
        path = _file(pending.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        for imported, at_once in imports(path):
            if at_once:
                top = imported.split(".")[0]
                assert top not in {"duckdb", "numpy", "pandas", "pyarrow", "rich", "torch"}, path
                if top == "xsp":
                    pending += [imported, imported.rpartition(".")[0]]


def _file(module: str) -> Path | None:
    """Return the file of a module of xsp's, but the table of contents; None where the name is of something in one."""
    place = ROOT.joinpath(*module.split("."))
    result = next((entry for entry in (place.with_suffix(".py"), place / "__init__.py") if entry.is_file()), None)
    return None if result == ROOT / "xsp" / "__init__.py" else result


def test_no_module_has_a_name_that_says_nothing() -> None:
    named = {name for path in sources("xsp", "collectors") for name in path.with_suffix("").parts}
    assert named & TO_AVOID == set()


def test_the_tests_stand_in_the_folders_of_what_they_test() -> None:
    packages = {path.name for path in (ROOT / "xsp").iterdir() if path.is_dir()}
    beside = {"collectors", "gpu", "system"}
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - beside <= packages


# --- devices ------------------------------------------------------------------------------------------------------

BY_NAME = {
    "collectors/xsp_collectors/cuda/": "the collectors for CUDA",
    "collectors/xsp_collectors/torchops.py": "the profiler of torch names its devices and its kinds of events",
    "xsp/advise/device.py": "texts of advice, which name what a program calls",
    "xsp/advise/waits.py": "texts of advice",
    "xsp/bench/variants.py": "torch's switches of precision",
    "xsp/cached.py": "environment variables",
    "xsp/callnames.py": "names of calls, as profilers write them",
    "xsp/cli/": "examples of what a user types",
    "xsp/cost/flops.py": "names of operators",
    "xsp/counters/ncu.py": "the tool of one manufacturer",
    "xsp/device/ceilings.py": "trade names",
    "xsp/device/contract.py": "where memory is shared",
    "xsp/device/cuda": "the devices of CUDA and ROCm",
    "xsp/device/devices.py": "an example for messages",
    "xsp/device/processor.py": "environment variables",
    "xsp/exporters/traceevents.py": "names of a format",
    "xsp/frameworks.py": "words of texts of advice",
    "xsp/health/device.py": "the option of a profiler, and what its importer stores",
    "xsp/importers/": "names of formats, and of what writes them",
    "xsp/predict/collectives.py": "links with their published rates",
    "xsp/samples/nvml.py": "the library of one manufacturer",
    "xsp/schema.py": "attributes that were stored, by name",
    "xsp/scrub.py": "values that are no secret",
}
"""Beginnings of the paths of files whose code names a kind of device or a product, and why."""

KINDS = re.compile(
    r"cuda|nvidia|\bhip\b|rocm|geforce|\btesla\b|\b(V100|A100|H100|H200|B200|MI\d{3}X?)\b", re.IGNORECASE
)


def names_in_code(path: Path) -> Iterator[str]:
    """Yield the names and the texts of a file, without comments and docstrings: those may state facts of a device."""
    tree = tree_of(path)
    bodies = (body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list))
    said = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value
        yield from (name for field in ("id", "attr", "name", "arg") if isinstance(name := getattr(node, field, 0), str))


def test_only_devices_and_what_is_listed_name_a_kind_of_device_or_a_product() -> None:
    naming = {
        name_of(path)
        for path in sources("xsp", "collectors")
        if any(KINDS.search(name) for name in names_in_code(path))
    }
    assert [path for path in sorted(naming) if not path.startswith(tuple(BY_NAME))] == []
    assert [name for name in BY_NAME if not any(path.startswith(name) for path in naming)] == []


def test_only_devices_ask_torch_for_a_gpu_by_name() -> None:
    """Texts and docstrings may say `torch.cuda` where a program or a format does."""
    asking = {
        name_of(path)
        for path in sources("xsp")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
    }
    assert asking == {"xsp/device/cuda.py", "xsp/device/cudamemory.py"}


def test_no_module_compares_the_kind_of_a_device_by_name() -> None:
    package = ROOT / "xsp"
    kinds = re.compile(r"""(==|!=|\bin\b) *\(?["'](cuda|hip)["']""")
    comparing = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if kinds.search(path.read_text(encoding="utf-8")) and path.parent.name != "device"
    }
    assert comparing == set()


def test_causes_of_an_error_that_form_a_circle_end() -> None:
    first, second, third = ValueError(), OSError(), KeyError()
    first.__cause__, second.__cause__, third.__cause__ = second, third, second
    assert list(causes(first)) == [first, second, third]
    second.__cause__ = second
    assert list(causes(second)) == [second]


def test_only_one_function_follows_the_causes_of_an_error() -> None:
    """Each loop of its own over `__cause__` is one that may have no end."""
    following = {
        name_of(path)
        for path in sources("xsp", "collectors")
        for loop in ast.walk(tree_of(path))
        if isinstance(loop, ast.While)
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and "__cause__" in ast.unparse(node.value)
    }
    assert following == {"xsp/errors.py", "xsp/otlp/transport.py"}, "OTLP clients hide causes in arguments, too"


def test_no_error_is_raised_from_itself() -> None:
    raised = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources("xsp", "collectors")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Name) and may_be(node.exc, node.cause.id)
    ]
    assert raised == []


def may_be(value: ast.expr | None, name: str) -> bool:
    """Return whether an expression may be the object of a name."""
    if isinstance(value, ast.IfExp):
        return may_be(value.body, name) or may_be(value.orelse, name)
    if isinstance(value, ast.BoolOp):
        return any(may_be(each, name) for each in value.values)
    return isinstance(value, ast.Name) and value.id == name
