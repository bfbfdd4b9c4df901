"""Predictors run a model by three calls, open, predict and close; here are those for PyTorch and ONNX Runtime.

Any object with these three calls can be evaluated; `xsp.evaluate.conformance` checks whether an object satisfies them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from xsp import models
from xsp.device.contract import Device
from xsp.errors import ManifestError, ModelError, XspError, first_line
from xsp.evaluate import agents, hardware, sharing
from xsp.evaluate.datasets import InputSpec
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array
from xsp.plugins import importing

Batch = Mapping[str, Array]
"""Arrays by input name, samples along the first axis."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a batch."""

    outputs: tuple[Array, ...]
    took_ns: int | None = None
    """Time reported by a simulator; None if the clock counts."""


class Handle(Protocol):
    """An open model."""

    takes: Mapping[str, InputSpec]
    """Its inputs, by name."""


class Predictor(Protocol):
    """The three calls that a predictor must provide."""

    def open(self, manifest: Manifest, folder: Path, level: str) -> Any:
        """Return the handle of a model that is ready to predict; it may prepare for the manifest's scenario.

        Args:
            manifest: the model to open.
            folder: base of relative paths in the manifest.
            level: level of the trace that will be recorded around predictions, or empty.

        Raises:
            ManifestError: it cannot be opened, with the reason.
        """
        ...

    def predict(self, handle: Any, batches: Iterable[Batch]) -> Iterator[Answer]:
        """Yield an answer for each batch, before the next batch is taken."""
        ...

    def close(self, handle: Any) -> None:
        """Release the handle's resources; a second call does nothing."""
        ...


def of(manifest: Manifest, trusted: bool) -> Predictor:
    """Return the predictor of a manifest.

    Args:
        manifest: any manifest.
        trusted: whether code that it names may run: Python files, and commands.

    Raises:
        ManifestError: there is no predictor for it, or it would run untrusted code.
    """
    source = manifest.model.parsed_source
    if manifest.model.command or source.is_python:
        if not trusted:
            raise ManifestError(agents.trust_objections(manifest)[0])
        if manifest.model.command:
            from xsp.evaluate.jsonlines import Command

            return Command()
    return Onnx() if source.is_program and source.source.endswith(".onnx") else Torch()


def answer(predictor: Predictor, handle: Any, batch: Batch) -> Answer:
    """Return the answer to one batch.

    Raises:
        ManifestError: the model raises an error, such as a model that was exported for another batch size.
    """
    try:
        return next(iter(predictor.predict(handle, [batch])))
    except XspError:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(array.shape)) for array in batch.values())
        device = getattr(handle, "device", None)  # of a predictor of others it may be anything
        remedy = hardware.remedy(device if isinstance(device, Device) else None, error)
        raise ManifestError(
            f"model: raises {type(error).__name__} on {shapes} ({first_line(error)}){remedy}"
        ) from error


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@dataclass
class Module:
    """A PyTorch model."""

    takes: Mapping[str, InputSpec]
    module: Any
    positional_count: int
    """Number of inputs that are positional arguments; their names are indices."""

    has_list_argument: bool
    """Whether its only argument is a list of samples, as for detectors."""

    dtype: Any
    device: Device
    notes: tuple[str, ...] = ()
    """Notes on the model for the result."""


