"""Manifests from files: parsed, translated to our format, and validated; errors name file, line and field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xsp import inside
from xsp.errors import ManifestError, nearest
from xsp.evaluate import dialects, pipeline, yamltext
from xsp.evaluate.manifest import Dataset, Hardware, Manifest, Model, Part, Reference, Scenario, Software

SECTIONS: dict[str, type[Part]] = {
    "model": Model,
    "software": Software,
    "hardware": Hardware,
    "dataset": Dataset,
    "scenario": Scenario,
    "reference": Reference,
}

MOST_ERRORS = 8


@dataclass(frozen=True)
class LoadedManifest:
    """A manifest, with its origin."""

    manifest: Manifest
    dialect: str
    folder: Path
    """Base of relative paths in the manifest."""

    notes: tuple[str, ...] = ()
    """Notes on fields that are kept but not understood."""


def read(path: Path) -> LoadedManifest:
    """Read a manifest of any dialect; a section may be the name of a file beside it that contains the section.

    Raises:
        ManifestError: it cannot be read, or is not a manifest.
    """
    text = _read_text(path)
    content = text.content
    if not isinstance(content, dict):
        raise ManifestError(f"{path}:1: a manifest must be a mapping of fields, this is {_type_text(content)}")
    dialect = dialects.detect(content)
    content = dialects.translate(dict(content), dialect)
    for name, value in content.items():
        if name in SECTIONS and isinstance(value, str):
            content[name] = _section(path, text, name, value)
    return of_plain(content, path.parent, text, dialect)


def of_plain(
    content: Any, folder: Path = Path(), text: yamltext.Text | None = None, dialect: str = dialects.XSP
) -> LoadedManifest:
    """Validate plain data as a manifest.

    Args:
        content: the manifest in our format.
        folder: base of its relative paths.
        text: the document from which it was read, for messages.
        dialect: its original dialect.

    Raises:
        ManifestError: it is not a manifest.
    """
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise ManifestError(_error_text(error, text)) from error
    except RecursionError as error:
        raise ManifestError("the manifest is nested too deeply") from error
    manifest = pipeline.canonical(manifest)
    notes = []
    for path in manifest.unknown_fields():
        if ".steps[" in path:  # options of a step
            continue
        *parents, name = path.split(".")
        section = SECTIONS.get(parents[0]) if len(parents) == 1 else Manifest if not parents else None
        hint = nearest(name, section.model_fields) if section is not None else ""
        notes.append(f"{path} is kept but not used{hint}")
    return LoadedManifest(manifest, dialect, folder, tuple(notes))


def _section(path: Path, text: yamltext.Text, name: str, value: str) -> Any:
    """Return the content of a section that is in a file, which must be inside the manifest's folder."""
    file, place = path.parent / value, f"{text.location((name,))}: {name}: {value!r}"
    if inside.find_problem(path.parent, file) == inside.LINK:
        raise ManifestError(f"{place} is outside the folder of the manifest")
    if file.suffix not in (".yaml", ".yml") or not inside.is_file(path.parent, file):
        raise ManifestError(f"{place} is not a YAML file beside the manifest")
    content = _read_text(file, path.parent).content
    if not isinstance(content, dict):
        raise ManifestError(f"{file.name}:1: a section must be a mapping of fields, this is {_type_text(content)}")
    translated = dialects.translate(dict(content), dialects.detect(content))
    section = translated.get(name)
    return section if isinstance(section, dict) else content


def _read_text(path: Path, folder: Path | None = None) -> yamltext.Text:
    """Read a file of YAML; the folder that it may not lie outside of, if another file names it."""
    try:
        if not path.is_file():
            raise ManifestError(f"{path}: there is no such file; `xsp evaluate schema` prints the fields of a manifest")
        real_path = path if folder is not None else path.resolve()
        text = inside.read_text(folder or real_path.parent, real_path, yamltext.MOST_BYTES)
        return yamltext.read(text, str(path))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror})") from error


def _error_text(error: ValidationError, text: yamltext.Text | None) -> str:
    lines = []
    # without the problems that a mapping is no text, if it may also be a mapping
    problems = [
        each
        for each in error.errors(include_url=False, include_context=False)
        if not (each["loc"] and each["loc"][-1] in _TEXTS and isinstance(each["input"], dict))
    ]
    for problem in problems[:MOST_ERRORS]:
        # pydantic marks the branch of a union by the name of its type in an error's location
        path = tuple(
            part
            for part in problem["loc"]
            if not (isinstance(part, str) and part in ("Function", *_TEXTS, "dict[str,any]", "dict[str,Any]"))
        )
        location = f"{text.location(path)}: " if text is not None else ""
        field = ".".join(map(str, path))
        message = str(problem["msg"]).removeprefix("Value error, ")
        lines.append(f"{location}{field + ': ' if field else ''}{message[:1].lower()}{message[1:]}")
    if len(problems) > MOST_ERRORS:
        lines.append(f"and {len(problems) - MOST_ERRORS} more")
    return "\n".join(lines)


_TEXTS = ("str", "constrained-str")
"""Names of branches of texts."""


def _type_text(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "empty"}.get(type(value), "a number")
