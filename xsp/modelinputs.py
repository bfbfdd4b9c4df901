"""Inputs for models of transformers: the arguments of a call, from the signature of `forward` and the configuration.

There is no list of model types. The name of an argument determines its kind (tokens, pixels, sound features, a time
series), and names in the configuration determine its sizes. If a name has several usual shapes, the first one that the
model accepts is its input: see `xsp.models.on_device`. If tokens stand for an image or for sound, the input has as many
of them as the model makes features.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xsp.errors import ModelError

Arguments = dict[str, Any]

IMAGE_SIZES = (224, 384, 512, 640, 1024, 1536)
"""Heights and widths to try if the one in the configuration does not work."""

SAMPLES = 16_000
"""Samples in a second of sound."""

FRAMES = 8
TEXT_TOKENS = 16
"""Text tokens in addition to those that stand for an image."""

MAX_CANDIDATES = 40
"""Calls to try before xsp reports that no input can be made for a model."""

_CONFIG_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config",
                 "encoder_config", "image_encoder", "audio_encoder", "semantic_model_config")  # fmt: skip
_TOKENS = ("input_ids",)
_PIXELS = ("pixel_values", "pixel_values_videos", "images", "prompt_pixel_values", "prompt_masks", "flattened_patches")
_SOUND = ("input_features", "input_values", "spectrogram", "audio_values", "waveform")
_GRID = "image_grid_thw"
_MODALITIES = (*_TOKENS, *_PIXELS[:2], *_SOUND[:2])
_FEATURE_ARGUMENTS = {
    "pixel_values": ("get_image_features", ("image_token_id", "image_token_index")),
    "pixel_values_videos": ("get_video_features", ("video_token_id", "video_token_index")),
    "input_features": ("get_audio_features", ("audio_token_id", "audio_token_index")),
    "input_values": ("get_audio_features", ("audio_token_id", "audio_token_index")),
}
"""Arguments whose features replace tokens: the method that makes the features, and names of the token's number."""


class Sizes:
    """The sizes in a configuration and in its parts, by the names that configurations use."""

    def __init__(self, config: Any) -> None:
        """Collect a configuration and the configurations inside it."""
        self.configs = [config]
        for owner in self.configs:
            parts = [_config_value(owner, part) for part in _CONFIG_PARTS]
            self.configs += [part for part in parts if hasattr(part, "to_dict") and part not in self.configs]
        self.top = config

    def values(self, *names: str) -> Iterator[Any]:
        """Yield the values under these names."""
        for name, config in itertools.product(names, self.configs):
            value = _config_value(config, name)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
                yield value

    def number(self, default: int, *names: str) -> int:
        """Return the first positive number under these names; `default` if there is none."""
        return next((value for value in self.values(*names) if isinstance(value, int) and value > 0), default)

    def images(self) -> list[tuple[int, int]]:
        """Return heights and widths of images, the configuration's own first."""
        configured_sizes = [_pair(size) for size in self.values("image_size", "input_size", "img_size", "crop_size")]
        return list(dict.fromkeys([*filter(None, configured_sizes), *((size, size) for size in IMAGE_SIZES)]))


def _config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return a value of a configuration; the default if reading it raises, as it may if the layers differ."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def set_head_size(config: Any) -> Any:
    """Set the head size in a configuration, if it is open, to hidden size / heads; return the configuration."""
    for part in Sizes(config).configs:
        hidden, heads = (_config_value(part, name) for name in ("hidden_size", "num_attention_heads"))
        if _config_value(part, "head_dim", 0) is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
            part.head_dim = hidden // heads
    return config


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    size = tuple(value)[-2:]
    return (int(size[0]), int(size[1])) if len(size) == 2 and all(isinstance(side, int) for side in size) else None


def argument_names(model: Any) -> tuple[list[str], list[str]]:
    """Return the arguments that a model requires, and the arguments for other kinds of input that it accepts."""
    parameters = inspect.signature(type(model).forward).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    required = [name for name in names if name != "self" and parameters[name].default is inspect.Parameter.empty]
    main_input = model.main_input_name
    for name in [main_input] if isinstance(main_input, str) else main_input:
        if name in names and name not in required:
            required.append(name)
    if not required and len(names) > 1:
        required = names[1:2]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        required.append("decoder_input_ids")
    optional = [name for name in (*_MODALITIES, "bbox", _GRID) if name in names and name not in required]
    if {"pixel_values", "pixel_values_videos"} <= {*required, *optional}:  # an image or a video, not both
        optional = [name for name in optional if name != "pixel_values_videos"]
    return required, optional


def candidate_arguments(
    model: Any, batch: int, sequence: int, may_shorten: bool = True
) -> Iterator[Callable[[], Arguments]]:
    """Yield functions that make the arguments of a call, the most likely first; they may raise like the model itself.

    Args:
        model: a model of transformers, on the device where it will be called.
        batch: number of samples.
        sequence: tokens of a sample.
        may_shorten: whether to use fewer tokens if the model has fewer positions.
    """
    required, optional = argument_names(model)
    sizes = Sizes(model.config)
    maker = _ArgumentMaker(model, sizes, batch, sequence, may_shorten)
    sets = [[*required, *optional], required, [*required, *(name for name in optional if name in _PIXELS)]]
    sets += [[*required, name] for name in optional]
    sets = [list(dict.fromkeys(names)) for names in sets]
    yield from itertools.islice(_calls(maker, sets), MAX_CANDIDATES)


