"""Real models by name, with weights from a seed and matching inputs.

`xsp.modelname` lists the forms of names. torchvision has those of `torchvision.models.list_models()`, timm those of
`timm.list_models()`, transformers types, classes (with their default configuration) and configuration files; and
`micro:path-3` is a small model of a family that varies one measure, see `xsp.micromodels`.

Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xsp import causal, micromodels, modelinputs, modelname
from xsp.device import devices
from xsp.errors import ModelError, PhaseError, first_sentence, nearest
from xsp.modelname import ModelName

IMAGE = (3, 224, 224)
_HOWTO = "torchvision:NAME, timm:NAME, transformers:NAME or file.py:function"


@dataclass(frozen=True)
class Settings:
    """Settings for running a named model."""

    batch: int = 1
    train: bool = False
    seed: int = 0
    shape: tuple[int, ...] | None = None
    """Shape of one sample; None for the shape that the model expects."""

    sequence: int = 128
    """Tokens of one sample, for language models."""

    device: str = "cpu"

    operators: str = "cpu"
    """Kind of the device whose operators a captured step is to have, see `xsp.graph.ondevice`."""

    prefill: int | None = None
    """For a language model: tokens that the step reads, see `xsp.causal`."""

    decode: int | None = None
    """For a language model: tokens after the step, which adds the last of them to a cache of the others."""


@dataclass(frozen=True)
class Workload:
    """A workload to profile: call `step` once per step."""

    name: str
    step: Callable[[], object]
    batch_size: int


@dataclass(frozen=True)
class ModelCall:
    """A module with the arguments of one call."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    remedy: str = ""
    """What to type if the model does not accept its input."""

    prefix: Any = None
    """For a language model that continues from a cache: the tokens before the call."""

    candidates: Callable[[Any], Iterator[Callable[[], dict[str, Any]]]] | None = None
    """Yields makers of keyword arguments for the module on its device, likeliest first; the first accepted are used."""

    state: Callable[[], dict[str, Any]] | None = None
    """Returns further keyword arguments, new for each call: the cache of the tokens in `prefix`."""

    def __call__(self) -> Any:
        """Call the module."""
        return self.model(*self.args, **self.kwargs, **(self.state() if self.state is not None else {}))


def load(spec: str, settings: Settings) -> Workload:
    """Build a named model, its input and its step.

    Args:
        spec: as in this module's documentation.
        settings: batch size, training or inference, seed, device.

    Returns:
        A workload whose step is a forward pass in inference mode, or, for training, forward, backward and an
        SGD step on a stand-in loss (mean square of the first floating-point output).

    Raises:
        ModelError: no such model, library or device, or the model rejects its input; the message says what to type.
    """
    torch = _library("torch", "xsp[torch]")
    _check_device(torch, settings.device)
    call = build(spec, settings)
    step = step_of(on_device(spec, call, settings), settings) if isinstance(call, ModelCall) else call
    return Workload(spec, step, settings.batch)


def build(spec: str, settings: Settings, device: str = "cpu") -> ModelCall | Callable[[], object]:
    """Build a named model and its input, without its step.

    Args:
        spec: as in this module's documentation.
        settings: batch size, shape of the input, seed; the device, on which the step runs, is not used here.
        device: device of new tensors: "cpu", or "meta" for tensors with shapes only, which take no memory.

    Returns:
        The module and its arguments; or, from a user's file, the function that does one step.

    Raises:
        ModelError: no such model, its library is missing, or it cannot be built.
    """
    parsed = modelname.parse(spec)
    source, name = parsed.source, parsed.name
    if not name:
        raise ModelError(f"{spec!r} is not the name of a model; write {_HOWTO}")
    if not parsed.is_python and source not in _SOURCES:
        sources = ", ".join(_SOURCES)
        raise ModelError(f"{spec!r}: there is no source {source!r}; there are {sources} and file.py:function")
    if parsed.is_program_in_library:
        raise ModelError(f"{spec!r}: a program in a file is no model of {source}; write {name}")
    if parsed.options and source != "transformers":
        raise ModelError(f"{spec!r}: models of {source} have no options; omit what follows the question mark")
    torch = _library("torch", "xsp[torch]")
    try:
        torch.manual_seed(settings.seed)
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            call = _SOURCES[source](parsed, settings) if source in _SOURCES else from_file(Path(source), name, settings)
            return call if settings.prefill is None and settings.decode is None else of_phase(spec, call, settings)
    except Exception as error:  # of a library, such as a size of 0 in a configuration, or a seed that is too large
        if isinstance(error, ModelError) or device != "cpu":  # on "meta" the caller tries again, with memory
            raise
        raise ModelError(f"{spec} cannot be built ({type(error).__name__}: {first_sentence(error)})") from error


