"""Weights of evaluated models in the machine's store of shared weights: `model: {share: true}` in a manifest.

The first evaluation of a model puts its weights into the store. A note in the store's directory, named by a hash of
everything on which weights from a seed depend, has their key; later processes build the model without values and
attach to the weights. If the store was restarted or has evicted them, it does not know the key: they are stored again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp import atomic, modelname, version
from xsp.device import machine
from xsp.errors import ManifestError, ShareError
from xsp.evaluate import agents
from xsp.evaluate.manifest import Manifest
from xsp.share import client, wire
from xsp.texts import size_text

if TYPE_CHECKING:
    from xsp.models import ModelCall
    from xsp.share import Attachment

NOTES = "models"
"""Folder of the notes, in the store's directory."""

MOST_BYTES = 1 << 20


class SharedModel(NamedTuple):
    """A model whose parameters are in the store."""

    built: ModelCall
    drawn: list[str]
    """Layers whose weights are zero by initialisation, and were drawn (see `predictors.draw_zero_weights`)."""

    note: str
    """Note on the sharing, for the result."""


def load(
    manifest: Manifest, source: str, build: Callable[[], ModelCall], draw: Callable[[Any], list[str]], dtype: Any
) -> SharedModel:
    """Return the model of a manifest in `eval` mode, attached to weights in the store; store them first if needed.

    Args:
        manifest: its model is built from a seed, on the CPU.
        source: name of the model; a configuration in a file with its path, `transformers:/folder/config.json`.
        build: builds the model, in float32.
        draw: draws weights that are zero, and returns the layers' names.
        dtype: type of its parameters and buffers in the store.

    Raises:
        ManifestError: no store runs, it has no room, or the model cannot be attached, with the reason.
    """
    from xsp import share

    try:
        client.status()  # fails before a model is built
        path = wire.directory() / NOTES / f"{_weights_hash(manifest, source)}.json"
        record, attachment, origin = _read_note(path), None, ""
        if record is not None:
            built = _build_empty(build, dtype)
            attachment = _attach_if_stored(built.model, record["key"])
        if record is None or attachment is None:
            record = _store_weights(build, draw, dtype, path)
            built = _build_empty(build, dtype)
            attachment = share.attach(built.model, record["key"])
            origin = ", put there by this process"
    except ShareError as error:
        raise ManifestError(f"model.share: {error}") from error
    except ImportError as error:
        raise ManifestError("model.share: safetensors is not installed: pip install 'xsp[share]'") from error
    except OSError as error:
        raise ManifestError(f"model.share: {error.filename}: {error.strerror}") from error
    if _unfilled_hash(built) != record["beside"]:
        raise ManifestError(
            "model.share: inputs, or buffers that are not in the file, depend on random numbers drawn after the "
            "weights, so outputs would differ; omit share"
        )
    private_note = (
        f", {size_text(attachment.private_bytes)} of buffers are not shared" if attachment.private_bytes else ""
    )
    note = f"{size_text(attachment.shared_bytes)} of weights are shared with other processes{origin}{private_note}"
    return SharedModel(built, list(record["drawn"]), note)


def _build_empty(build: Callable[[], ModelCall], dtype: Any) -> ModelCall:
    """Return a model whose parameters have no values, unless its buffers are computed from them."""
    from xsp import share

    with share.empty():
        built = build()
    persistent = built.model.state_dict()
    if any(buffer.is_meta and name not in persistent for name, buffer in built.model.named_buffers()):
        built = build()  # it computes buffers from parameters (Swin of timm), so these need values
    built.model.to(dtype)
    return built


def _attach_if_stored(module: Any, key: str) -> Attachment | None:
    """Return the attachment; None if the store does not have the key."""
    from xsp import share

    stored = {entry["key"] for entry in client.status()["objects"]}
    return share.attach(module, key) if key.removeprefix("sha256:") in stored else None


def _store_weights(
    build: Callable[[], ModelCall], draw: Callable[[Any], list[str]], dtype: Any, path: Path
) -> dict[str, Any]:
    """Build the model with its values, put them into the store, and write the note with their key."""
    from xsp import share

    built = build()
    drawn = draw(built.model)
    built.model.to(dtype)
    persistent = built.model.state_dict()
    parameters = {name: value for name, value in built.model.named_parameters() if name in persistent}  # tied ones once
    tied = {name for name, _ in built.model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in persistent.items() if name not in tied}
    record = {"key": share.put({**parameters, **buffers}), "drawn": drawn, "beside": _unfilled_hash(built)}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with atomic.replacing(path, flush=False) as staged:
        staged.write_text(json.dumps(record), encoding="utf-8")
    return record


def _read_note(path: Path) -> dict[str, Any] | None:
    """Return a note; None if there is none, or it is damaged."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        valid = (
            isinstance(record["key"], str) and isinstance(record["beside"], str) and isinstance(record["drawn"], list)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if valid else None


def _weights_hash(manifest: Manifest, source: str) -> str:
    """Return a hash of all that the weights depend on; see `load`."""
    model = manifest.model
    installed = {package: machine.version_of(package) for package in agents.PACKAGES}
    fields = {
        "source": model.source, "seed": model.seed, "precision": model.precision, "sequence": model.sequence,
        "inputs": [list(spec.shape or ()) for spec in model.inputs], "installed": installed,
        "xsp": version.__version__, "configuration": _configuration_hash(source),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def _configuration_hash(source: str) -> str:
    """Return a hash of the content of the configuration file that a source names; empty if it names none."""
    file = modelname.parse(source).file
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _unfilled_hash(built: ModelCall) -> str:
    """Return a hash of what `attach` does not fill: buffers outside the state dict, integer inputs except tokens."""
    import torch

    persistent = built.model.state_dict()
    buffers = {name: buffer for name, buffer in built.model.named_buffers() if name not in persistent}
    digest = hashlib.sha256()
    inputs = {**{f"argument {index}": tensor for index, tensor in enumerate(built.args)}, **built.kwargs}
    integer_inputs = {
        name: tensor for name, tensor in inputs.items()
        if hasattr(tensor, "is_floating_point") and not tensor.is_floating_point() and not name.endswith("input_ids")
    }  # fmt: skip
    for name, tensor in {**buffers, **integer_inputs}.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
