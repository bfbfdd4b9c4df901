"""The steps applied to a sample before the model and to the model's output after it.

Before: an image is the bytes of a file, then an array of rows, columns and channels (HWC) unless `layout` changes it.
After: an output is one sample's array. Each operation has its own options; unknown options are refused.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from xsp.errors import ManifestError, XspError, first_line, nearest
from xsp.evaluate.manifest import Function, Manifest, Step
from xsp.plugins import importing

Array = npt.NDArray[Any]

MOST_PIXELS = 64 << 20
"""Maximum number of pixels of an image; larger images are refused before they are decoded."""

METHODS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


def decode(data: bytes | Array, color_mode: str = "RGB", decoder: str = "pillow", element_type: str = "uint8") -> Array:
    """Return the pixels of an image, HWC.

    Args:
        data: bytes of a file; an array is taken as pixels in RGB.
        color_mode: RGB, BGR or gray.
        decoder: `pillow`; `pillow-half`, which decodes JPEG at half its size; `torchvision`.
        element_type: type of the pixels, whose values stay 0 to 255.
    """
    if isinstance(data, np.ndarray):
        image = data
    elif decoder == "torchvision":
        with importing(ManifestError, "decode: torchvision is not installed: pip install 'xsp[models]'"):
            import torch
            from torchvision.io import ImageReadMode, decode_image
        with _open_image(data):
            pass  # torchvision has no way to read the size without decoding
        try:
            pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        except RuntimeError as error:
            raise ManifestError(f"decode: torchvision cannot read it ({first_line(error)[:120]})") from error
        image = np.asarray(pixels.permute(1, 2, 0).numpy())
    elif decoder in ("pillow", "pillow-half"):
        image = _decode_with_pillow(data, decoder == "pillow-half")
    else:
        raise ManifestError(f"decode: there is no decoder {decoder!r}; there are pillow, pillow-half and torchvision")
    return np.asarray(color(image, color_mode), element_type)


def color(image: Array, to: str = "BGR") -> Array:
    """Return an RGB image with its channels in the order BGR, or as gray with one channel (ITU-R 601)."""
    mode = to.upper()
    if mode in ("RGB", ""):
        return image
    if mode == "BGR":
        return image[..., ::-1]
    if mode in ("GRAY", "GREY", "L"):
        gray = image.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
        return _as_type_of(gray, image)[..., None]
    raise ManifestError(f"color: {to!r} is not RGB, BGR or gray")


def resize(
    image: Array,
    size: int | Sequence[int] | None = None,
    method: str = "bilinear",
    keep_aspect: bool = False,
    antialias: bool = True,
    keep_aspect_ratio: bool = False,
    max_dimension: int | None = None,
) -> Array:
    """Return an image resized.

    Args:
        image: HWC.
        size: size of the shorter side, or height and width.
        method: one of `METHODS`.
        keep_aspect: with height and width, the largest size that fits in without distortion.
        antialias: average over the source pixels of each pixel; without it, bilinear and nearest use neighbours only.
        keep_aspect_ratio: MLModelScope's name of `keep_aspect`.
        max_dimension: size of the longer side, instead of `size`.
    """
    if method not in METHODS:
        raise ManifestError(f"resize: there is no method {method!r}; there are {', '.join(METHODS)}")
    height, width = image.shape[:2]
    if isinstance(size, (list, tuple)) and len(size) == 1:
        size = size[0]
    if size is None:
        if max_dimension is None:
            raise ManifestError("resize: give the size")
        factor = max_dimension / max(height, width)
        target = max(1, round(height * factor)), max(1, round(width * factor))
    elif isinstance(size, (int, float)):
        # as torchvision rounds: the shorter side is exact, the longer one is cut off
        shorter, longest = int(size), max(1, int(int(size) * max(height, width) / min(height, width)))
        target = (shorter, longest) if height <= width else (longest, shorter)
    elif len(size) != 2:
        raise ManifestError(f"resize: size is {list(size)!r}; give the shorter side, or height and width")
    else:
        target = int(size[0]), int(size[1])
        if keep_aspect or keep_aspect_ratio:
            factor = min(target[0] / height, target[1] / width)
            target = max(1, round(height * factor)), max(1, round(width * factor))
    if target[0] * target[1] > MOST_PIXELS or min(target) < 1:
        raise ManifestError(f"resize: {target[0]} x {target[1]} is not a size of an image")
    if not antialias and method in ("nearest", "bilinear"):
        return _resize_from_neighbours(image, target, method)
    return _resize_with_pillow(image, target, method)


def crop(image: Array, size: int | Sequence[int] | None = None, fraction: float | None = None) -> Array:
    """Return the centre of an image.

    Args:
        image: HWC.
        size: side of a square, or height and width.
        fraction: share of both sides, instead of `size`.
    """
    if (size is None) == (fraction is None):
        raise ManifestError("crop: give size or fraction")
    available = image.shape[:2]
    if fraction is not None:
        target = max(1, round(available[0] * fraction)), max(1, round(available[1] * fraction))
    else:
        assert size is not None
        sides = (size,) if isinstance(size, int) else tuple(size)
        if len(sides) not in (1, 2):
            raise ManifestError(f"crop: size is {size!r}; give one side, or height and width")
        target = int(sides[0]), int(sides[-1])
    if target[0] > available[0] or target[1] > available[1] or min(target) < 1:
        raise ManifestError(f"crop: {target[0]} x {target[1]} does not fit into {available[0]} x {available[1]}")
    top, left = (round((available[axis] - target[axis]) / 2) for axis in (0, 1))
    return image[top : top + target[0], left : left + target[1]]


def normalise(
    value: Array, mean: Any = 0.0, std: Any = 1.0, divide: float = 1.0, element_type: str = "float32"
) -> Array:
    """Return (value / divide - mean) / std per channel, which is the last axis (HWC) or the first (CHW)."""
    if not divide:
        raise ManifestError("normalise: divide is 0")
    scaled = value.astype(np.float64) / divide
    centre, spread = (np.asarray(values, np.float64).reshape(-1) for values in (mean, std))
    for values in (centre, spread):
        if values.size > 1 and scaled.shape[-1] != values.size and scaled.shape[0] != values.size:
            raise ManifestError(f"normalise: {values.size} values for channels, of an array of {scaled.shape}")
    if not spread.all():
        raise ManifestError("normalise: std contains 0")
    channels_last = max(centre.size, spread.size) == 1 or scaled.shape[-1] == max(centre.size, spread.size)
    if not channels_last:
        centre, spread = (
            values.reshape(-1, *[1] * (scaled.ndim - 1)) if values.size > 1 else values for values in (centre, spread)
        )
    return ((scaled - centre) / spread).astype(element_type)


def rescale(value: Array, factor: float = 1 / 255, offset: float = 0.0, element_type: str = "float32") -> Array:
    """Return value * factor + offset."""
    return (value.astype(np.float64) * factor + offset).astype(element_type)


def layout(value: Array, to: str = "CHW") -> Array:
    """Return an HWC image with its axes in another order; a leading N has no effect."""
    order = to.upper().removeprefix("N")
    if order == "HWC":
        return value
    if order == "CHW" and value.ndim == 3:
        return np.ascontiguousarray(value.transpose(2, 0, 1))
    raise ManifestError(f"layout: {to!r} of an array of {value.ndim} axes; an image has CHW or HWC")


def cast(value: Array, to: str = "float32") -> Array:
    """Return the values converted to another type."""
    return value.astype(to)


def reshape(value: Array, shape: Sequence[int] = (-1,)) -> Array:
    """Return the values in another shape."""
    return value.reshape(tuple(shape))


def tokenise(text: Any, vocabulary: int = 30_522, length: int = 128, method: str = "words") -> Array:
    """Return token numbers of words, by a platform-independent hash, or of bytes, padded with 0.

    No real model's tokeniser is included, as nothing is downloaded. Numbers are below `vocabulary`.
    """
    import zlib

    if min(length, vocabulary) < 1:
        raise ManifestError("tokenise: length and vocabulary must be at least 1")
    string = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    if method == "bytes":
        numbers = [1 + byte % max(1, vocabulary - 1) for byte in string.encode()]
    elif method == "words":
        numbers = [1 + zlib.crc32(word.encode()) % max(1, vocabulary - 1) for word in string.lower().split()]
    else:
        raise ManifestError(f"tokenise: there is no method {method!r}; there are words and bytes")
    tokens = np.zeros(length, np.int64)
    tokens[: min(length, len(numbers))] = numbers[:length]
    return tokens


# --- after the model --------------------------------------------------------------------------------------------------


def softmax(output: Array, axis: int = -1) -> Array:
    """Return the probabilities of scores, in float64."""
    exponentials = np.exp(output.astype(np.float64) - output.max(axis=axis, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=axis, keepdims=True))


def argsort(
    output: Array, k: int = 5, features_url: str = "", features_checksum: str = "", labels_url: str = ""
) -> Array:
    """Return the indices of the k largest values of the last axis, largest first; of equal values, lower index first.

    Names of classes (`features_url`) are not fetched.
    """
    del features_url, features_checksum, labels_url
    if k < 1:
        raise ManifestError(f"argsort: k is {k}; give the number of classes to keep, at least 1")
    return np.argsort(-output.astype(np.float64), axis=-1, kind="stable")[..., :k]


def boxes(output: Array, threshold: float = 0.5) -> Array:
    """Return the rows of detections (x1, y1, x2, y2, score, class) whose score is at least the threshold."""
    if output.ndim != 2 or output.shape[1] < 5:
        raise ManifestError(f"boxes: rows of coordinates and score are needed, not an array of {output.shape}")
    return output[output[:, 4] >= threshold]


def segment(output: Array) -> Array:
    """Return the class of each pixel, from scores by class (CHW)."""
    return np.asarray(output.argmax(axis=0))


INPUT_STEPS: dict[str, Callable[..., Array]] = {
    "decode": decode, "color": color, "colour": color, "resize": resize, "crop": crop, "normalise": normalise,
    "normalize": normalise, "rescale": rescale, "layout": layout, "cast": cast, "reshape": reshape,
    "tokenise": tokenise, "tokenize": tokenise,
}  # fmt: skip
OUTPUT_STEPS: dict[str, Callable[..., Array]] = {
    "softmax": softmax, "argsort": argsort, "top_k": argsort, "boxes": boxes, "segment": segment, "cast": cast,
    "reshape": reshape,
}  # fmt: skip


def preprocessor(steps: Sequence[Step], place: str = "steps") -> Callable[[Any], Any]:
    """Return the function that applies all steps before the model to one sample.

    Args:
        steps: the steps, in their order.
        place: where the list is in the manifest, for messages.

    Raises:
        ManifestError: a step or one of its options is unknown.
    """
    return _chain([
        _step_function(step, INPUT_STEPS, "before", f"{place}[{position}]") for position, step in enumerate(steps)
    ])  # fmt: skip


def postprocessor(steps: Sequence[Step], place: str = "steps") -> Callable[[Any], Any]:
    """Return the function that applies all steps after the model to one sample's output."""
    return _chain([
        _step_function(step, OUTPUT_STEPS, "after", f"{place}[{position}]") for position, step in enumerate(steps)
    ])  # fmt: skip


