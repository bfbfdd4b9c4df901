"""A script as Python would run it, and the function of its own, or of a module, whose calls are steps."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from xsp.errors import UsageError
from xsp.recording.session import profile

_STEP = "__xsp_step__"
"""Name of the decorator, among the built-in ones while the script runs."""


def compiled(script: Path, function: str | None) -> CodeType:
    """Compile a script; a function of its own whose calls are to be steps gets a decorator.

    Raises:
        UsageError: it cannot be read, is not Python, or has no such function.
    """
    try:
        tree = ast.parse(script.read_bytes(), filename=str(script))
    except OSError as error:
        raise UsageError(f"{script}: cannot be read ({error.strerror}); give the path of a Python file") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script}: is not Python ({error})") from error
    if function is not None and ":" not in function:
        found = _find(tree, function.split("."))
        if found is None:
            raise UsageError(
                f"--step {function}: {script} has no such function; for one of another module write module:function"
            )
        found.decorator_list.append(ast.copy_location(ast.Name(_STEP, ast.Load()), found))
    return compile(tree, str(script.absolute()), "exec", dont_inherit=True)  # as Python names its main module


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and path == [node.name]:
            return node
        if isinstance(node, ast.ClassDef) and path[0] == node.name and len(path) > 1:
            return _find(node, path[1:])
        if isinstance(node, (ast.If, ast.Try, ast.With)) and (found := _find(node, path)) is not None:
            return found
    return None


@contextlib.contextmanager
def stepping(session: profile, function: str | None) -> Iterator[None]:
    """Make the calls of a function steps, as long as the block lasts; None for no function.

    Raises:
        UsageError: there is no such function in the module that was named with it.
    """
    if function is None:
        yield
        return
    session.has_explicit_steps = True
    _step_in_module(session, function)
    setattr(builtins, _STEP, functools.partial(_stepping, session))
    try:
        yield
    finally:
        delattr(builtins, _STEP)


def _step_in_module(session: profile, function: str) -> None:
    """Make the calls of a function of an importable module steps."""
    module, colon, path = function.partition(":")
    if not colon:
        return
    try:
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, _stepping(session, getattr(owner, name)))
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--step {function}: {error}; write module:function, of a module that can be imported"
        ) from error


def _stepping(session: profile, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return function(*args, **kwargs)

    return step


_executed: list[ModuleType] = []
"""Main modules, whose objects live as long as the interpreter: a `__del__` comes after the handlers at exit."""


def execute(code: CodeType) -> int:
    """Execute a script's code as the main module, and return its exit code."""
    main = ModuleType("__main__")
    main.__file__ = code.co_filename
    main.__dict__["__builtins__"] = builtins
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = main
    _executed.append(main)
    try:
        exec(code, main.__dict__)
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as error:
        _from_script(error, code.co_filename)
        sys.excepthook(type(error), error, error.__traceback__)  # the script may have one of its own
        return 1
    except BaseException:  # an interrupt: Python itself shows it, and ends by its signal
        sys.excepthook = functools.partial(_show, sys.excepthook, code.co_filename)
        raise
    finally:
        if before is not None:
            sys.modules["__main__"] = before
    return 0


def _show(hook: Callable[..., Any], script: str, kind: type[BaseException], error: BaseException, _: object) -> None:
    _from_script(error, script)
    hook(kind, error, error.__traceback__)


def _from_script(error: BaseException, script: str) -> None:
    """Let an error's traceback, which Python's own hook shows, begin in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
