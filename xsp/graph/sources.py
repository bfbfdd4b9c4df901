"""The choice of a graph's source: a name, a module, or a file."""

from __future__ import annotations

import contextlib
import gzip
import os.path
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsp.device import devices
from xsp.errors import GraphError, UsageError, nearest
from xsp.graph import files
from xsp.graph.node import Graph
from xsp.models import Settings

HEAD = 4096

_SAVED_GRAPH = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"' + files.MARK.encode() + rb'"\s*:')
"""Beginning of a saved graph; an editor may have added a byte-order mark and blanks."""

BY = ("capture", "export")
"""Ways to make the graph of a model."""

OPTIONS = {
    "batch": None, "train": False, "shape": None, "sequence": 128, "prefill": None, "decode": None, "sizes": None,
    "by": "capture", "device": None,
}  # fmt: skip
"""Options of a step that is still to be made, with their defaults; files and traces are of a finished step."""

_OF_MODELS = frozenset(OPTIONS) - {"sizes"}
_OF_ONNX = frozenset(["batch", "sizes"])

_FLAGS = {"shape": "--input", "sizes": "--size"}


def of(
    source: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    train: bool = False,
    seed: int = 0,
    shape: tuple[int, ...] | None = None,
    sequence: int = 128,
    prefill: int | None = None,
    decode: int | None = None,
    sizes: Mapping[str, int] | None = None,
    by: str = "capture",
    device: str | None = None,
) -> Graph:
    """Return the graph of one step: its operator calls with their data flow. Nothing is timed.

    Args:
        source: the name of a model (`torchvision:resnet50`); the path of an ONNX file, a program (`.pt2`), a run, a
            trace or a saved graph; a module of PyTorch, followed by its arguments; a program of `torch.export`; a
            loaded trace.
        args: positional arguments of the module.
        kwargs: keyword arguments of the module.
        batch: samples in a step; default: 1, or that of the file. The batch of a module is unknown without it.
        train: the step is forward, backward and optimizer instead of a prediction in inference mode.
        seed: seed of the weights and inputs of a named model.
        shape: shape of one sample of a named model; default: that of the model.
        sequence: tokens of one sample of a language model.
        prefill: the step of a language model of transformers that reads this many tokens at once.
        decode: the step of such a model that adds the last of this many tokens, with a cache of the others.
        sizes: sizes of symbolic dimensions of an ONNX file, by name.
        device: take the operators of this device (`cuda`), as far as they are known (`xsp.graph.ondevice`); it need not
            be here. Default: those of the processor.
        by: "capture" runs the step and records its operators; "export" uses `torch.export`, for a model or a module.

    Raises:
        GraphError: there is no graph; the message is the reason.
        ModelError: there is no such model, or its library is missing.
        UsageError: the batch is empty, or the source has a fixed step and another batch or kind of step is requested.
    """
    options = {
        "batch": batch, "train": train, "shape": shape, "sequence": sequence, "prefill": prefill, "decode": decode,
        "sizes": sizes, "by": by, "device": device,
    }  # fmt: skip
    if by not in BY:
        raise UsageError(f"a graph cannot be made by {by!r}; there are {', '.join(BY)}")
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} samples has no step: give a number above 0")
    check(source, options)
    settings = Settings(
        batch=batch or 1, train=train, seed=seed, shape=shape, sequence=sequence, prefill=prefill, decode=decode,
        operators="cpu" if device is None else _device_kind(device, by),
    )  # fmt: skip
    if isinstance(source, Graph):
        return source
    if isinstance(source, (str, Path)):
        return _of_name(str(source), settings, batch, sizes, by)
    if hasattr(source, "con") and hasattr(source, "rungs"):
        from xsp.graph import spans

        return spans.of(source)
    if type(source).__name__ == "ExportedProgram":
        from xsp.graph import program

        return program.of(source, "ExportedProgram")
    if callable(source) and hasattr(source, "parameters"):
        if by == "export":
            from xsp.graph import program

            return program.export_module(source, args, kwargs or {}, settings, batch)
        from xsp.graph import captured

        return captured.of_module(source, args, dict(kwargs or {}), settings, batch)
    raise UsageError(
        f"cannot make a graph of {type(source).__name__}: give the name of a model, a path, or a module and "
        "its arguments"
    )


