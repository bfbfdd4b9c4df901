"""Predict how long a step takes in configurations that were not recorded, from a fit of `xsp predict fit`.

Give each factor of the fit one value or several. The interval comes from resampled fits and the errors of held-out
configurations. Configurations outside the recorded ranges are marked as extrapolated.

examples:
  xsp predict at batch=64 threads=2
  xsp predict at batch=64,128,256 threads=1,2
  xsp predict at batch=64 threads=2 --fit cnn.json --format json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress

if TYPE_CHECKING:
    from xsp.predict.configurations import Factor
    from xsp.predict.crossvalidation import Evaluation

SUMMARY = "predict the time of other configurations from a fit"

MOST_POINTS = 1_000


def factor_values(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a factor and its values: batch=64,128."""
    name, equals, values = text.partition("=")
    parts = tuple(part.strip() for part in values.split(","))
    if not name.strip() or not equals or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not FACTOR=VALUE, such as batch=64 or batch=64,128")
    return name.strip(), parts


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "values", nargs="+", type=factor_values, metavar="FACTOR=VALUE", help="a factor with one value or several"
    )
    options.add_fit_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Predict the configurations, and print the predictions."""
    from xsp.predict import crossvalidation, fitfile, fittext

    fit = fitfile.read(args.fit or Path(fitfile.NAME))
    predictions = crossvalidation.predict(fit, combinations(fit, args.values))
    if args.format == "json":
        progress.write(json.dumps(fittext.points_json(fit, predictions), indent=2, allow_nan=False) + "\n")
    else:
        progress.echo(fittext.points_text(fit, predictions))
    return 0


def combinations(fit: Evaluation, values: list[tuple[str, tuple[str, ...]]]) -> list[dict[str, float | str]]:
    """Return all combinations of the given values; a factor with only one recorded value may be omitted.

    Raises:
        UsageError: a name is given twice, a value is not a number, or there are too many combinations.
    """
    from itertools import product
    from math import prod

    from xsp.errors import UsageError

    names = [name for name, _ in values]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"{repeated} is given twice: write {repeated}=A,B for several values")
    if prod(len(texts) for _, texts in values) > MOST_POINTS:
        raise UsageError(f"more than {MOST_POINTS:,} combinations: give fewer values")
    factors = {factor.name: factor for factor in fit.table.factors}
    parsed = [_values(name, texts, factors.get(name)) for name, texts in values]
    constants: dict[str, float | str] = {
        factor.name: factor.low if factor.is_numeric else factor.levels[0]
        for factor in factors.values()
        if (factor.low == factor.high if factor.is_numeric else len(factor.levels) == 1)
    }
    return [{**constants, **dict(zip(names, combination, strict=True))} for combination in product(*parsed)]


def _values(name: str, texts: tuple[str, ...], factor: Factor | None) -> list[float | str]:
    """Return the values of a factor; a recorded text may have commas itself (`layers=64,64`)."""
    if factor is not None and factor.is_numeric:
        return [_value(factor, text) for text in texts]
    levels = () if factor is None else factor.levels
    matches = [level for level in levels if tuple(part.strip() for part in level.split(",")) == texts]
    return [*(matches[:1] or texts)]


def _value(factor: Factor, text: str) -> float:
    """Return a number in the unit of a factor; it may have that unit, or one that can be converted to it."""
    from xsp.errors import UsageError
    from xsp.predict import quantities

    found = quantities.quantity(text)
    scales = quantities.scales({found.unit, factor.unit}) if found is not None and found.unit else None
    if found is None or (found.unit and (scales is None or not factor.unit)):
        unit = f", or one with a unit such as {factor.unit}" if factor.unit else ""
        raise UsageError(f"{factor.name}={text} is not a number above 0{unit}")
    return found.number * (scales[found.unit] / scales[factor.unit] if scales else 1.0)