def of_phase(spec: str, call: ModelCall | Callable[[], object], settings: Settings) -> ModelCall:
    """Return a language model with the arguments of the phase that the settings request.

    Raises:
        ModelError: it is not a causal language model, or other settings exclude a phase.
    """
    if settings.train or settings.shape is not None:
        raise ModelError("--prefill and --decode are steps of inference on tokens: omit --train and --input")
    if not isinstance(call, ModelCall):
        raise PhaseError(f"{spec} is a function that runs a step: --decode and --prefill need the model itself")
    kwargs, prefix = causal.arguments(spec, call.model, settings.batch, settings.prefill, settings.decode)
    return ModelCall(call.model, (), kwargs, call.remedy, prefix)


def from_file(path: Path, name: str, settings: Settings) -> ModelCall | Callable[[], object]:
    """Call a function of a user's file.

    The function takes the batch size. It returns a function that does one step, or a module with its input: one or
    several tensors, a tuple of arguments, a dictionary of keyword arguments, or a tuple and a dictionary.

    Raises:
        ModelError: there is no such file or function, it raises, or returns something else.
    """
    function = function_of(path, name)
    with contextlib.suppress(ValueError):  # some functions have no signature
        try:
            inspect.signature(function).bind(settings.batch)
        except TypeError:
            raise ModelError(f"{path}:{name} must take the batch size: def {name}(batch_size)") from None
    try:
        result = function(settings.batch)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path}:{name} raised {type(error).__name__}: {error}") from error
    if callable(result) and not hasattr(result, "parameters"):
        return result  # type: ignore[no-any-return]
    if isinstance(result, tuple) and len(result) > 1 and hasattr(result[0], "parameters"):
        model, *values = result
        kwargs = dict(values.pop()) if len(values) < 3 and isinstance(values[-1], Mapping) else {}
        if len(values) == 1 and type(values[0]) is tuple:  # a named tuple, such as a packed sequence, is one input
            values = list(values[0])
        return ModelCall(model, tuple(values), kwargs)
    expected = "(module, input), (module, input, input, ...), or a function that runs one step"
    raise ModelError(f"{path}:{name} returned {type(result).__name__}; it must return {expected}")


