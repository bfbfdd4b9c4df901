"""A program's main module, executed as Python would, and the function whose calls are steps."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

from xsp.errors import UsageError
from xsp.launch.program import LaunchedProgram
from xsp.record.session import profile

_STEP = "__xsp_step__"
"""Name of the decorator among the builtins while the program runs."""


@dataclass(frozen=True)
class Main:
    """A main module that is ready to be executed."""

    code: CodeType
    argument: str
    """The first entry of `sys.argv`."""

    function: str | None
    """The function whose calls are steps: a function of this module, or `module:function` of another one."""

    spec: ModuleSpec | None = None
    """The module's spec; None for a script in a file, as in Python."""


def prepare(program: LaunchedProgram, function: str | None) -> Main:
    """Find and compile a program's main module, and set `sys.path` for it as Python would.

    If a function of the module itself makes the steps, it gets a decorator.

    Raises:
        UsageError: the module does not exist, cannot be read, is not Python, or has no such function.
        Exception: an error that the module's package raises on import.
    """
    if program.is_module:
        _import_first_from(os.getcwd())
        sys.argv = ["-m", *program.args]  # as in Python while it looks for the module
        spec = _spec_of(program.target)
        function = _local_name(function, spec.name, program.target)
        return Main(_code_of(spec, function, program.target), str(spec.origin), function, spec)
    path = Path(program.target)
    if path.is_dir() or (path.is_file() and zipfile.is_zipfile(path)):
        _import_first_from(str(path.absolute()))
        directory_spec = PathFinder.find_spec("__main__", [str(path.absolute())])
        if directory_spec is None:
            raise UsageError(f"{path}: has no __main__.py; give the path of a Python file")
        return Main(_code_of(directory_spec, function, program.target), program.target, function, directory_spec)
    _import_first_from(str(path.resolve().parent))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give the path of a Python file") from error
    function = _local_name(function, path.stem)
    return Main(_compile_code(source, str(path.absolute()), program.target, function), program.target, function)


def _import_first_from(directory: str) -> None:
    """Put a directory first in `sys.path`, where Python had put the directory of xsp's own command."""
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return
    main = sys.modules["__main__"]
    command = getattr(getattr(main, "__spec__", None), "name", "") or Path(sys.argv[0]).stem
    if command in ("xsp", "xsp.cli.__main__") and sys.path:
        sys.path[0] = directory
    else:
        sys.path.insert(0, directory)


def _spec_of(name: str) -> ModuleSpec:
    """Find a module, or the `__main__` of a package, as `python -m` does."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package itself needs a missing module
        raise UsageError(f"-m {name}: {error}; the search starts in {os.getcwd()}") from error
    except ValueError as error:
        raise UsageError(f"-m {name}: {error}") from error
    if spec is None:
        raise UsageError(f"-m {name}: there is no module of this name; the search starts in {os.getcwd()}")
    if spec.submodule_search_locations is None:
        return spec
    if name.endswith("__main__") or importlib.util.find_spec(f"{name}.__main__") is None:
        raise UsageError(f"-m {name}: a package without __main__.py; name a module in it")
    return _spec_of(f"{name}.__main__")


def _code_of(spec: ModuleSpec, function: str | None, target: str) -> CodeType:
    """Return the code of a module; it is compiled again if a function must be decorated."""
    loader: Any = spec.loader
    try:
        if function is not None and ":" not in function:
            return _compile_code(loader.get_source(spec.name) or "", str(spec.origin), target, function)
        code = loader.get_code(spec.name)
    except (AttributeError, ImportError) as error:
        raise UsageError(f"{target}: its Python code is not available ({error})") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{spec.origin}: is not valid Python ({error})") from error
    if code is None:
        raise UsageError(f"{target}: has no Python code")
    return code  # type: ignore[no-any-return]


def _local_name(function: str | None, *names: str) -> str | None:
    """Return a function's name without the main module, which an import would load a second time."""
    module, colon, path = (function or "").partition(":")
    return path if colon and module in names else function


def _compile_code(source: bytes | str, file: str, target: str, function: str | None) -> CodeType:
    try:
        tree = ast.parse(source, filename=file)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{target}: is not valid Python ({error})") from error
    if function is not None and ":" not in function:
        definition = _find(tree, function.split("."))
        if definition is None:
            raise UsageError(
                f"--step {function}: {target} has no such function; for another module write module:function"
            )
        if any(map(_makes_generator, definition.body)):
            raise UsageError(f"--step {function}: it {_RETURNS_EARLY}; name a function that does a step")
        definition.decorator_list.append(ast.copy_location(ast.Name(_STEP, ast.Load()), definition))
    return compile(tree, file, "exec", dont_inherit=True)  # with Python's file name for a main module


