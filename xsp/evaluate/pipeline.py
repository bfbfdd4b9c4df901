"""The steps applied to a sample before the model and to the model's output after it.

Before: an image is the bytes of a file, then an array of rows, columns and channels (HWC) unless `layout` changes it.
After: an output is one sample's array. Each operation has its own options; unknown options are refused.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xsp.errors import ManifestError, XspError, nearest
from xsp.evaluate.manifest import Function, Manifest, Step

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
        image = _by_torchvision(data)
    elif decoder in ("pillow", "pillow-half"):
        image = _by_pillow(data, decoder == "pillow-half")
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
        return _as_before(gray, image)[..., None]
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
    else:
        target = int(size[0]), int(size[1])
        if keep_aspect or keep_aspect_ratio:
            factor = min(target[0] / height, target[1] / width)
            target = max(1, round(height * factor)), max(1, round(width * factor))
    if target[0] * target[1] > MOST_PIXELS or min(target) < 1:
        raise ManifestError(f"resize: {target[0]} x {target[1]} is not a size of an image")
    if not antialias and method in ("nearest", "bilinear"):
        return _neighbours(image, target, method)
    return _by_pillow_resized(image, target, method)


def crop(image: Array, size: int | Sequence[int] | None = None, fraction: float | None = None) -> Array:
    """Return the centre of an image.

    Args:
        image: HWC.
        size: side of a square, or height and width.
        fraction: share of both sides, instead of `size`.
    """
    if (size is None) == (fraction is None):
        raise ManifestError("crop: give size or fraction")
    have = image.shape[:2]
    if fraction is not None:
        wanted = max(1, round(have[0] * fraction)), max(1, round(have[1] * fraction))
    else:
        assert size is not None
        sides = (size,) if isinstance(size, int) else tuple(size)
        if len(sides) not in (1, 2):
            raise ManifestError(f"crop: size is {size!r}; give one side, or height and width")
        wanted = int(sides[0]), int(sides[-1])
    if wanted[0] > have[0] or wanted[1] > have[1] or min(wanted) < 1:
        raise ManifestError(f"crop: {wanted[0]} x {wanted[1]} does not fit into {have[0]} x {have[1]}")
    top, left = (round((have[axis] - wanted[axis]) / 2) for axis in (0, 1))
    return image[top : top + wanted[0], left : left + wanted[1]]


def normalise(
    value: Array, mean: Any = 0.0, std: Any = 1.0, divide: float = 1.0, element_type: str = "float32"
) -> Array:
    """Return (value / divide - mean) / std per channel, which is the last axis (HWC) or the first (CHW)."""
    made = value.astype(np.float64) / divide
    centre, spread = (np.asarray(each, np.float64).reshape(-1) for each in (mean, std))
    for each in (centre, spread):
        if each.size > 1 and made.shape[-1] != each.size and made.shape[0] != each.size:
            raise ManifestError(f"normalise: {each.size} values for channels, of an array of {made.shape}")
    if not spread.all():
        raise ManifestError("normalise: std contains 0")
    last = max(centre.size, spread.size) == 1 or made.shape[-1] == max(centre.size, spread.size)
    if not last:
        centre, spread = (
            each.reshape(-1, *[1] * (made.ndim - 1)) if each.size > 1 else each for each in (centre, spread)
        )
    return ((made - centre) / spread).astype(element_type)


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

    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    if method == "bytes":
        numbers = [1 + byte % max(1, vocabulary - 1) for byte in said.encode()]
    elif method == "words":
        numbers = [1 + zlib.crc32(word.encode()) % max(1, vocabulary - 1) for word in said.lower().split()]
    else:
        raise ManifestError(f"tokenise: there is no method {method!r}; there are words and bytes")
    made = np.zeros(length, np.int64)
    made[: min(length, len(numbers))] = numbers[:length]
    return made


# --- after the model --------------------------------------------------------------------------------------------------


def softmax(output: Array, axis: int = -1) -> Array:
    """Return the probabilities of scores, in float64."""
    made = np.exp(output.astype(np.float64) - output.max(axis=axis, keepdims=True))
    return np.asarray(made / made.sum(axis=axis, keepdims=True))


def argsort(
    output: Array, k: int = 5, features_url: str = "", features_checksum: str = "", labels_url: str = ""
) -> Array:
    """Return the indices of the k largest values of the last axis, largest first; of equal values, lower index first.

    Names of classes (`features_url`) are not fetched.
    """
    del features_url, features_checksum, labels_url
    return np.argsort(-output.astype(np.float64), axis=-1, kind="stable")[..., :k]


def boxes(output: Array, threshold: float = 0.5) -> Array:
    """Return the rows of detections (x1, y1, x2, y2, score, class) whose score is at least the threshold."""
    if output.ndim != 2 or output.shape[1] < 5:
        raise ManifestError(f"boxes: rows of coordinates and score are needed, not an array of {output.shape}")
    return output[output[:, 4] >= threshold]


def segment(output: Array) -> Array:
    """Return the class of each pixel, from scores by class (CHW)."""
    return np.asarray(output.argmax(axis=0))


BEFORE: dict[str, Callable[..., Array]] = {
    "decode": decode, "color": color, "colour": color, "resize": resize, "crop": crop, "normalise": normalise,
    "normalize": normalise, "rescale": rescale, "layout": layout, "cast": cast, "reshape": reshape,
    "tokenise": tokenise, "tokenize": tokenise,
}  # fmt: skip
AFTER: dict[str, Callable[..., Array]] = {
    "softmax": softmax, "argsort": argsort, "top_k": argsort, "boxes": boxes, "segment": segment, "cast": cast,
    "reshape": reshape,
}  # fmt: skip


def before(steps: Sequence[Step]) -> Callable[[Any], Any]:
    """Return the function that applies all steps before the model to one sample.

    Raises:
        ManifestError: a step or one of its options is unknown.
    """
    return _chain([_bound(each, BEFORE, "before") for each in steps])


def after(steps: Sequence[Step]) -> Callable[[Any], Any]:
    """Return the function that applies all steps after the model to one sample's output."""
    return _chain([_bound(each, AFTER, "after") for each in steps])