def function_of(path: Path, name: str) -> Callable[..., Any]:
    """Run a user's file, and return a function of it.

    Raises:
        ModelError: there is no such file or function, or the file raises.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; write path/to/file.py:function")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names_in_file = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelError(f"{path} has no function {name!r}{nearest(name, names_in_file)}")
    return function  # type: ignore[no-any-return]


def _torchvision(parsed: ModelName, settings: Settings) -> ModelCall:
    name = parsed.name
    models = _library("torchvision.models", "xsp[models]")
    torch = sys.modules["torch"]
    if name not in models.list_models():
        raise ModelError(f"torchvision has no model {name!r}{nearest(name, models.list_models())}")
    options = {"weights": None}
    is_detector = name in models.list_models(module=models.detection)
    if is_detector or name in models.list_models(module=models.segmentation):
        options["weights_backbone"] = None
    shape = settings.shape or _torchvision_shape(name, models)
    model = models.get_model(name, **options)
    if name in models.list_models(module=models.optical_flow):
        pair = torch.randn(settings.batch, *shape), torch.randn(settings.batch, *shape)
        return ModelCall(model, pair, {}, _input_remedy(_torchvision_shape(name, models)))
    if is_detector:
        if settings.train:
            raise ModelError(f"torchvision:{name} needs targets for training; use file.py:function")
        images = [torch.rand(*shape) for _ in range(settings.batch)]
        return ModelCall(model, (images,), {}, _input_remedy(_torchvision_shape(name, models)))
    return ModelCall(model, (torch.randn(settings.batch, *shape),), {}, _input_remedy(_torchvision_shape(name, models)))


def _torchvision_shape(name: str, models: Any) -> tuple[int, ...]:
    if name in models.list_models(module=models.video):
        return (3, 16, 224, 224) if name.startswith(("mvit", "swin3d", "s3d")) else (3, 16, 112, 112)
    if name in models.list_models(module=models.optical_flow):
        return (3, 128, 128)
    return (3, 299, 299) if name.startswith("inception") else IMAGE


def _timm(parsed: ModelName, settings: Settings) -> ModelCall:
    name = parsed.name
    timm = _library("timm", "xsp[models]")
    torch = sys.modules["torch"]
    if not timm.is_model(name.split(".")[0]):
        raise ModelError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=False)
    default_shape = tuple(model.default_cfg.get("input_size", IMAGE))
    return ModelCall(
        model, (torch.randn(settings.batch, *(settings.shape or default_shape)),), {}, _input_remedy(default_shape)
    )


def _input_remedy(shape: tuple[int, ...]) -> str:
    return f"it is designed for --input {'x'.join(map(str, shape))}"


def _transformers(parsed: ModelName, settings: Settings) -> ModelCall:
    transformers = _library("transformers", "xsp[models]")
    name = parsed.name
    is_generative = settings.prefill is not None or settings.decode is not None
    config, create = _transformers_config(transformers, parsed, is_generative)
    value: Any
    for key, value in parsed.options:
        if not value or not hasattr(config, key):
            raise ModelError(f"transformers:{name}: the configuration has no value {key!r}{nearest(key, vars(config))}")
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        setattr(config, key, value)
    model = create(modelinputs.set_head_size(config))
    if is_generative:
        return ModelCall(model, (), {})
    if settings.shape is not None:
        return ModelCall(model, (), *modelinputs.arguments_of_shape(name, model, settings.batch, settings.shape))
    max_tokens = getattr(config, "max_position_embeddings", None)
    remedy = f"it takes up to --sequence {max_tokens}" if isinstance(max_tokens, int) and max_tokens > 0 else ""
    sizes = settings.batch, settings.sequence, settings.sequence == Settings.sequence
    kwargs = modelinputs.likely_arguments(model, *sizes)
    return ModelCall(
        model, (), kwargs, remedy, candidates=lambda module: modelinputs.candidate_arguments(module, *sizes)
    )


def _transformers_config(transformers: Any, parsed: ModelName, is_generative: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Return a configuration, and the function that makes its model; with `is_generative`, one that generates text."""
    name, model_types = parsed.name, transformers.CONFIG_MAPPING.keys()
    if parsed.file is not None and not Path(name).is_file():
        raise ModelError(f"transformers:{name}: there is no such configuration file")
    if parsed.file is not None or name in model_types:
        auto = transformers.AutoConfig
        config = auto.for_model(name) if parsed.file is None else auto.from_pretrained(name, local_files_only=True)
        if not is_generative:
            return config, transformers.AutoModel.from_config
        causal.check_config(transformers, name, config)
        return config, transformers.AutoModelForCausalLM.from_config
    model_class = getattr(transformers, name, None)
    if model_class is None or getattr(model_class, "config_class", None) is None:
        hint = nearest(name, [*model_types, *dir(transformers)])
        raise ModelError(f"transformers has no model type or class {name!r}{hint}")
    return model_class.config_class(), model_class


def _micro(parsed: ModelName, settings: Settings) -> ModelCall:
    name = parsed.name
    if settings.shape is not None:
        raise ModelError(f"micro:{name} has the input of its family: omit --input")
    model, value = micromodels.build(name, settings.batch)
    return ModelCall(model, (value,), {})


_SOURCES: dict[str, Callable[[ModelName, Settings], ModelCall]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "micro": _micro,
}


def _check_device(torch: Any, name: str) -> None:
    """Check that torch knows a device and that the device exists.

    Raises:
        ModelError: the device cannot be used.
    """
    try:
        torch.empty(1, device=name).add_(1)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        here = dict.fromkeys(device.torch_name for device in devices.present())
        raise ModelError(
            f"--device {name}: cannot be used here ({first_sentence(error)}); "
            f"type --device {' or --device '.join(here)}"
        ) from error


_SINGLE_VALUE = "more than 1 value per channel"
"""Part of the message with which a batch normalisation refuses a single value per channel in training."""


_NO_GRADIENT = "does not require grad"
"""Part of the message with which autograd refuses to differentiate where gradients are off."""


def _check_input(torch: Any, spec: str, call: ModelCall, train: bool) -> None:
    """Call a model once before anything is recorded, so that a rejected input costs one line and not a run.

    Args:
        torch: the module.
        spec: name of the model.
        call: the model with its arguments.
        train: whether the step trains, so that the model may differentiate in its forward pass.

    Raises:
        ModelError: the call raised.
    """
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor)]
    sizes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
    try:
        if train:
            call()
        else:
            with torch.no_grad() if call.state is None else torch.inference_mode():  # in which the cache was made
                call()
    except Exception as error:
        remedy = "give --batch 2" if _SINGLE_VALUE in str(error) else call.remedy
        if _NO_GRADIENT in str(error) and not train:
            remedy = "its prediction computes gradients: use --train, or file.py:function"
        raise ModelError(
            f"{spec} fails on its input{f' of {sizes}' if sizes else ''} ({first_sentence(error)})"
            f"{f'; {remedy}' if remedy else ''}"
        ) from error


