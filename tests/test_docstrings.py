"""Docstrings are true as far as a syntax tree tells: `Args:` names parameters, `Raises:` names classes."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from sources import name_of, sources, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


def section(text: str, title: str) -> list[str]:
    """Return the entries of a section of a docstring, each with the words before its colon."""
    match = re.search(rf"^( *){title}:\n(.*?)(?=^\1\S|\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        return []
    indent = len(match[1]) + 4
    entries = re.findall(rf"^ {{{indent}}}(\S[^:\n]*):", match[2], re.MULTILINE)
    return [name.strip().strip("*") for entry in entries for name in entry.split(",")]


def documented(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | Function, set[str]]]:
    """Yield what has a docstring, with the names that its `Args:` may have; of a class those of its constructor.

    A class without a constructor of its own has its fields, and any name where it inherits one.
    """
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node, parameters(node)
        elif isinstance(node, ast.ClassDef):
            inits = [each for each in node.body if isinstance(each, Function) and each.name in ("__init__", "__new__")]
            fields = {each.target.id for each in node.body
                      if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}  # fmt: skip
            if inits or fields:
                yield node, fields.union(*map(parameters, inits))


def parameters(function: Function) -> set[str]:
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    special = (each.arg for each in (function.args.vararg, function.args.kwarg) if each is not None)
    return {*(each.arg for each in every), *special}


def test_an_entry_under_args_names_a_parameter() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}: {name}"
        for path in sources("xsp", "collectors")
        for node, names in documented(tree_of(path))
        for name in section(ast.get_docstring(node, clean=False) or "", "Args")
        if name not in names
    ]
    assert wrong == []


def test_an_entry_under_raises_names_a_class() -> None:
    trees = {name_of(path): tree_of(path) for path in sources("xsp", "collectors")}
    known = {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}
    known |= {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    known |= {"ArgumentTypeError", "InvalidSpecifier"}  # of argparse and packaging
    wrong = [
        f"{path}:{node.lineno} {node.name}: {name}"
        for path, tree in trees.items()
        for node, _ in documented(tree)
        for name in section(ast.get_docstring(node, clean=False) or "", "Raises")
        if name.rpartition(".")[2] not in known and not name[:1].islower()
    ]
    assert wrong == []


def test_sections_are_read_as_they_are_written() -> None:
    text = "Do it.\n\n    Args:\n        one, two: numbers\n            that are long: very.\n        *rest: more.\n\n    Raises:\n        ValueError: no.\n    "  # noqa: E501
    assert section(text, "Args") == ["one", "two", "rest"]
    assert section(text, "Raises") == ["ValueError"]
    assert section(text, "Returns") == []