def _device_kind(device: str, by: str) -> str:
    """Return the kind of a device, which need not be here.

    Raises:
        UsageError: there is no such kind, or the graph is not captured.
    """
    kind, colon, number = device.partition(":")
    if colon and not number.isdecimal() and devices.is_id(device):
        raise UsageError(f"--device {device}: write {kind}, or its number, too: {kind}:0")
    if not devices.is_id(device):
        names = devices.kinds()
        raise UsageError(f"--device {device}{nearest(kind, names)}: give one of {', '.join(names)}")
    if by != "capture" and kind != "cpu":
        raise UsageError("a program of torch.export has the operators of no device: omit --device, or --by export")
    return kind


def check(source: Any, options: Mapping[str, Any]) -> None:
    """Refuse settings of a step for a source whose step is fixed.

    Args:
        source: source, as `of` takes it.
        options: values of some of `OPTIONS`.

    Raises:
        UsageError: some of them would have no effect.
    """
    ineffective = changed_options(options) - supported_options(source)
    if ineffective:
        name = source if isinstance(source, (str, Path)) else getattr(source, "name", None) or type(source).__name__
        if "sizes" in ineffective:
            raise UsageError(f"{name} has no named dimensions: omit --size")
        flags = sorted(_FLAGS.get(option, f"--{option}") for option in ineffective)
        raise UsageError(f"{name} has a fixed step, which {', '.join(flags)} cannot change: omit it")


def changed_options(options: Mapping[str, Any]) -> set[str]:
    """Return the options that differ from their defaults."""
    return {name for name, default in OPTIONS.items() if name in options and options[name] != default}


def supported_options(source: Any) -> frozenset[str]:
    """Return the options that affect a source."""
    if isinstance(source, Graph) or hasattr(source, "con") or type(source).__name__ == "ExportedProgram":
        return frozenset()
    if not isinstance(source, (str, Path)):
        return _OF_MODELS
    from xsp.importers import contract

    path = Path(source)  # `os.path` takes a name that is too long for a path, `Path.is_dir` before Python 3.14 does not
    if os.path.isdir(path) or contract.is_url(str(source)):
        return frozenset()
    if os.path.isfile(path):
        return _OF_ONNX if _kind(path) == "onnx" else frozenset()
    return _OF_MODELS if ":" in str(source) else frozenset(OPTIONS)  # no such file: an error follows


def _of_name(spec: str, settings: Settings, batch: int | None, sizes: Mapping[str, int] | None, by: str) -> Graph:
    from xsp.importers import contract  # loads the table engine, which worker processes avoid

    path = Path(spec)
    if os.path.isdir(path) or contract.is_url(spec):
        return _of_trace(spec)
    if os.path.isfile(path):
        return _of_file(path, batch, sizes)
    if ":" not in spec:
        raise GraphError(
            f"{spec}: there is no such file; models are named torchvision:NAME, timm:NAME, transformers:NAME"
        )
    if by == "export":
        from xsp.graph import program

        return program.export_model(spec, settings)
    from xsp.graph import captured

    return captured.of_name(spec, settings)


def is_trace(source: str | Path) -> bool:
    """Return whether `of` reads a source as a trace: a run directory, a URL, or a file of no other kind."""
    from xsp.importers import contract

    spec = str(source)
    path = Path(spec)
    if os.path.isdir(path) or contract.is_url(spec):
        return True
    return os.path.isfile(path) and _kind(path) == "trace"


def _of_file(path: Path, batch: int | None, sizes: Mapping[str, int] | None) -> Graph:
    kind = _kind(path)
    if kind == "graph":
        return files.load(path)
    if kind == "onnx":
        from xsp.graph import onnxfile

        return onnxfile.load(path, batch, sizes)
    if kind == "program":
        from xsp.graph import program

        return program.load(path)
    if kind == "observed":
        from xsp.graph import observed

        return observed.load(path)
    return _of_trace(str(path))


def _kind(path: Path) -> str:
    """Return the kind of a file, from its first bytes."""
    from xsp.importers import chakra

    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise GraphError(f"{path}: cannot be read ({error.strerror or error})") from error
    if head[:2] == b"\x1f\x8b":
        with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as packed:
            head = packed.read(HEAD)
    if _SAVED_GRAPH.match(head):
        return "graph"
    if path.suffix == ".onnx" or head[:1] == b"\x08":  # an ONNX model begins with a number field
        return "onnx"
    if head[:4] == b"PK\x03\x04" or path.suffix == ".pt2":
        return "program"
    return "observed" if chakra.Chakra().recognises(head, str(path)) else "trace"


def _of_trace(location: str) -> Graph:
    from xsp.graph import spans
    from xsp.ingest.load import load

    return spans.of(load(location))
