"""Translation of other manifest formats to ours: those of MLModelScope (models, frameworks) and the five of DLSpec.

Each function takes and returns plain data. A field without a counterpart in our format keeps its name.
Sources: the papers (arXiv 1911.08031; OpML 2020) and published manifests list the fields of both formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Content = dict[str, Any]

MLMODELSCOPE, DLSPEC, XSP = "MLModelScope", "DLSpec", "xsp"

_SECTIONS = ("hardware", "software", "dataset", "model")
_TASKS = {
    "classification": "image-classification",
    "image_classification": "image-classification",
    "boundingbox": "object-detection",
    "image_object_detection": "object-detection",
    "instancesegment": "instance-segmentation",
    "image_instance_segmentation": "instance-segmentation",
    "semanticsegment": "semantic-segmentation",
    "image_semantic_segmentation": "semantic-segmentation",
    "image_enhancement": "image-enhancement",
}


def detect(content: Mapping[str, Any]) -> str:
    """Return the dialect of a document."""
    if "scenario" in content or "format" in content:
        return XSP
    model = content.get("model")
    if "framework" in content and isinstance(content["framework"], (dict, str)):
        return MLMODELSCOPE
    if "container" in content and "name" in content and model is None and not _is_dlspec(content):
        return MLMODELSCOPE
    if _is_dlspec(content):
        return DLSPEC
    if isinstance(model, dict) and "name" not in model and ({"base_url", "graph_path", "weights_path"} & model.keys()):
        return MLMODELSCOPE
    return XSP


def _is_dlspec(content: Mapping[str, Any]) -> bool:
    keys = {
        "pre-process",
        "post-process",
        "preprocess",
        "postprocess",
        "run",
        "reference_log",
        "reference-log",
        "setup",
    }
    parts = [value for name in _SECTIONS if isinstance(value := content.get(name), dict)]
    return bool({"reference_log", "reference-log"} & content.keys()) or any(keys & part.keys() for part in parts) or (
        bool({"id", "kind"} <= content.keys()) and content["kind"] in (*_SECTIONS, "reference-log")
    )  # fmt: skip


def translate(content: Content, dialect: str) -> Content:
    """Return a manifest of a dialect as an evaluation, whose other sections have their defaults."""
    return {MLMODELSCOPE: _from_mlmodelscope, DLSPEC: _from_dlspec}.get(dialect, lambda document: document)(content)


# --- MLModelScope -----------------------------------------------------------------------------------------------------


def _from_mlmodelscope(content: Content) -> Content:
    if "framework" not in content and "model" not in content:  # a manifest of a framework
        software = _rename_fields(content, {})
        return {"model": {"name": content.get("name", "any")}, "software": software}
    return {"model": mlmodelscope_model(content)}


def mlmodelscope_model(content: Content) -> Content:
    """Return the model section of an MLModelScope model manifest."""
    remaining = dict(content)
    model: Content = {}
    framework = remaining.pop("framework", None)
    if framework is not None:
        model["framework"] = {"name": framework} if isinstance(framework, str) else framework
    outputs = remaining.pop("outputs", None) or ([remaining.pop("output")] if "output" in remaining else [])
    model["inputs"] = [_tensor(tensor, "input") for tensor in _as_list(remaining.pop("inputs", None))]
    model["outputs"] = [_tensor(tensor, "output") for tensor in _as_list(outputs)]
    if "licence" in remaining:
        remaining.setdefault("license", remaining.pop("licence"))
    source = remaining.pop("model", None)
    if isinstance(source, dict):
        model |= _files(source)
    elif source is not None:
        model["model"] = source
    task = next((_TASKS.get(str(tensor.get("type"))) for tensor in model["outputs"] if isinstance(tensor, dict)), None)
    return {**({"task": task} if task else {}), **remaining, **model}


def _files(source: Content) -> Content:
    remaining = dict(source)
    files = []
    for name in ("graph", "weights"):
        path, checksum = remaining.pop(f"{name}_path", None), remaining.pop(f"{name}_checksum", None)
        if path:
            files.append({"path": path, "role": name, **({"checksum": checksum} if checksum else {})})
        elif checksum:
            remaining[f"{name}_checksum"] = checksum
    base = remaining.pop("base_url", None)
    archive = remaining.pop("is_archive", None)
    return {
        **({"base_url": base} if base else {}),
        **({"files": files} if files else {}),
        **({"is_archive": archive} if archive is not None else {}),
        **({"of_files": remaining} if remaining else {}),
    }


def _tensor(content: Any, side: str) -> Any:
    if not isinstance(content, dict):
        return content
    tensor = {name: value for name, value in content.items() if name not in ("parameters", "steps")}
    raw = content.get("parameters")
    if raw is not None and not isinstance(raw, dict):
        return dict(content)
    parameters = dict(raw or {})
    names = (f"{side}_layer", "layer_name", "probabilities_layer")
    layer = next((parameters.pop(name) for name in names if isinstance(parameters.get(name), str)), None)
    if layer is not None:
        tensor["layer"] = layer
    if isinstance(parameters.get("element_type"), str):
        tensor["element_type"] = parameters["element_type"]
    steps = content.get("steps")
    if steps is None and side == "input" and tensor.get("type") == "image":
        steps = _image_steps(parameters)
    elif steps is None and side == "output" and tensor.get("type") == "classification":
        steps = [{"op": "argsort", **_pop_fields(parameters, "features_url", "features_checksum")}]
    parameters.pop("element_type", None) if "element_type" in tensor else None
    return {**tensor, **({"steps": steps} if steps else {}), **({"parameters": parameters} if parameters else {})}


def _image_steps(parameters: Content) -> list[Content]:
    """Return the steps that an image's parameters describe, in the order of MLModelScope's agents."""
    steps: list[Content] = [{"op": "decode", **_pop_fields(parameters, "color_mode", "element_type")}]
    dimensions = parameters.get("dimensions")
    layout = str(parameters.pop("layout", "") or "")
    if isinstance(dimensions, list) and len(dimensions) in (3, 4):
        parameters.pop("dimensions")
        size = dimensions[-3:]
        size = size[1:] if layout.endswith("CHW") or size[0] in (1, 3) else size[:2]
        steps.append({"op": "resize", "size": size, **_pop_fields(parameters, "keep_aspect_ratio", "max_dimension")})
    normalisation = _pop_fields(parameters, "mean", "scale")
    if normalisation:
        steps.append(
            {"op": "normalise", **{"std" if name == "scale" else name: value for name, value in normalisation.items()}}
        )
    if layout:
        steps.append({"op": "layout", "to": layout})
    return steps


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, None as an empty list, and any other value as a list with that value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _pop_fields(content: Content, *names: str) -> Content:
    return {name: content.pop(name) for name in names if name in content and content[name] is not None}


# --- DLSpec -----------------------------------------------------------------------------------------------------------


def _from_dlspec(content: Content) -> Content:
    is_section = "model" not in content or bool({"name", "pre-process", "post-process"} & content.keys())
    if content.get("kind") in (*_SECTIONS, "reference-log") and is_section:
        content = {
            str(content["kind"]).replace("-", "_"): {key: value for key, value in content.items() if key != "kind"}
        }
    result: Content = {name: value for name, value in content.items() if name not in (*_SECTIONS, *_LOG_NAMES)}
    for name, convert in _DLSPEC_SECTIONS.items():
        if isinstance(content.get(name), dict):
            result[name] = convert(dict(content[name]))
        elif name in content:
            result[name] = content[name]
    log = next((content[name] for name in _LOG_NAMES if name in content), None)
    if log is not None:
        result["reference"] = _rename_fields(log, {
            "hyper-parameters": "hyperparameters", "hyper_parameters": "hyperparameters",
            "achieved_results": "results", "achieved-results": "results",
            "expected_outputs": "outputs", "expected-outputs": "outputs",
        }) if isinstance(log, dict) else log  # fmt: skip
    result.setdefault("model", {"name": "any"})
    return result


_LOG_NAMES = ("reference_log", "reference-log", "reference")


def _dlspec_model(content: Content) -> Content:
    model = _rename_fields(content, {
        "pre-process": "preprocess", "pre_process": "preprocess",
        "post-process": "postprocess", "post_process": "postprocess",
        "licence": "license", "job-type": "job", "job_type": "job",
        "system-requirements": "system_requirements",
    })  # fmt: skip
    for name in ("inputs", "outputs"):
        if isinstance(model.get(name), list):
            model[name] = [{"layer": entry} if isinstance(entry, str) else entry for entry in model[name]]
    source = model.pop("model", None)
    if isinstance(source, dict):
        checksum = source.pop("checksum", None)
        paths = _as_list(source.pop("sources", None))
        model["files"] = [{"path": path, **({"checksum": checksum} if checksum else {})} for path in paths]
        model |= {"of_files": source} if source else {}
    elif isinstance(source, str):
        model["files"] = [{"path": source}]
    model.setdefault("name", model.get("id") or "model")
    return model


def _dlspec_hardware(content: Content) -> Content:
    hardware = dict(content)
    for name in ("cpu", "gpu", "interconnect", "memory"):
        if isinstance(hardware.get(name), (int, float)) and not isinstance(hardware[name], bool):
            hardware[name] = str(hardware[name])
        elif isinstance(hardware.get(name), (dict, list)):
            hardware[f"{name}_details"] = hardware.pop(name)
    return hardware


def _dlspec_software(content: Content) -> Content:
    software = _rename_fields(content, {
        "env": "environment", "environment_variables": "environment", "environment-variables": "environment",
    })  # fmt: skip
    assignments = software.get("environment")
    if isinstance(assignments, list):
        pairs = [str(assignment).partition("=") for assignment in assignments]
        software["environment"] = {name: value for name, _, value in pairs}
    return software


def _dlspec_dataset(content: Content) -> Content:
    dataset = _rename_fields(content, {"licence": "license"})
    if isinstance(dataset.get("sources"), list):
        dataset["sources"] = [source if isinstance(source, str) else str(source) for source in dataset["sources"]]
    elif isinstance(dataset.get("sources"), str):
        dataset["sources"] = [dataset["sources"]]
    return dataset


_DLSPEC_SECTIONS: dict[str, Callable[[Content], Content]] = {
    "hardware": _dlspec_hardware,
    "software": _dlspec_software,
    "dataset": _dlspec_dataset,
    "model": _dlspec_model,
}


def _rename_fields(content: Content, names: Mapping[str, str]) -> Content:
    """Return a copy with our field names; if a field is present under both names, both are kept."""
    result: Content = {}
    for name, value in content.items():
        new = names.get(name, name)
        result[name if new in result or (new != name and new in content) else new] = value
    return result
