"""How large a model by name is: its parameters are counted on meta tensors, before anything of it is allocated.

The options of a transformers model determine its size together, and by default some have seven billion parameters. Any
client may name any, so they are built in a process of its own with limits of memory and time, without network access.
It stays for further models; if it exceeds a limit, the model is refused, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from xsp import models, processes
from xsp.errors import ManifestError, first_sentence
from xsp.evaluate.manifest import Model
from xsp.evaluate.transports import OFFLINE

MOST_PARAMETERS = 1 << 30
"""Maximum number of parameters and buffers: 4 GiB of floats."""

MOST_MODULES = 100_000
MOST_MEMORY_BYTES = 4 << 30
START_S, COUNT_S = 120.0, 30.0
"""Time limits of starting the process, and of one model."""

MOST_KEPT = 256

_CODE = processes.call_code("xsp.evaluate.web.modelsize", "work")


class ModelSizes:
    """Counts parameters; the count of a model is kept."""

    def __init__(self) -> None:
        """Prepare; the process starts with the first model."""
        self._process: processes.WorkerProcess | None = None
        self._answers: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def objection(self, model: Model, generates: bool = False) -> str | None:
        """Return the reason not to build a model, as a sentence; None if it is small enough.

        Args:
            model: the model.
            generates: whether it generates text, for which models of transformers have a head.

        Raises:
            ManifestError: too many clients wait for an answer.
        """
        if model.parsed_source.source == "micro":  # families of small models
            return None
        shape = list(model.inputs[0].shape) if model.inputs and model.inputs[0].shape else None
        question = {"source": model.source, "sequence": model.sequence, "shape": shape, "generates": generates}
        key = json.dumps(question)
        if not self._lock.acquire(timeout=COUNT_S):
            raise ManifestError("the sizes of other models are being determined; try again later")
        try:
            if key not in self._answers:
                self._answers[key] = self._ask(question)
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)
            answer = self._answers[key]
        finally:
            self._lock.release()
        if "error" in answer:
            return f"model.source: {answer['error']}"
        if answer["parameters"] > MOST_PARAMETERS:
            return f"model.source: it has more than {MOST_PARAMETERS:,} parameters, the limit for all of a model"
        return None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        limit_s = COUNT_S
        if self._process is None:
            try:
                environment = {**processes.environment(), **OFFLINE}
                self._process, limit_s = processes.WorkerProcess(_CODE, str(os.getpid()), env=environment), START_S
            except OSError as error:
                return {"error": f"its size cannot be determined ({error.strerror})"}
        deadline = time.monotonic() + limit_s
        self._process.ask(question)
        if line := self._process.answer(deadline):
            answer: Mapping[str, Any] = json.loads(line)
            return answer
        timed_out = time.monotonic() >= deadline
        self._end()
        limit = f"{limit_s:.0f} s" if timed_out else f"{MOST_MEMORY_BYTES >> 30} GiB"
        return {"error": f"it is too large: describing it takes more than {limit}"}

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _TooLarge(Exception):
    """Raised while a model is built that exceeds a limit; libraries catch no exception of this type."""


def count(source: str, settings: models.Settings) -> int:
    """Return the number of parameters and buffers of a model, or a larger number than `MOST_PARAMETERS`.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    try:
        with _limited():
            built = _build(source, settings)
    except (_TooLarge, MemoryError) as error:
        return int(str(error) or MOST_PARAMETERS + 1)
    module = getattr(built, "model", None)
    if module is None:
        raise ManifestError("it is not a module")
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() for tensor in tensors.values())


def _build(source: str, settings: models.Settings) -> Any:
    """Build a model without memory for its tensors, if it allows that."""
    try:
        return models.build(source, settings, device="meta")
    except (_TooLarge, MemoryError):
        raise
    except Exception:  # some models read values of tensors while they are built; the process has a limit of memory
        return models.build(source, settings)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `_TooLarge` as soon as the modules that are built exceed a limit: the rest would only take time."""
    from torch.nn.modules import module

    parameters = modules = 0

    def on_parameter(_: Any, __: str, parameter: Any) -> None:
        nonlocal parameters
        parameters += 0 if parameter is None else parameter.numel()
        if parameters > 2 * MOST_PARAMETERS:  # some are replaced or shared afterwards
            raise _TooLarge(parameters)

    def on_module(_: Any, __: str, ___: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise _TooLarge(MOST_PARAMETERS + 1)

    hooks = (
        module.register_module_parameter_registration_hook(on_parameter),
        module.register_module_module_registration_hook(on_module),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def work(parent: int, answers: int) -> None:
    """Count the parameters of the models on stdin, one a line: the side of the process.

    Args:
        parent: process ID of the server; this process ends with it.
        answers: descriptor for lines of JSON.
    """
    processes.end_with_parent(parent)
    for library in ("torch", "torchvision", "timm", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    with processes.Questions(answers) as questions:
        for question in questions:
            shape = None if question["shape"] is None else tuple(question["shape"])
            prefill = 1 if question["generates"] else None
            settings = models.Settings(shape=shape, sequence=question["sequence"], prefill=prefill)
            try:
                answer: dict[str, Any] = {"parameters": count(question["source"], settings)}
            except Exception as error:
                answer = {"error": first_sentence(error)}
            questions.answer(answer)
