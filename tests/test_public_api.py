"""What a user sees: few names, all documented, and cheap to import."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import xsp

HEAVY = ["duckdb", "numpy", "opentelemetry", "pandas", "polars", "pyarrow", "rich", "torch"]


def test_the_table_of_contents_is_short_and_every_name_on_it_is_there_and_documented() -> None:
    assert len(xsp.__all__) <= 15
    assert sorted(xsp.__all__) == list(xsp.__all__) == dir(xsp)
    for name in xsp.__all__:
        value = getattr(xsp, name)
        assert name.startswith("__") or inspect.getdoc(value), name


def test_a_name_that_is_not_on_it_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'profiler'"):
        xsp.profiler  # noqa: B018


def loaded_by(code: str) -> list[str]:
    """Return which heavy packages a fresh process has loaded after some code."""
    code = f"{code}\nimport sys, json; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(json.loads(run.stdout))


def test_importing_xsp_and_naming_spans_loads_nothing_heavy() -> None:
    assert loaded_by("import xsp\nwith xsp.span('x'): pass\nxsp.profile('x', out='x')") == []


def test_a_disabled_profile_loads_nothing_heavy_either() -> None:
    assert loaded_by("import xsp\nwith xsp.profile(enabled=False) as p:\n  with p.step(): pass") == []


def test_analyses_load_the_table_engine_when_they_are_asked_for() -> None:
    assert loaded_by("import xsp\nxsp.analyses.A1") == ["duckdb"]


# --- documentation ----------------------------------------------------------------------------------------


def modules() -> Iterator[ModuleType]:
    names = ["xsp"]
    try:
        importlib.import_module("torch")
        names.append("xsp_collectors")
    except ImportError:
        pass
    for name in names:
        package = importlib.import_module(name)
        yield package
        for result in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not result.name.endswith("__main__"):
                yield importlib.import_module(result.name)


def test_every_public_module_class_function_and_method_says_what_it_is() -> None:
    silent = []
    for module in modules():
        if not module.__doc__:
            silent.append(module.__name__)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                silent += [f"{module.__name__}.{entry}" for entry in _undocumented(name, value)]
    assert silent == []


def _undocumented(name: str, value: object) -> Iterator[str]:
    if not inspect.getdoc(value):
        yield name
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if (
                not method.startswith("_")
                and inspect.isfunction(function)
                and not inspect.getdoc(getattr(value, method))
            ):
                yield f"{name}.{method}"


def test_every_error_is_an_xsp_error_and_stands_in_the_tree() -> None:
    from xsp import errors

    tree = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if inspect.isclass(value):
            assert issubclass(value, xsp.XspError)
            assert name in tree


def test_the_columns_of_the_table_are_the_fields_of_a_span() -> None:
    from xsp.schema import COLUMNS, MERGED_COLUMNS, Span

    assert [column.name for column in COLUMNS] == list(Span._fields)
    names = [column.name for column in (*COLUMNS, *MERGED_COLUMNS)]
    assert len(set(names)) == len(names)
    assert all(column.description for column in (*COLUMNS, *MERGED_COLUMNS))