def problems(manifest: Manifest) -> list[str]:
    """Return the reasons why no agent can run a manifest's model or its steps; empty if there are none."""
    model = manifest.model
    reasons = []
    if not model.source and not model.command and not model.endpoint:
        reasons.append(
            "model.source is missing: torchvision:…, timm:…, transformers:…, a .pt2 or .onnx file, or a command"
            + ("; files of a published manifest are not fetched" if model.files else "")
        )
    if model.job == "training":
        reasons.append("model.job: only inference is evaluated; `xsp profile MODEL --train` records training")
    scenario = manifest.scenario
    if scenario.batch > 1 and scenario.kind in ("server", "multi-stream"):
        reasons.append(f"scenario.batch: requests of {scenario.kind} have one input, or one per stream: remove it")
    if scenario.streams > 1 and scenario.kind not in ("multi-stream", "concurrent"):
        reasons.append(f"scenario.streams: {scenario.kind} has none: remove it, or write kind: multi-stream")
    if model.endpoint and scenario.generation is None:
        reasons.append("model.endpoint: an endpoint generates text: give scenario.generation, prompt and output")
    if scenario.generation is not None:
        reasons += _generation_problems(manifest)
    for side, function in (("preprocess", model.preprocess), ("postprocess", model.postprocess)):
        if isinstance(function, str) and function:
            reasons.append(
                f"model.{side} is code in the manifest, which is never run; write it as steps, or in a file beside "
                f"the manifest: {side}: {{function: file.py:name}}"
            )
        elif isinstance(function, Function) and not _is_function_path(function.function):
            reasons.append(f"model.{side}: {function.function!r} is not a function; write file.py:name")
    for side, tensors, operations in (("inputs", model.inputs, INPUT_STEPS), ("outputs", model.outputs, OUTPUT_STEPS)):
        for index, tensor in enumerate(tensors):
            for position, step in enumerate(tensor.steps):
                try:
                    _step_function(step, operations, "before" if side == "inputs" else "after")
                except ManifestError as error:
                    reasons.append(f"model.{side}[{index}].steps[{position}]: {error}")
    return reasons


