"""A fit as a file: the table, the role of each factor, and the parameters, so that it need not be fitted again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xsp import atomic
from xsp.errors import OutputError, UsageError
from xsp.predict import crossvalidation as judging
from xsp.predict.baselines import BASELINES
from xsp.predict.configurations import Configurations, Factor
from xsp.predict.crossvalidation import Error, Evaluation, Extrapolation, Split
from xsp.predict.generic import Fit, Form, Penalty
from xsp.version import __version__

VERSION = 1
NAME = "xsp-fit.json"
"""Default name of the file of a fit."""

MOST_BYTES = 256 << 20


def check(path: Path) -> None:
    """Check that `write` may replace a file: it is a fit, or does not exist.

    Raises:
        OutputError: the file exists and is not a fit, or cannot be read.
    """
    try:
        if path.exists() and not _is_fit(path):
            raise OutputError(f"{path}: exists, and is not a fit of xsp: name another file with --out")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}); name another with --out") from error


def write(evaluation: Evaluation, path: Path) -> None:
    """Write a fit to a file; an existing fit is replaced.

    Raises:
        OutputError: the file exists and is not a fit, or it cannot be written.
    """
    check(path)
    try:
        with atomic.replacing(path) as temporary:
            temporary.write_text(json.dumps(_content(evaluation), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}); name another with --out") from error


def _is_fit(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(b'{"xsp_fit"')


def _content(evaluation: Evaluation) -> dict[str, Any]:
    table = evaluation.table
    return {
        "xsp_fit": VERSION,
        "xsp": __version__,
        "seed": evaluation.seed,
        "split": {
            "intrinsic": evaluation.split.intrinsic,
            "extrinsic": evaluation.split.extrinsic,
            "each": evaluation.split.category,
        },
        "factors": [vars(factor) for factor in table.factors],
        "rows": {
            "seconds": table.seconds.tolist(),
            "group": table.groups.tolist(),
            "values": {name: column.tolist() for name, column in table.values.items()},
        },
        "notes": list(table.notes),
        "fits": [
            {
                "of": value,
                "intrinsic": [factor.name for factor in fit.form.intrinsic],
                "extrinsic": [factor.name for factor in fit.form.extrinsic],
                "levels": {factor.name: list(factor.levels) for factor in fit.form.extrinsic if factor.levels},
                "dropped": list(fit.form.drop_reasons),
                "penalty": list(fit.penalty),
                "shapes": fit.shapes.tolist(),
                "coefficients": fit.coefficients.tolist(),
                "bootstrap": [[shapes.tolist(), coefficients.tolist()] for shapes, coefficients in fit.bootstrap],
            }
            for value, fit in evaluation.fits.items()
        ],
        "errors": [list(error) for error in evaluation.errors],
        "residuals": evaluation.residuals.tolist(),
        "groups": evaluation.groups,
        "beyond": [
            [result.factor, result.value, result.rows, [list(error) for error in result.errors]]
            for result in evaluation.extrapolations
        ],
        "missing": dict(evaluation.missing_baselines),
    }


def read(path: Path) -> Evaluation:
    """Return the fit of a file.

    Raises:
        UsageError: the file does not exist, cannot be read, or is not a fit.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("xsp_fit") != VERSION:
            raise ValueError(f"it does not have xsp_fit {VERSION}")
        return _evaluation_of(content)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such fit: make one, xsp predict fit TABLE -o {path}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: not a fit of xsp ({str(error)[:60]}): make one with xsp predict fit") from error


def _evaluation_of(content: Mapping[str, Any]) -> Evaluation:
    factors = tuple(
        Factor(str(entry["name"]), tuple(map(str, entry["levels"])), _finite(entry["reference"]), _finite(entry["low"]),
               _finite(entry["high"]), str(entry.get("unit", "")))
        for entry in content["factors"]
    )  # fmt: skip
    rows = content["rows"]
    values = {
        factor.name: np.array(rows["values"][factor.name], dtype=float if factor.is_numeric else object)
        for factor in factors
    }
    table = Configurations(
        factors, values, np.array(rows["seconds"], dtype=float), np.array(rows["group"], dtype=np.int64),
        tuple(map(str, content["notes"])),
    )  # fmt: skip
    if any(len(column) != len(table) for column in (*values.values(), table.groups)) or not len(table):
        raise ValueError("its columns differ in length")
    if not (np.isfinite(table.seconds) & (table.seconds > 0)).all():
        raise ValueError("a time is invalid")
    numbers = [values[factor.name] for factor in factors if factor.is_numeric]
    if not all((np.isfinite(column) & (column > 0)).all() for column in numbers):
        raise ValueError("a number is invalid")
    if not all(0 < factor.low <= factor.high and factor.reference > 0 for factor in factors if factor.is_numeric):
        raise ValueError("a range is invalid")
    split = Split(tuple(content["split"]["intrinsic"]), tuple(content["split"]["extrinsic"]), content["split"]["each"])
    for name in (*split.intrinsic, *split.extrinsic):
        table.factor(name)
    fits = {entry["of"]: _fit(table, entry) for entry in content["fits"]}
    errors, seed = _errors(content["errors"]), int(content["seed"])
    if errors[0].model not in (judging.GENERIC, *BASELINES):
        raise ValueError("its model is invalid")
    if set(fits) != ({None} if split.category is None else set(table.factor(split.category).levels)):
        raise ValueError("its fits do not match its kinds")
    extrapolations = tuple(
        Extrapolation(str(name), _finite(value), int(count), _errors(heldout))
        for name, value, count, heldout in content["beyond"]
    )
    residuals = np.array([_finite(number) for number in content["residuals"]])
    if not len(residuals) or seed < 0:
        raise ValueError("its residuals or its seed are invalid")
    missing = {str(name): str(reason) for name, reason in content.get("missing", {}).items()}
    return Evaluation(table, split, seed, fits, errors, residuals, int(content["groups"]), extrapolations, missing)


def _fit(table: Configurations, entry: Mapping[str, Any]) -> Fit:
    levels_by_factor = {str(name): tuple(map(str, levels)) for name, levels in entry.get("levels", {}).items()}
    extrinsic = [table.factor(name) for name in entry["extrinsic"]]
    form = Form(
        tuple(table.factor(name) for name in entry["intrinsic"]),
        tuple(replace(factor, levels=levels_by_factor.get(factor.name, factor.levels)) for factor in extrinsic),
        tuple(map(str, entry["dropped"])),
    )
    kind, strength = entry["penalty"]
    pairs = [(entry["shapes"], entry["coefficients"]), *entry["bootstrap"]]
    parameters = [
        (np.array(shapes, dtype=float), np.array(coefficients, dtype=float)) for shapes, coefficients in pairs
    ]
    for shapes, coefficients in parameters:
        if shapes.shape != (len(form.shapes),) or coefficients.shape != (len(form.coefficients),):
            raise ValueError("its parameters do not match its form")
        if not (np.isfinite(shapes).all() and np.isfinite(coefficients).all()):
            raise ValueError("a parameter is invalid")
    if len(parameters) < 2:
        raise ValueError("it has no resampled fits")
    return Fit(form, *parameters[0], Penalty(str(kind), _finite(strength)), tuple(parameters[1:]))


def _errors(rows: Any) -> tuple[Error, ...]:
    errors = tuple(
        Error(str(name), _finite(mean), _finite(median), _finite(worst)) for name, mean, median, worst in rows
    )
    if not errors:
        raise ValueError("it has no errors")
    return errors


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a figure is invalid")
    return number