class Torch:
    """Predictor for models by name with weights from a seed, functions in files, and torch.export programs."""

    def open(self, manifest: Manifest, folder: Path, level: str) -> Module:
        """Build or load the model, on a GPU if the manifest requires one."""
        del level
        with importing(ManifestError, "PyTorch is not installed: pip install 'xsp[models]'"):
            import torch
        device = hardware.usable(manifest.hardware)
        with hardware.opening(device):
            return self._opened(torch, manifest, folder, device)

    def _opened(self, torch: Any, manifest: Manifest, folder: Path, on: Device) -> Module:
        model, device = manifest.model, on.torch_name
        dtype = getattr(torch, model.precision)
        drawn: list[str] = []
        notes: list[str] = []
        if model.share:
            module, args, kwargs, shared = _load_shared(torch, manifest, folder, device)
            drawn, notes = shared.drawn, [shared.note]
        elif model.parsed_source.is_program:
            module, args, kwargs = _load_exported(torch, manifest, folder)
        else:
            module, args, kwargs = _build(manifest, folder, device)
            if not model.parsed_source.is_python:  # the model of a file has its own weights
                drawn = draw_zero_weights(torch, module, model.seed)
        has_list = len(args) == 1 and isinstance(args[0], list)
        tensors = {str(index): tensor for index, tensor in enumerate(args[0] if has_list else args)}
        if has_list:
            tensors = {"0": tensors["0"][None]}
        vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
        takes = {name: _input_spec(torch, tensor, name, vocabulary) for name, tensor in {**tensors, **kwargs}.items()}
        if dtype is not torch.float32 and not model.share:
            module = module.to(dtype)
        if drawn:
            notes.append(drawn_note(drawn))
        notes = [*notes, *hardware.processor_note(manifest.hardware)]
        return Module(takes, module.to(device), len(tensors), has_list, dtype, on, tuple(notes))

    def predict(self, handle: Module, batches: Iterable[Batch]) -> Iterator[Answer]:
        """Yield the tensors of each answer, in their order."""
        import torch

        with torch.inference_mode():
            for batch in batches:
                args, kwargs = arguments(handle, batch)
                output = handle.module(*args, **kwargs)
                yield Answer(tuple(_torch_array(torch, tensor) for tensor in _leaves(torch, output)))

    def close(self, handle: Module) -> None:
        """Release the model."""
        handle.module = None


