"""Translation of other manifest formats to ours: those of MLModelScope (models, frameworks) and the five of DLSpec.

Each function takes and returns plain data. A field without a counterpart in our format keeps its name.
Facts: the fields of both are listed in the papers (arXiv 1911.08031; OpML 2020) and in published manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Content = dict[str, Any]

MLMODELSCOPE, DLSPEC, OURS = "MLModelScope", "DLSpec", "xsp"

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


def told(content: Mapping[str, Any]) -> str:
    """Return the dialect of a document."""
    if "scenario" in content or "format" in content:
        return OURS
    model = content.get("model")
    if "framework" in content and isinstance(content["framework"], (dict, str)):
        return MLMODELSCOPE
    if "container" in content and "name" in content and model is None and not _is_dlspec(content):
        return MLMODELSCOPE
    if _is_dlspec(content):
        return DLSPEC
    if isinstance(model, dict) and "name" not in model and ({"base_url", "graph_path", "weights_path"} & model.keys()):
        return MLMODELSCOPE
    return OURS


def _is_dlspec(content: Mapping[str, Any]) -> bool:
    own = {"pre-process", "post-process", "preprocess", "postprocess", "run", "reference_log", "reference-log", "setup"}
    inner = [value for name in _SECTIONS if isinstance(value := content.get(name), dict)]
    return bool({"reference_log", "reference-log"} & content.keys()) or any(own & each.keys() for each in inner) or (
        bool({"id", "kind"} <= content.keys()) and content["kind"] in (*_SECTIONS, "reference-log")
    )  # fmt: skip


def in_our_words(content: Content, kind: str) -> Content:
    """Return a manifest of a dialect as an evaluation, whose other sections have their defaults."""
    return {MLMODELSCOPE: _mlmodelscope, DLSPEC: _dlspec}.get(kind, lambda same: same)(content)


# --- MLModelScope -----------------------------------------------------------------------------------------------------


def _mlmodelscope(content: Content) -> Content:
    if "framework" not in content and "model" not in content:  # a manifest of a framework
        software = _moved(content, {})
        return {"model": {"name": content.get("name", "any")}, "software": software}
    return {"model": mlmodelscope_model(content)}


def mlmodelscope_model(content: Content) -> Content:
    """Return the model section of an MLModelScope model manifest."""
    left = dict(content)
    made: Content = {}
    framework = left.pop("framework", None)
    if framework is not None:
        made["framework"] = {"name": framework} if isinstance(framework, str) else framework
    outputs = left.pop("outputs", None) or ([left.pop("output")] if "output" in left else [])
    made["inputs"] = [_tensor(each, "input") for each in _listed(left.pop("inputs", None))]
    made["outputs"] = [_tensor(each, "output") for each in _listed(outputs)]
    if "licence" in left:
        left.setdefault("license", left.pop("licence"))
    source = left.pop("model", None)
    if isinstance(source, dict):
        made |= _files(source)
    elif source is not None:
        made["model"] = source
    task = next((_TASKS.get(str(each.get("type"))) for each in made["outputs"] if isinstance(each, dict)), None)
    return {**({"task": task} if task else {}), **left, **made}


def _files(source: Content) -> Content:
    left = dict(source)
    files = []
    for name in ("graph", "weights"):
        path, checksum = left.pop(f"{name}_path", None), left.pop(f"{name}_checksum", None)
        if path:
            files.append({"path": path, "role": name, **({"checksum": checksum} if checksum else {})})
        elif checksum:
            left[f"{name}_checksum"] = checksum
    base = left.pop("base_url", None)
    archive = left.pop("is_archive", None)
    return {
        **({"base_url": base} if base else {}),
        **({"files": files} if files else {}),
        **({"is_archive": archive} if archive is not None else {}),
        **({"of_files": left} if left else {}),
    }


def _tensor(content: Any, side: str) -> Any:
    if not isinstance(content, dict):
        return content
    left = {name: value for name, value in content.items() if name not in ("parameters", "steps")}
    given = content.get("parameters")
    if given is not None and not isinstance(given, dict):
        return dict(content)
    parameters = dict(given or {})
    names = (f"{side}_layer", "layer_name", "probabilities_layer")
    layer = next((parameters.pop(name) for name in names if isinstance(parameters.get(name), str)), None)
    if layer is not None:
        left["layer"] = layer
    if isinstance(parameters.get("element_type"), str):
        left["element_type"] = parameters["element_type"]
    steps = content.get("steps")
    if steps is None and side == "input" and left.get("type") == "image":
        steps = _image_steps(parameters)
    elif steps is None and side == "output" and left.get("type") == "classification":
        steps = [{"op": "argsort", **_taken(parameters, "features_url", "features_checksum")}]
    parameters.pop("element_type", None) if "element_type" in left else None
    return {**left, **({"steps": steps} if steps else {}), **({"parameters": parameters} if parameters else {})}


def _image_steps(parameters: Content) -> list[Content]:
    """Return the steps that an image's parameters stand for, in the order of MLModelScope's agents."""
    steps: list[Content] = [{"op": "decode", **_taken(parameters, "color_mode", "element_type")}]
    dimensions = parameters.get("dimensions")
    layout = str(parameters.pop("layout", "") or "")
    if isinstance(dimensions, list) and len(dimensions) in (3, 4):
        parameters.pop("dimensions")
        size = dimensions[-3:]
        size = size[1:] if layout.endswith("CHW") or size[0] in (1, 3) else size[:2]
        steps.append({"op": "resize", "size": size, **_taken(parameters, "keep_aspect_ratio", "max_dimension")})
    normal = _taken(parameters, "mean", "scale")
    if normal:
        steps.append({"op": "normalise", **{"std" if name == "scale" else name: each for name, each in normal.items()}})
    if layout:
        steps.append({"op": "layout", "to": layout})
    return steps


def _listed(value: Any) -> list[Any]:
    """Return a list as it is, nothing as an empty list, and another value as a list of it."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _taken(content: Content, *names: str) -> Content:
    return {name: content.pop(name) for name in names if name in content and content[name] is not None}