def _generation_problems(manifest: Manifest) -> list[str]:
    """Return what of a manifest does not go with generated text."""
    model = manifest.model
    excluded = {
        "model.command": model.command, "model.share": model.share, "model.inputs": model.inputs,
        "model.outputs": model.outputs, "model.preprocess": model.preprocess, "model.postprocess": model.postprocess,
        "model.source": model.parsed_source.is_program,
        "dataset.source": manifest.dataset.source != "synthetic",
    }  # fmt: skip
    return [
        f"{name}: not used if requests generate text, see scenario.generation" for name, value in excluded.items()
        if value
    ]  # fmt: skip


def _is_function_path(text: str) -> bool:
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def canonical(manifest: Manifest, with_defaults: bool = False) -> Manifest:
    """Return a manifest whose steps have a canonical form: one name per operation and option, no defaults.

    Args:
        manifest: its unknown steps and options stay unchanged.
        with_defaults: include all options instead, defaults as well.
    """
    model = manifest.model
    sides = {"inputs": (model.inputs, INPUT_STEPS), "outputs": (model.outputs, OUTPUT_STEPS)}
    updated = {
        side: [
            tensor.model_copy(
                update={"steps": [_canonical_step(step, operations, with_defaults) for step in tensor.steps]}
            )
            for tensor in tensors
        ]
        for side, (tensors, operations) in sides.items()
    }
    return manifest.model_copy(update={"model": model.model_copy(update=updated)})


