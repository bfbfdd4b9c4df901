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
from xsp.predict import judged as judging
from xsp.predict.baselines import BASELINES
from xsp.predict.configurations import Configurations, Factor
from xsp.predict.generic import Fit, Form, Penalty
from xsp.predict.judged import Beyond, Error, Judged, Split
from xsp.version import __version__

VERSION = 1
NAME = "xsp-fit.json"
"""Default name of the file of a fit."""

MOST_BYTES = 256 << 20


def check(place: Path) -> None:
    """Refuse a file that is not a fit, and that `write` would not replace; it need not exist.

    Raises:
        OutputError: the file exists and is not a fit, or cannot be read.
    """
    try:
        if place.exists() and not _is_one(place):
            raise OutputError(f"{place}: exists, and is not a fit of xsp: name another file with --out")
    except OSError as error:
        raise OutputError(f"{place}: cannot be written ({error.strerror or error}); name another with --out") from error


def write(found: Judged, place: Path) -> None:
    """Write a fit to a file; an existing fit is replaced.

    Raises:
        OutputError: the file exists and is not a fit, or it cannot be written.
    """
    check(place)
    try:
        with atomic.written(place) as beside:
            beside.write_text(json.dumps(_content(found), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{place}: cannot be written ({error.strerror or error}); name another with --out") from error


def _is_one(place: Path) -> bool:
    with place.open("rb") as file:
        return file.read(64).startswith(b'{"xsp_fit"')


def _content(found: Judged) -> dict[str, Any]:
    table = found.table
    return {
        "xsp_fit": VERSION,
        "xsp": __version__,
        "seed": found.seed,
        "split": found.split._asdict(),
        "factors": [vars(each) for each in table.factors],
        "rows": {
            "seconds": table.seconds.tolist(),
            "group": table.groups.tolist(),
            "values": {name: column.tolist() for name, column in table.values.items()},
        },
        "notes": list(table.notes),
        "fits": [
            {
                "of": value,
                "intrinsic": [each.name for each in fit.form.intrinsic],
                "extrinsic": [each.name for each in fit.form.extrinsic],
                "levels": {each.name: list(each.levels) for each in fit.form.extrinsic if each.levels},
                "dropped": list(fit.form.dropped),
                "penalty": list(fit.penalty),
                "shapes": fit.shapes.tolist(),
                "coefficients": fit.coefficients.tolist(),
                "bootstrap": [[shapes.tolist(), those.tolist()] for shapes, those in fit.bootstrap],
            }
            for value, fit in found.fits.items()
        ],
        "errors": [list(each) for each in found.errors],
        "residuals": found.residuals.tolist(),
        "groups": found.groups,
        "beyond": [[each.factor, each.value, each.rows, [list(one) for one in each.errors]] for each in found.beyond],
        "missing": dict(found.missing),
    }


def read(place: Path) -> Judged:
    """Return the fit of a file.

    Raises:
        UsageError: the file does not exist, cannot be read, or is not a fit.
    """
    try:
        if place.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(place.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("xsp_fit") != VERSION:
            raise ValueError(f"it does not have xsp_fit {VERSION}")
        return _of(content)
    except FileNotFoundError as error:
        raise UsageError(f"{place}: no such fit: make one, xsp predict fit TABLE -o {place}") from error
    except OSError as error:
        raise UsageError(f"{place}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{place}: not a fit of xsp ({str(error)[:60]}): make one with xsp predict fit") from error


def _of(content: Mapping[str, Any]) -> Judged:
    factors = tuple(
        Factor(str(each["name"]), tuple(map(str, each["levels"])), _real(each["reference"]), _real(each["low"]),
               _real(each["high"]))
        for each in content["factors"]
    )  # fmt: skip
    rows = content["rows"]
    values = {
        each.name: np.array(rows["values"][each.name], dtype=float if each.numeric else object) for each in factors
    }
    table = Configurations(
        factors, values, np.array(rows["seconds"], dtype=float), np.array(rows["group"], dtype=np.int64),
        tuple(map(str, content["notes"])),
    )  # fmt: skip
    if any(len(each) != len(table) for each in (*values.values(), table.groups)) or not len(table):
        raise ValueError("its columns differ in length")
    if not (np.isfinite(table.seconds) & (table.seconds > 0)).all():
        raise ValueError("a time is invalid")
    numbers = [values[each.name] for each in factors if each.numeric]
    if not all((np.isfinite(each) & (each > 0)).all() for each in numbers):
        raise ValueError("a number is invalid")
    if not all(0 < each.low <= each.high and each.reference > 0 for each in factors if each.numeric):
        raise ValueError("a range is invalid")
    split = Split(tuple(content["split"]["intrinsic"]), tuple(content["split"]["extrinsic"]), content["split"]["each"])
    for name in (*split.intrinsic, *split.extrinsic):
        table.factor(name)
    fits = {each["of"]: _fit(table, each) for each in content["fits"]}
    errors, seed = _errors(content["errors"]), int(content["seed"])
    if errors[0].model not in (judging.GENERIC, *BASELINES):
        raise ValueError("its model is invalid")
    if set(fits) != ({None} if split.each is None else set(table.factor(split.each).levels)):
        raise ValueError("its fits do not match its kinds")
    beyond = tuple(Beyond(str(a), _real(b), int(c), _errors(d)) for a, b, c, d in content["beyond"])
    residuals = np.array([_real(each) for each in content["residuals"]])
    if not len(residuals) or seed < 0:
        raise ValueError("its residuals or its seed are invalid")
    missing = {str(name): str(reason) for name, reason in content.get("missing", {}).items()}
    return Judged(table, split, seed, fits, errors, residuals, int(content["groups"]), beyond, missing)


def _fit(table: Configurations, held: Mapping[str, Any]) -> Fit:
    own = {str(name): tuple(map(str, levels)) for name, levels in held.get("levels", {}).items()}
    extrinsic = [table.factor(each) for each in held["extrinsic"]]
    form = Form(
        tuple(table.factor(each) for each in held["intrinsic"]),
        tuple(replace(each, levels=own.get(each.name, each.levels)) for each in extrinsic),
        tuple(map(str, held["dropped"])),
    )
    kind, strength = held["penalty"]
    pairs = [(held["shapes"], held["coefficients"]), *held["bootstrap"]]
    made = [(np.array(one, dtype=float), np.array(other, dtype=float)) for one, other in pairs]
    for one, other in made:
        if one.shape != (len(form.shapes),) or other.shape != (len(form.coefficients),):
            raise ValueError("its parameters do not match its form")
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            raise ValueError("a parameter is invalid")
    if len(made) < 2:
        raise ValueError("it has no resampled fits")
    return Fit(form, *made[0], Penalty(str(kind), _real(strength)), tuple(made[1:]))


def _errors(held: Any) -> tuple[Error, ...]:
    found = tuple(Error(str(name), _real(mean), _real(median), _real(worst)) for name, mean, median, worst in held)
    if not found:
        raise ValueError("it has no errors")
    return found


def _real(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("a figure is invalid")
    return found