# --- DLSpec -----------------------------------------------------------------------------------------------------------


def _dlspec(content: Content) -> Content:
    alone = "model" not in content or bool({"name", "pre-process", "post-process"} & content.keys())
    if content.get("kind") in (*_SECTIONS, "reference-log") and alone:
        content = {str(content["kind"]).replace("-", "_"): {n: each for n, each in content.items() if n != "kind"}}
    made: Content = {name: value for name, value in content.items() if name not in (*_SECTIONS, *_LOG)}
    for name, change in _DLSPEC.items():
        if isinstance(content.get(name), dict):
            made[name] = change(dict(content[name]))
        elif name in content:
            made[name] = content[name]
    log = next((content[name] for name in _LOG if name in content), None)
    if log is not None:
        made["reference"] = _moved(log, {
            "hyper-parameters": "hyperparameters", "hyper_parameters": "hyperparameters",
            "achieved_results": "results", "achieved-results": "results",
            "expected_outputs": "outputs", "expected-outputs": "outputs",
        }) if isinstance(log, dict) else log  # fmt: skip
    made.setdefault("model", {"name": "any"})
    return made


_LOG = ("reference_log", "reference-log", "reference")


def _dlspec_model(content: Content) -> Content:
    made = _moved(content, {
        "pre-process": "preprocess", "pre_process": "preprocess",
        "post-process": "postprocess", "post_process": "postprocess",
        "licence": "license", "job-type": "job", "job_type": "job",
        "system-requirements": "system_requirements",
    })  # fmt: skip
    for name in ("inputs", "outputs"):
        if isinstance(made.get(name), list):
            made[name] = [{"layer": each} if isinstance(each, str) else each for each in made[name]]
    source = made.pop("model", None)
    if isinstance(source, dict):
        checksum = source.pop("checksum", None)
        paths = _listed(source.pop("sources", None))
        made["files"] = [{"path": each, **({"checksum": checksum} if checksum else {})} for each in paths]
        made |= {"of_files": source} if source else {}
    elif isinstance(source, str):
        made["files"] = [{"path": source}]
    made.setdefault("name", made.get("id") or "model")
    return made


def _dlspec_hardware(content: Content) -> Content:
    made = dict(content)
    for name in ("cpu", "gpu", "interconnect", "memory"):
        if isinstance(made.get(name), (int, float)) and not isinstance(made[name], bool):
            made[name] = str(made[name])
        elif isinstance(made.get(name), (dict, list)):
            made[f"{name}_details"] = made.pop(name)
    return made


def _dlspec_software(content: Content) -> Content:
    made = _moved(content, {"env": "environment", "environment_variables": "environment", "environment-variables":
                            "environment"})  # fmt: skip
    given = made.get("environment")
    if isinstance(given, list):
        pairs = [str(each).partition("=") for each in given]
        made["environment"] = {name: value for name, _, value in pairs}
    return made


def _dlspec_dataset(content: Content) -> Content:
    made = _moved(content, {"licence": "license"})
    if isinstance(made.get("sources"), list):
        made["sources"] = [each if isinstance(each, str) else str(each) for each in made["sources"]]
    elif isinstance(made.get("sources"), str):
        made["sources"] = [made["sources"]]
    return made


_DLSPEC: dict[str, Callable[[Content], Content]] = {
    "hardware": _dlspec_hardware,
    "software": _dlspec_software,
    "dataset": _dlspec_dataset,
    "model": _dlspec_model,
}


def _moved(content: Content, names: Mapping[str, str]) -> Content:
    """Return a copy with our field names; if a field is present under both names, both are kept."""
    made: Content = {}
    for name, value in content.items():
        new = names.get(name, name)
        made[name if new in made or (new != name and new in content) else new] = value
    return made