def _canonical_step(step: Step, operations: dict[str, Callable[..., Array]], with_defaults: bool) -> Step:
    function = operations.get(step.op)
    if function is None:
        return step
    parameters = list(inspect.signature(function).parameters.values())[1:]
    options = _named_options(step, [parameter.name for parameter in parameters])
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
    }
    if with_defaults:
        options = {**{name: value for name, value in defaults.items() if value is not None}, **options}
    else:
        options = {name: value for name, value in options.items() if not _is_default(value, defaults.get(name))}
    return Step(op=function.__name__, **options)


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value equals a default and has its type: 1 does not equal true."""
    return default is not None and type(value) is type(default) and bool(value == default)


def _named_options(step: Step, names: Sequence[str]) -> dict[str, Any]:
    options = step.options
    if "value" in options:  # `- crop: 224`
        options[names[0] if names else "value"] = options.pop("value")
    return options


def _step_function(
    step: Step, operations: dict[str, Callable[..., Array]], side: str, place: str = ""
) -> Callable[[Any], Any]:
    """Return the function of a step, with its options; errors of its calls begin with the place in the manifest."""
    function = operations.get(step.op)
    if function is None:
        raise ManifestError(f"there is no step {step.op!r} {side} the model{nearest(step.op, operations)}")
    names = list(inspect.signature(function).parameters)[1:]
    options = _named_options(step, names)
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ManifestError(f"{step.op} has no option {unknown[0]!r}{nearest(unknown[0], names)}")
    options = {name: _option_value(step.op, function, name, value) for name, value in options.items()}
    prefix = f"{place}: " if place else ""

    def apply_step(value: Any) -> Any:
        try:
            return function(value, **options)
        except XspError as error:
            raise ManifestError(f"{prefix}{error}") from error
        except Exception as error:  # an input, or the value of an option, that it does not accept
            subject = f"an array of {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            reason = first_line(error)[:120]
            raise ManifestError(f"{prefix}{step.op}: raises {type(error).__name__} on {subject} ({reason})") from error

    return apply_step


def _option_value(op: str, function: Callable[..., Array], name: str, value: Any) -> Any:
    """Return the value of an option, converted to the type that the operation takes.

    Raises:
        ManifestError: it cannot be converted.
    """
    try:
        return TypeAdapter(get_type_hints(function)[name]).validate_python(value)
    except ValidationError as error:
        types = str(inspect.signature(function).parameters[name].annotation).split(" | ")
        accepted = " or ".join(TYPE_WORDS[name] for name in types if name in TYPE_WORDS)
        raise ManifestError(f"{op}: {name} is {value!r}; write {accepted}") from error


TYPE_WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
    "Sequence[int]": "a list of whole numbers",
}  # fmt: skip
"""Types of options in words."""


def _chain(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def apply_all(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return apply_all


# --- images -----------------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    with importing(ManifestError, "images need Pillow: pip install 'xsp[evaluate]'"):
        from PIL import Image
    return Image


_OBJECT = re.compile(r" <_io\.\w+ object at 0x[0-9a-f]+>")
"""A buffer, as Pillow's messages name it."""