def wrong(manifest: Manifest) -> list[str]:
    """Return the reasons why no agent can run a manifest's model or its steps; empty if there are none."""
    model = manifest.model
    found = []
    if not model.source and not model.command:
        found.append(
            "model.source is missing: torchvision:…, timm:…, transformers:…, a .pt2 or .onnx file, or a command"
            + ("; files of a published manifest are not fetched" if model.files else "")
        )
    if model.job == "training":
        found.append("model.job: only inference is evaluated; `xsp profile MODEL --train` records training")
    scenario = manifest.scenario
    if scenario.batch > 1 and scenario.kind in ("server", "multi-stream"):
        found.append(f"scenario.batch: requests of {scenario.kind} have one input, or one per stream: remove it")
    if scenario.streams > 1 and scenario.kind != "multi-stream":
        found.append(f"scenario.streams: {scenario.kind} has none: remove it, or write kind: multi-stream")
    for side, function in (("preprocess", model.preprocess), ("postprocess", model.postprocess)):
        if isinstance(function, str) and function:
            found.append(
                f"model.{side} is code in the manifest, which is never run; write it as steps, or in a file beside "
                f"the manifest: {side}: {{function: file.py:name}}"
            )
        elif isinstance(function, Function) and not _names_function(function.function):
            found.append(f"model.{side}: {function.function!r} is not a function; write file.py:name")
    for side, tensors, known in (("inputs", model.inputs, BEFORE), ("outputs", model.outputs, AFTER)):
        for number, tensor in enumerate(tensors):
            for place, step in enumerate(tensor.steps):
                try:
                    _bound(step, known, "before" if side == "inputs" else "after")
                except ManifestError as error:
                    found.append(f"model.{side}[{number}].steps[{place}]: {error}")
    return found


def _names_function(text: str) -> bool:
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def canonical(manifest: Manifest, spelled_out: bool = False) -> Manifest:
    """Return a manifest whose steps have a canonical form: one name per operation and option, no defaults.

    Args:
        manifest: its unknown steps and options stay unchanged.
        spelled_out: include all options instead, defaults as well.
    """
    model = manifest.model
    sides = {"inputs": (model.inputs, BEFORE), "outputs": (model.outputs, AFTER)}
    made = {
        side: [each.model_copy(update={"steps": [_spelled(step, known, spelled_out) for step in each.steps]})
               for each in tensors]
        for side, (tensors, known) in sides.items()
    }  # fmt: skip
    return manifest.model_copy(update={"model": model.model_copy(update=made)})