def arguments(handle: Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the module's arguments."""
    import torch

    tensors = {}
    for name, value in batch.items():
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        tensors[name] = tensor.to(handle.device.torch_name, handle.dtype if tensor.is_floating_point() else None)
    args = tuple(tensors.pop(str(index)) for index in range(handle.positional_count))
    return (([*args[0]],) if handle.has_list_argument else args), tensors


def _build(manifest: Manifest, folder: Path, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Build the model of a manifest on a device.

    Raises:
        ManifestError: the source names no model that can be built.
    """
    source, settings = source_of(manifest, folder, device)
    try:
        built = models.on_device(source, _build_on_host(source, settings), settings)
    except ModelError as error:
        raise ManifestError(f"model.source: {error}") from error
    built.model.eval()
    return built.model, built.args, built.kwargs


def source_of(manifest: Manifest, folder: Path, device: str) -> tuple[str, models.Settings]:
    """Return the name of a manifest's model, with paths from its folder, and the settings to build it."""
    model = manifest.model
    parsed, source = model.parsed_source, model.source
    if parsed.is_python:
        source = str(folder / source)
    elif parsed.file is not None:  # a configuration
        source = f"{parsed.source}:{folder / source.partition(':')[2]}"
    shape = tuple(model.inputs[0].shape) if model.inputs and model.inputs[0].shape else None
    return source, models.Settings(batch=1, seed=model.seed, shape=shape, sequence=model.sequence, device=device)


def _build_on_host(source: str, settings: models.Settings) -> models.ModelCall:
    built = models.build(source, settings)
    if not isinstance(built, models.ModelCall):
        raise ManifestError(f"model.source: {source} is a function that runs a step, not a model")
    return built


def _load_shared(
    torch: Any, manifest: Manifest, folder: Path, device: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any], sharing.SharedModel]:
    """Return a model by name, attached to weights in the store, with its arguments."""
    if device != "cpu":
        raise ManifestError("model.share: weights are shared only in host memory; omit hardware.gpu, or share")
    model = manifest.model
    source, settings = source_of(manifest, folder, device)
    dtype = getattr(torch, model.precision)
    try:
        shared = sharing.load(
            manifest, source, lambda: _build_on_host(source, settings),
            lambda module: draw_zero_weights(torch, module, model.seed), dtype,
        )  # fmt: skip
        built = shared.built
        if dtype is torch.float32:
            built = models.on_device(source, built, settings)
        elif built.candidates is not None:  # trials with float32 inputs determine which it takes
            raise ManifestError(f"model.share: {source} can be shared only with precision float32; omit share")
    except ModelError as error:
        raise ManifestError(f"model.source: {error}") from error
    return built.model, built.args, built.kwargs, shared


def draw_zero_weights(torch: Any, module: Any, seed: int) -> list[str]:
    """Draw the weights of linear and convolutional layers that are zero throughout, and return the layers' names.

    Vision transformers and MLP mixers initialise their last layer to zero, so without training their outputs are
    constant, whatever is computed before. The drawn values are normal with a standard deviation of
    1 / sqrt(inputs per output), from a generator per layer: they depend only on the seed and the layer's name.

    Args:
        torch: the library.
        module: on the CPU.
        seed: seed of the weights.
    """
    layer_types = torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
    drawn = []
    for name, layer in module.named_modules():
        if not isinstance(layer, layer_types) or not layer.weight.numel() or bool(layer.weight.any()):
            continue
        generator = torch.Generator().manual_seed((seed << 32 ^ zlib.crc32(name.encode())) % (1 << 63))
        with torch.no_grad():
            layer.weight.normal_(0, 1 / math.sqrt(layer.weight[0].numel()), generator=generator)
        drawn.append(name or "the model")
    return drawn


def drawn_note(names: list[str]) -> str:
    """Return a note on layers whose weights were drawn."""
    layers = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{layers} is initialised with zeros, so outputs would not depend on the input: drawn from the seed instead"


def _load_exported(torch: Any, manifest: Manifest, folder: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    path = model_file(manifest, folder)
    try:
        program = torch.export.load(path)
        args, kwargs = program.example_inputs or ((), {})
        return program.module(), tuple(args), dict(kwargs)
    except Exception as error:  # a damaged file can raise any error
        reason = first_line(error)
        raise ManifestError(f"model.source: {path.name} is not a valid program of torch.export ({reason})") from error


def model_file(manifest: Manifest, folder: Path) -> Path:
    """Return the path of the model file.

    Raises:
        ManifestError: there is no such file.
    """
    source = manifest.model.source
    path = folder / source
    if not path.is_file():
        raise ManifestError(f"model.source: there is no file {source!r}")
    return path


def check_files(manifest: Manifest, folder: Path, trusted: bool) -> None:
    """Compare the checksums in `model.files` with those of the files; missing files are skipped.

    Args:
        manifest: any manifest.
        folder: base of relative paths in the manifest.
        trusted: whether files outside the folder may be read.

    Raises:
        ManifestError: a checksum differs, or a file cannot be read.
    """
    for file in manifest.model.files:
        path = folder / file.path
        try:
            if not file.checksum or (agents.is_outside_folder(file.path) and not trusted) or not path.is_file():
                continue
            actual = checksum(path, file.checksum)
        except OSError as error:
            raise ManifestError(f"model.files: {file.path} cannot be read ({error.strerror})") from error
        if actual != file.checksum.lower():
            raise ManifestError(f"model.files: {file.path} has the checksum {actual}, not {file.checksum}")


def checksum(path: Path, expected: str = "sha256:") -> str:
    """Return the checksum of a file, by the algorithm and in the form of `expected`."""
    prefix, colon, value = expected.lower().partition(":")
    algorithm = prefix if colon else {32: "md5", 40: "sha1", 64: "sha256"}.get(len(expected), "")
    if algorithm not in ("md5", "sha1", "sha256") or (colon and not value and prefix != "sha256"):
        raise ManifestError(f"model.files: the checksum {expected!r} is not md5, sha1 or sha256")
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}" if colon else digest.hexdigest()


def _input_spec(torch: Any, value: Any, name: str, vocabulary: int | None) -> InputSpec:
    if not isinstance(value, torch.Tensor):
        raise ManifestError(f"model.source: its input {name} is {type(value).__name__}, not a tensor")
    shape = tuple(value.shape[1:])
    if value.is_floating_point():
        return InputSpec(shape)
    dtype = str(value.dtype).removeprefix("torch.")
    if name.endswith("input_ids") and isinstance(vocabulary, int):
        return InputSpec(shape, dtype, vocabulary)
    return InputSpec(shape, dtype, fixed=value[0].cpu().numpy())


def _leaves(torch: Any, value: Any) -> Iterator[Any]:
    """Yield the tensors of an output in their order; those of a mapping in the order of its keys."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _leaves(torch, element)
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _leaves(torch, element)


def _torch_array(torch: Any, value: Any) -> Array:
    tensor = value.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy())


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


ONNX_DTYPES = frozenset({"bool", *(f"float{bits}" for bits in (16, 32, 64)),
                     *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})  # fmt: skip
"""Types of inputs for which samples can be generated."""


@dataclass
class Session:
    """A model in ONNX Runtime."""

    takes: Mapping[str, InputSpec]
    session: Any
    device: Device


class Onnx:
    """Predictor for ONNX files, by ONNX Runtime."""

    def open(self, manifest: Manifest, folder: Path, level: str) -> Session:
        """Load the file; dynamic sizes are those of the manifest's inputs, or 1."""
        del level
        path = model_file(manifest, folder)
        with importing(ManifestError, "ONNX files are run by ONNX Runtime: pip install 'xsp[onnxruntime]'"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        if manifest.software.threads is not None:
            options.intra_op_num_threads = manifest.software.threads
        device = hardware.usable(manifest.hardware)
        if not device.is_host and device.onnx_provider not in onnxruntime.get_available_providers():
            raise ManifestError(
                f"hardware.gpu: this ONNX Runtime has no {device.onnx_provider or 'provider'} for {device.id}: install "
                "a build of ONNX Runtime for it (onnxruntime-gpu), or hardware: {gpu: none}"
            )
        providers = [*([] if device.is_host else [device.onnx_provider]), "CPUExecutionProvider"]
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            reason = first_line(error)
            raise ManifestError(f"model.source: ONNX Runtime cannot load {path.name} ({reason})") from error
        shapes = [spec.shape for spec in manifest.model.inputs]
        takes = {}
        for index, argument in enumerate(session.get_inputs()):
            shape = shapes[index] if index < len(shapes) and shapes[index] else [
                size if isinstance(size, int) and size > 0 else 1 for size in argument.shape[1:]
            ]  # fmt: skip
            dtype = {"float": "float32", "double": "float64"}.get(onnx_type := argument.type[7:-1], onnx_type)
            if dtype not in ONNX_DTYPES:
                raise ManifestError(
                    f"model.source: its input {argument.name} is {argument.type}, which samples cannot have"
                )
            takes[argument.name] = InputSpec(tuple(shape), dtype, None if dtype.startswith("float") else 2)
        return Session(takes, session, device)

    def predict(self, handle: Session, batches: Iterable[Batch]) -> Iterator[Answer]:
        """Yield the outputs of each batch, in the order of the file."""
        for batch in batches:
            outputs = handle.session.run(None, {name: np.ascontiguousarray(array) for name, array in batch.items()})
            yield Answer(tuple(map(_onnx_array, outputs)))

    def close(self, handle: Session) -> None:
        """Release the session."""
        handle.session = None


def _onnx_array(value: Any) -> Array:
    """Return an output as an array of numbers or of text; a list of mappings (scikit-learn's ZipMap) as its values."""
    if isinstance(value, list) and value and all(isinstance(mapping, Mapping) for mapping in value):
        value = [list(mapping.values()) for mapping in value]
    array = np.asarray(value)
    return array.astype(str) if array.dtype == object else array  # the bytes of objects are addresses


# --- threads ----------------------------------------------------------------------------------------------------------


def thread_count() -> int | None:
    """Return the number of threads that PyTorch uses; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    return torch.get_num_threads()


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of PyTorch's threads within the block."""
    try:
        import torch
    except ImportError:
        yield
        return
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