def _makes_generator(node: ast.AST) -> bool:
    """Return whether a node makes its function a generator."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    return isinstance(node, (ast.Yield, ast.YieldFrom)) or any(map(_makes_generator, ast.iter_child_nodes(node)))


_BLOCKS = (ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For, ast.While, ast.Match, ast.match_case)


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef | None:
    """Return the definition of a function, by the parts of its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and path == [node.name]:
            return node
        if isinstance(node, ast.ClassDef) and path[0] == node.name and len(path) > 1:
            return _find(node, path[1:])
        if isinstance(node, _BLOCKS) and (definition := _find(node, path)) is not None:
            return definition
    return None


@contextlib.contextmanager
def function_steps(session: profile, function: str | None) -> Iterator[None]:
    """Make the calls of a function steps during the block; do nothing if it is None.

    Raises:
        UsageError: the named module has no such function.
    """
    if function is None:
        yield
        return
    session.has_explicit_steps = True
    _step_in_module(session, function)
    setattr(builtins, _STEP, functools.partial(_wrap_step, session))
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
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part)
        target = getattr(owner, name)
        if isinstance(owner, type):
            target = inspect.getattr_static(owner, name)
        is_wrapped = isinstance(target, (staticmethod, classmethod))
        _check_function(target.__func__ if is_wrapped else target, path)
        setattr(
            owner,
            name,
            type(target)(_wrap_step(session, target.__func__)) if is_wrapped else _wrap_step(session, target),
        )
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"--step {function}: {error}; write module:function, of a module that can be imported"
        ) from error


def _check_function(function: Any, name: str) -> None:
    """Check that a call of a function does a step, and that the function can be replaced by another one.

    Raises:
        TypeError: it is no function; or its call returns before its work begins.
    """
    if not (callable(function) and inspect.isroutine(function)):
        raise TypeError(f"{name} is not a function")
    if any(is_deferred(function) for is_deferred in (inspect.isgeneratorfunction, inspect.iscoroutinefunction)):
        raise TypeError(f"{name} {_RETURNS_EARLY}")


_RETURNS_EARLY = "is a generator or a coroutine, whose call returns before its work begins"


def _wrap_step(session: profile, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return function(*args, **kwargs)

    return step


_executed_modules: list[ModuleType] = []
"""Main modules, kept so that their objects live as long as the interpreter: `__del__` runs after the exit handlers."""


def execute(main: Main, args: tuple[str, ...]) -> int:
    """Execute a program's main module with its arguments, and return its exit code."""
    code, spec = main.code, main.spec
    sys.argv = [main.argument, *args]
    module = ModuleType("__main__")
    module.__file__ = code.co_filename
    module.__dict__.update(__builtins__=builtins, __cached__=spec.cached if spec else None)
    module.__loader__ = spec.loader if spec else SourceFileLoader("__main__", code.co_filename)
    if spec is not None:
        module.__spec__, module.__package__ = spec, spec.parent
    previous = sys.modules.get("__main__")
    sys.modules["__main__"] = module
    # under xsp's own command it stays there: the program's threads and exit handlers may pickle its objects
    stays_main = previous is None or _is_of_command(previous)
    if not stays_main:
        _executed_modules.append(module)
    try:
        exec(code, module.__dict__)
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as error:
        _trim_traceback(error, code.co_filename)
        sys.excepthook(type(error), error, error.__traceback__)  # the script may have set its own
        return 1
    except BaseException:  # an interrupt: Python itself prints it, and ends by its signal
        sys.excepthook = functools.partial(_show, sys.excepthook, code.co_filename)
        raise
    finally:
        if previous is not None and not stays_main:
            sys.modules["__main__"] = previous
    return 0


def _is_of_command(main: ModuleType) -> bool:
    """Return whether a main module is that of xsp's own command."""
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return getattr(spec, "name", "") == "xsp.cli.__main__" or (spec is None and PurePath(file or "").stem == "xsp")


def _show(hook: Callable[..., Any], script: str, kind: type[BaseException], error: BaseException, _: object) -> None:
    _trim_traceback(error, script)
    hook(kind, error, error.__traceback__)


def _trim_traceback(error: BaseException, script: str) -> None:
    """Make an error's traceback, which Python's hook prints, begin in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