def names(source: str) -> list[str]:
    """Return the names of all models of a source, each with its source as prefix: `timm:vit_tiny_patch16_224`.

    Raises:
        ModelError: there is no such source, or its library is missing.
    """
    sources: dict[str, Callable[[], Iterable[str]]] = {
        "torchvision": lambda: _library("torchvision.models", "xsp[models]").list_models(),
        "timm": lambda: _library("timm", "xsp[models]").list_models(),
        "transformers": lambda: _model_types(_library("transformers.models.auto.modeling_auto", "xsp[models]")),
        "micro": micromodels.names,
    }
    if source not in sources:
        raise ModelError(f"there is no source {source!r}{nearest(source, sources)}; there are {', '.join(sources)}")
    return [f"{source}:{name}" for name in sorted(sources[source]())]


def _model_types(auto: Any) -> Iterable[str]:
    """Return the types of transformers that have a model; others describe only a part, such as a vision tower."""
    return auto.MODEL_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def on_device(spec: str, call: ModelCall, settings: Settings) -> ModelCall:
    """Move a module and its arguments to the device of the settings, and test them with one call.

    Raises:
        ModelError: the module does not accept its input.
    """
    torch = sys.modules["torch"]
    model = call.model.to(settings.device).train(settings.train)
    args, kwargs = moved(call.args, settings.device), moved(call.kwargs, settings.device)
    state = None
    if call.prefix is not None:
        state = causal.cache_maker(spec, model, moved(call.prefix, settings.device))
    if call.candidates is not None:
        return _with_accepted_input(torch, spec, replace(call, model=model), settings)
    result = ModelCall(model, args, kwargs, call.remedy, call.prefix, state=state)
    _check_input(torch, spec, result, settings.train)
    return result


def _with_accepted_input(torch: Any, spec: str, call: ModelCall, settings: Settings) -> ModelCall:
    """Return a module with the first arguments that it accepts.

    Raises:
        ModelError: it accepts none; the message is about the first ones.
    """
    assert call.candidates is not None
    first_error: Exception | None = None
    for make_kwargs in call.candidates(call.model):
        try:
            candidate = ModelCall(call.model, (), moved(make_kwargs(), settings.device), call.remedy)
            _check_input(torch, spec, candidate, settings.train)
        except Exception as error:
            first_error = first_error or error
        else:
            return candidate
    if isinstance(first_error, ModelError):
        raise first_error
    if first_error is not None:
        reason = first_sentence(first_error)
        raise ModelError(f"{spec}: no input can be made for it ({reason}); use file.py:function") from first_error
    required = ", ".join(modelinputs.argument_names(call.model)[0]) or "nothing"
    raise ModelError(f"{spec} takes {required}: give the shape of one sample, --input 80x3000, or use file.py:function")


def step_of(call: ModelCall, settings: Settings) -> Callable[[], object]:
    """Return a function that does one step of a module: see `load`."""
    torch = sys.modules["torch"]
    if not settings.train:

        def predict() -> object:
            with torch.inference_mode():
                return call()

        return predict
    if not any(parameter.requires_grad for parameter in call.model.parameters()):
        raise ModelError(f"{type(call.model).__name__} has no trainable parameter; omit --train")
    # torch itself takes all parameters at once only if they are on an accelerator
    foreach = True if settings.operators != "cpu" else None
    optimizer = torch.optim.SGD(call.model.parameters(), lr=1e-3, momentum=0.9, foreach=foreach)

    def train() -> object:
        optimizer.zero_grad()
        loss = _floating_tensor(torch, call()).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train


def moved(value: Any, device: str) -> Any:
    """Return arguments of a model with their tensors on a device."""
    import torch

    movable: tuple[Any, ...] = (torch.Tensor, torch.nn.utils.rnn.PackedSequence)
    if isinstance(value, movable):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(element, device) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        elements = [moved(element, device) for element in value]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    return value


def _floating_tensor(torch: Any, output: Any) -> Any:
    """Return the first floating-point tensor of a model's output."""
    values: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(output, (Mapping, list, tuple)) else [output]:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise ModelError(
        f"the model returned {type(output).__name__} without a floating-point tensor to train on; "
        "profile it without --train, or write its step as file.py:function"
    )


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(f"{name} is not installed ({error}); pip install '{extra}'") from error