@contextmanager
def _open_image(data: bytes) -> Iterator[Any]:
    """Open an image with Pillow, which reads the header only.

    Raises:
        ManifestError: Pillow cannot read it, or it has more than `MOST_PIXELS`.
    """
    try:
        with _pillow().open(io.BytesIO(data)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ManifestError(f"decode: an image of {image.width} x {image.height} pixels is too large")
            yield image
    except (OSError, SyntaxError, ValueError) as error:
        reason = _OBJECT.sub("", first_line(error))[:120]
        raise ManifestError(f"decode: Pillow cannot read it ({reason})") from error


def _decode_with_pillow(data: bytes, at_half_size: bool) -> Array:
    with _open_image(data) as image:
        if at_half_size:
            image.draft("RGB", (max(1, image.width // 2), max(1, image.height // 2)))
        return np.asarray(image.convert("RGB"))


def _resize_with_pillow(image: Array, target: tuple[int, int], method: str) -> Array:
    library = _pillow()
    resample = getattr(library.Resampling, method.upper())
    size = target[1], target[0]
    if image.dtype == np.uint8 and image.shape[-1] == 3:
        return np.asarray(library.fromarray(np.ascontiguousarray(image)).resize(size, resample))
    planes = [
        np.asarray(library.fromarray(np.ascontiguousarray(image[..., plane], np.float32)).resize(size, resample))
        for plane in range(image.shape[-1])
    ]
    stacked = np.stack(planes, axis=-1)
    return _as_type_of(stacked, image)


def _resize_from_neighbours(image: Array, target: tuple[int, int], method: str) -> Array:
    """Resize from the direct neighbours of each target pixel's centre only, ignoring all other pixels."""
    centres_by_axis = []
    for axis in (0, 1):
        centres = (np.arange(target[axis]) + 0.5) * image.shape[axis] / target[axis] - 0.5
        centres_by_axis.append(centres.clip(0, image.shape[axis] - 1))
    if method == "nearest":
        rows, columns = (
            np.floor(centre + 0.5).astype(int).clip(0, image.shape[axis] - 1)
            for axis, centre in enumerate(centres_by_axis)
        )
        return np.asarray(image[rows][:, columns])
    result = image.astype(np.float64)
    for axis, centres in enumerate(centres_by_axis):
        low = np.floor(centres).astype(int)
        high = np.minimum(low + 1, image.shape[axis] - 1)
        weight = (centres - low).reshape([-1 if axis == dimension else 1 for dimension in range(result.ndim)])
        result = result.take(low, axis) * (1 - weight) + result.take(high, axis) * weight
    return _as_type_of(result, image)


def _as_type_of(values: Array, image: Array) -> Array:
    converted = values.round().clip(0, 255) if image.dtype == np.uint8 else values
    return np.asarray(converted.astype(image.dtype))