def _spelled(step: Step, known: dict[str, Callable[..., Array]], spelled_out: bool) -> Step:
    function = known.get(step.op)
    if function is None:
        return step
    parameters = list(inspect.signature(function).parameters.values())[1:]
    options = _by_name(step, [each.name for each in parameters])
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    if spelled_out:
        options = {**{name: value for name, value in defaults.items() if value is not None}, **options}
    else:
        options = {name: value for name, value in options.items() if not _is_default(value, defaults.get(name))}
    return Step(op=function.__name__, **options)


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value equals a default and has its type: 1 does not equal true."""
    return default is not None and type(value) is type(default) and bool(value == default)


def _by_name(step: Step, takes: Sequence[str]) -> dict[str, Any]:
    options = step.options
    if "value" in options:  # `- crop: 224`
        options[takes[0] if takes else "value"] = options.pop("value")
    return options


def _bound(step: Step, known: dict[str, Callable[..., Array]], side: str) -> Callable[[Any], Any]:
    function = known.get(step.op)
    if function is None:
        raise ManifestError(f"there is no step {step.op!r} {side} the model{nearest(step.op, known)}")
    takes = list(inspect.signature(function).parameters)[1:]
    options = _by_name(step, takes)
    strange = [name for name in options if name not in takes]
    if strange:
        raise ManifestError(f"{step.op} has no option {strange[0]!r}{nearest(strange[0], takes)}")

    def applied(value: Any) -> Any:
        try:
            return function(value, **options)
        except XspError:
            raise
        except Exception as error:  # of a value that it does not take, or of an option's value
            on = f"an array of {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            said = (str(error).splitlines() or [""])[0][:120]
            raise ManifestError(f"{step.op}: raises {type(error).__name__} on {on} ({said})") from error

    return applied


def _chain(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def all_of(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return all_of


# --- images -----------------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ManifestError("images need Pillow: pip install 'xsp[evaluate]'") from error
    return Image


def _by_pillow(data: bytes, half: bool) -> Array:
    image = _pillow()
    try:
        with image.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ManifestError(f"decode: an image of {opened.width} x {opened.height} pixels is too large")
            if half:
                opened.draft("RGB", (max(1, opened.width // 2), max(1, opened.height // 2)))
            return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ManifestError(f"decode: Pillow cannot read it ({str(error).splitlines()[0][:120]})") from error


def _by_torchvision(data: bytes) -> Array:
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_image
    except ImportError as error:
        raise ManifestError("decode: torchvision is not installed: pip install 'xsp[models]'") from error
    try:
        made = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise ManifestError(f"decode: torchvision cannot read it ({str(error).splitlines()[0][:120]})") from error
    return np.asarray(made.permute(1, 2, 0).numpy())


def _by_pillow_resized(image: Array, target: tuple[int, int], method: str) -> Array:
    library = _pillow()
    resample = getattr(library.Resampling, method.upper())
    size = target[1], target[0]
    if image.dtype == np.uint8 and image.shape[-1] == 3:
        return np.asarray(library.fromarray(np.ascontiguousarray(image)).resize(size, resample))
    planes = [
        np.asarray(library.fromarray(np.ascontiguousarray(image[..., plane], np.float32)).resize(size, resample))
        for plane in range(image.shape[-1])
    ]
    made = np.stack(planes, axis=-1)
    return _as_before(made, image)


def _neighbours(image: Array, target: tuple[int, int], method: str) -> Array:
    """Resize from the direct neighbours of each target pixel's centre only, ignoring all other pixels."""
    places = []
    for axis in (0, 1):
        at = (np.arange(target[axis]) + 0.5) * image.shape[axis] / target[axis] - 0.5
        places.append(at.clip(0, image.shape[axis] - 1))
    if method == "nearest":
        rows, columns = (
            np.floor(each + 0.5).astype(int).clip(0, image.shape[axis] - 1) for axis, each in enumerate(places)
        )
        return np.asarray(image[rows][:, columns])
    made = image.astype(np.float64)
    for axis, at in enumerate(places):
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, image.shape[axis] - 1)
        share = (at - low).reshape([-1 if axis == each else 1 for each in range(made.ndim)])
        made = made.take(low, axis) * (1 - share) + made.take(high, axis) * share
    return _as_before(made, image)


def _as_before(made: Array, image: Array) -> Array:
    whole = made.round().clip(0, 255) if image.dtype == np.uint8 else made
    return np.asarray(whole.astype(image.dtype))