def likely_arguments(model: Any, batch: int, sequence: int, may_shorten: bool = True) -> Arguments:
    """Return the required arguments in their most likely shapes, untested; empty if one of them is unknown."""
    maker = _ArgumentMaker(model, Sizes(model.config), batch, sequence, may_shorten)
    shapes = {name: maker.shapes(name) for name in argument_names(model)[0]}
    return maker.arguments({name: candidates[0] for name, candidates in shapes.items()}) if all(shapes.values()) else {}


def _calls(maker: _ArgumentMaker, sets: Sequence[Sequence[str]]) -> Iterator[Callable[[], Arguments]]:
    """Yield the calls for each set of arguments; calls with tokens that stand for images come first."""
    visited = set()
    for names in sets:
        if tuple(names) in visited or any(not maker.shapes(name) for name in names):
            continue
        visited.add(tuple(names))
        has_several = len([name for name in names if len(maker.shapes(name)) > 1]) > 1
        for combination in itertools.islice(
            itertools.product(*(maker.shapes(name) for name in names)), 4 if has_several else 16
        ):
            shapes = dict(zip(names, combination, strict=True))
            if maker.feature_arguments(names):
                yield functools.partial(maker.arguments_with_placeholders, shapes)
            yield functools.partial(maker.arguments, shapes)
            if "use_cache" in maker.parameters and "input_ids" in shapes:
                yield functools.partial(maker.without_cache, shapes)


def arguments_of_shape(name: str, model: Any, batch: int, shape: tuple[int, ...]) -> tuple[Arguments, str]:
    """Return the input in the requested shape, and what to type if the model does not accept it.

    Raises:
        ModelError: the model takes tokens.
    """
    torch = sys.modules["torch"]
    argument = next(iter(argument_names(model)[0]), "")
    if argument.endswith(_TOKENS) or not argument:
        raise ModelError(f"transformers:{name} takes tokens: omit --input, and give their number with --sequence 128")
    arguments = {argument: torch.randn(batch, *shape)}
    if argument != "pixel_values":
        return arguments, f"give the shape of one sample of {argument}, --input"
    sizes = Sizes(model.config)
    height, width = sizes.images()[0]
    return arguments, f"it is designed for --input {sizes.number(3, 'num_channels')}x{height}x{width}"


class _ArgumentMaker:
    """Functions that make the arguments of a model."""

    def __init__(self, model: Any, sizes: Sizes, batch: int, sequence: int, may_shorten: bool) -> None:
        self.model, self.sizes, self.batch = model, sizes, batch
        self.parameters = inspect.signature(type(model).forward).parameters
        max_length = sizes.number(sequence, "max_position_embeddings", "n_positions", "max_target_positions")
        self.sequence = min(sequence, max_length) if may_shorten else sequence
        self.vocabulary_size = sizes.number(100, "vocab_size", "text_vocab_size")

    def shapes(self, name: str) -> list[Any]:
        """Return the possible shapes of an argument of this name; empty if the name is unknown."""
        if name.endswith(_TOKENS):
            return [(self.batch, self.sequence)]
        if name in _PIXELS or (name == "hidden_states" and self._takes_patches()):
            return self._pixels()
        if name in _SOUND:
            return self._sound(name)
        makers: dict[str, Callable[[], list[Any]]] = {
            "bbox": lambda: [(self.batch, self.sequence, 4)],
            "attention_mask": lambda: [(self.batch, self.sequence)],
            "inputs_embeds": lambda: [(self.batch, self.sequence, self._hidden_size())],
            "hidden_states": lambda: [(self.batch, self.sequence, self._hidden_size())],
            "encoder_hidden_states": lambda: [(self.batch, self.sequence, self._hidden_size())],
            "latents": self._latents,
            "past_values": self._series,
            "inputs": lambda: [
                (self.batch, self.sequence),
                (self.batch, self.sequence, self.sizes.number(64, "d_model", "hidden_size")),
            ],
        }
        if name.endswith("grid_thw"):
            return [self._grid()]
        return makers[name]() if name in makers else []

    def _hidden_size(self) -> int:
        return self.sizes.number(64, "hidden_size", "d_model", "embed_dim")

    def _grid(self) -> tuple[int, int, int]:
        merge_size = self.sizes.number(2, "spatial_merge_size")
        return 1, 8 * merge_size, 8 * merge_size

    def _takes_patches(self) -> bool:
        """Return whether the model takes images as patches, with their numbers in another argument."""
        return any(name.endswith("grid_thw") for name in self.parameters)

    def _pixels(self) -> list[Any]:
        channels = self.sizes.number(3, "num_channels", "in_channels", "in_chans")
        if self._takes_patches():
            patch = self.sizes.number(14, "patch_size")
            frames = self.sizes.number(1, "temporal_patch_size")
            time, height, width = self._grid()
            count = time * height * width
            row_sizes = dict.fromkeys(channels * depth * patch * patch for depth in (frames, 1, 2))
            shapes: list[Any] = [(count, row_size) for row_size in row_sizes]
            shapes.append((count, channels, patch, patch))
            return shapes
        images = self.sizes.images()
        frames = self.sizes.number(FRAMES, "num_frames", "frames_per_clip", "tubelet_size")
        stills: list[Any] = [(self.batch, channels, *image) for image in images[:2]]
        videos: list[Any] = [(self.batch, count, channels, *images[0]) for count in dict.fromkeys((frames, 2, 1))]
        return [*stills, *videos, *((self.batch, channels, *image) for image in images[2:])]

    def _sound(self, name: str) -> list[Any]:
        bins = [*self.sizes.values("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "mel_bins",
                                "num_mel_channels", "feature_projection_input_dim", "input_dim")]  # fmt: skip
        mels = [number for number in dict.fromkeys([*bins, 80, 128]) if isinstance(number, int)]
        spectrum_length = (
            2 * self.sizes.number(750, "max_source_positions", "max_length") if name == "input_features" else 1024
        )
        length = self.sizes.number(1024, "max_length")
        waveforms: list[Any] = [(self.batch, SAMPLES), (self.batch, 1, SAMPLES)]
        spectra: list[Any] = [
            shape for mel in mels for shape in ((self.batch, mel, spectrum_length), (self.batch, spectrum_length, mel))
        ]
        spectra += [(self.batch, length, mels[0]), (self.batch, 1, mels[0], length), (self.batch, 1, length, mels[0])]
        return [*spectra, *waveforms] if name == "input_features" else [*waveforms, *spectra]

    def _latents(self) -> list[Any]:
        size = self._hidden_size()
        return [(self.batch, size, 50), (self.batch, 50, size)]

    def _series(self) -> list[Any]:
        length = self.sizes.number(128, "context_length", "prediction_length")
        channels = self.sizes.number(1, "num_input_channels", "input_size")
        return [(self.batch, length, channels), (self.batch, length)]

    def arguments(self, shapes: dict[str, Any]) -> Arguments:
        """Return arguments of these shapes."""
        return {name: self._tensor(name, shape) for name, shape in shapes.items()}

    def without_cache(self, shapes: dict[str, Any]) -> Arguments:
        """Return arguments without a cache: some models have no layers of the type that their cache is made for."""
        return {**self.arguments(shapes), "use_cache": False}

    def _tensor(self, name: str, shape: Any) -> Any:
        torch = sys.modules["torch"]
        if name.endswith("grid_thw"):
            return torch.tensor([list(shape)], device="cpu")
        if name.endswith(_TOKENS) or (name == "inputs" and len(shape) == 2):
            return torch.randint(0, self.vocabulary_size, shape, device="cpu")
        if name in ("bbox", "attention_mask"):
            return torch.ones(shape, dtype=torch.long, device="cpu")
        return torch.randn(shape)

    # --- tokens that stand for an image or for sound ----------------------------------------------------------------

    def feature_arguments(self, names: Sequence[str]) -> list[str]:
        """Return the arguments whose features replace tokens."""
        return [
            name for name in names if name in _FEATURE_ARGUMENTS and "input_ids" in names
            and hasattr(self.model, _FEATURE_ARGUMENTS[name][0]) and self._token(name) is not None
        ]  # fmt: skip

    def _token(self, name: str) -> int | None:
        candidates = (getattr(self.model.config, key, None) for key in _FEATURE_ARGUMENTS[name][1])
        return next((token for token in candidates if isinstance(token, int)), None)

    def arguments_with_placeholders(self, shapes: dict[str, Any]) -> Arguments:
        """Return arguments with as many tokens for an image or sound as the model makes features of it."""
        torch = sys.modules["torch"]
        arguments = self.arguments({name: shape for name, shape in shapes.items() if name != "input_ids"})
        tokens = torch.randint(0, self.vocabulary_size, (self.batch, TEXT_TOKENS), device="cpu")
        for name in self.feature_arguments(list(shapes)):
            device = next(self.model.parameters()).device
            with torch.inference_mode():
                grid = {_GRID: arguments[_GRID].to(device)} if name == "pixel_values" and _GRID in arguments else {}
                features = getattr(self.model, _FEATURE_ARGUMENTS[name][0])(arguments[name].to(device), **grid)
            count = sum(tensor.shape[:-1].numel() for tensor in _tensors(features)) // self.batch
            placeholders = torch.full((self.batch, count), self._token(name), device="cpu")
            tokens = torch.cat([placeholders, tokens], 1)
        return {"input_ids": tokens, **arguments}


def _tensors(features: Any) -> list[Any]:
    """Return the tensors in an output of features; if the output has several parts, only the pooled one."""
    torch = sys.modules["torch"]
    pooled = getattr(features, "pooler_output", None)
    if pooled is not None:
        features = pooled
    if isinstance(features, torch.Tensor):
        return [features]
    values = features.values() if hasattr(features, "values") else features
    return [value for value in values if isinstance(value, torch.Tensor)]
