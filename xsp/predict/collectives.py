"""Cost of links and of collectives over them: five algorithms by latency, bandwidth, number of ranks and size.

Formulas are from Shi, Chu and Li (MG-WFBP, arXiv 1811.11141), table 1, for N ranks: an all-reduce of M bytes takes
a + b·M, with the latency α of a message, β seconds per byte, and γ seconds per byte for adding. For double trees it
has b = β + γ, below the 2 (N - 1)/N β that each rank must send (Patarasuk and Yuan, 2009): `auto` uses 2 β + γ.
"""

from __future__ import annotations

import enum
import json
import math
import os.path
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from xsp.errors import UsageError, nearest
from xsp.predict.schedule import check_duration

if TYPE_CHECKING:
    from xsp.predict.measured import LinkCurves

MOST_RANKS = 10**9
MOST_PER_BYTE = 1e-3
"""Maximum seconds per byte of a number without a unit: a larger one is a rate whose unit was forgotten."""

MOST_SECONDS = 1e6
"""Maximum latency of a link, and maximum time of a byte."""


@dataclass(frozen=True)
class Link:
    """A connection between ranks: all that a prediction knows about it, regardless of its source."""

    name: str
    alpha: float
    """Latency of a message in seconds."""

    beta: float
    """Seconds per byte, in one direction."""

    gamma: float = 0.0
    """Seconds per byte to add received numbers; 0 if this time is part of `beta`."""

    source: str = "as given"
    is_quoted: bool = False
    """Whether the figures are quoted from a vendor or a library, and not measured."""

    curves: LinkCurves | None = None
    """Measured curves by collective and number of ranks, which replace the formulas."""

    def __post_init__(self) -> None:
        """Reject constants that are negative, not finite, or too large."""
        for constant in ("alpha", "beta", "gamma"):
            if check_duration(getattr(self, constant), f"{constant} of the link {self.name}") > MOST_SECONDS:
                raise UsageError(
                    f"{constant} of the link {self.name} is above {MOST_SECONDS:g} s, more than any link has"
                )

    def shared_by(self, ranks: int) -> Link:
        """Return the link as seen by each of several ranks that all use it at the same time."""
        return replace(self, beta=self.beta * ranks) if ranks > 1 else self

    def scaled(self, factor: float) -> Link:
        """Return the link with collectives that take `factor` times as long."""
        return replace(self, alpha=self.alpha * factor, beta=self.beta * factor, gamma=self.gamma * factor)

    @property
    def description(self) -> str:
        """The constants of the link in words, and their source."""
        rate = f"{1e-9 / self.beta:.4g} GB/s" if self.beta else "unlimited bandwidth"
        return f"{self.name}: {self.alpha * 1e6:.4g} us, {rate}, {self.source}"


_NCCL = "latency of a step from NCCL's tuning.cc, hwLat of ring and Simple"
"""3.4, 5.7 and 14.0 us over NVLink, PCI and a network in NCCL 2.18 and later; 9.6 us over a network in NCCL before."""


def _quoted_link(name: str, alpha_us: float, gb_per_s: float, description: str) -> Link:
    return Link(name, alpha_us * 1e-6, 1e-9 / gb_per_s, source=f"quoted ({description}; {_NCCL})", is_quoted=True)


LINKS = {
    entry.name: entry
    for entry in (
        _quoted_link("nvlink2", 3.4, 150, "V100: 6 links of 25 GB/s each way, 300 GB/s both ways by NVIDIA"),
        _quoted_link("nvlink3", 3.4, 300, "A100: 12 links of 25 GB/s each way, 600 GB/s both ways by NVIDIA"),
        _quoted_link("nvlink4", 3.4, 450, "H100: 18 links of 25 GB/s each way, 900 GB/s both ways by NVIDIA"),
        _quoted_link("nvlink5", 3.4, 900, "B200: 18 links of 50 GB/s each way, 1.8 TB/s both ways by NVIDIA"),
        _quoted_link("pcie3", 5.7, 15.75, "16 lanes of 8 GT/s, 128b/130b, by PCI-SIG"),
        _quoted_link("pcie4", 5.7, 31.5, "16 lanes of 16 GT/s, 128b/130b, by PCI-SIG"),
        _quoted_link("pcie5", 5.7, 63, "16 lanes of 32 GT/s, 128b/130b, by PCI-SIG"),
        _quoted_link("infiniband-hdr", 14.0, 25, "a port of 200 Gbit/s"),
        _quoted_link("infiniband-ndr", 14.0, 50, "a port of 400 Gbit/s, by NVIDIA"),
        _quoted_link("ethernet-10g", 14.0, 1.25, "line rate"),
        _quoted_link("ethernet-25g", 14.0, 3.125, "line rate"),
        _quoted_link("ethernet-100g", 14.0, 12.5, "line rate"),
    )
}
"""Links by name. Rates are for one direction of one device; programs reach less."""

# ASCII: otherwise letters beyond it match as well, the long s as s, and are units that `_SECONDS` does not have
_LETTERS = re.IGNORECASE | re.ASCII
_TIME = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*(s|ms|us|\u00b5s|\u03bcs|ns)?", _LETTERS)
_RATE = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)(b)(?:/s|ps|yte/s)|([kmgt])(bit/s))?", _LETTERS)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
"""Seconds by unit; microseconds with the micro sign and with the Greek letter, which look the same."""

_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def link(text: str) -> Link:
    """Return a link from its name in `LINKS`, from `ALPHA,BETA[,GAMMA]`, or from a JSON file.

    ALPHA is a time (5us), BETA and GAMMA are rates (10GB/s, 25Gbit/s) or seconds per byte (1e-10). A file has an object
    with `alpha_s`, `beta_s_per_byte`, and optionally `gamma_s_per_byte`, `name`, `source`.

    Raises:
        UsageError: the text is none of them, or a value is invalid.
    """
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    path, is_file = Path(text), os.path.isfile(text)  # `Path.is_file` raises for a text that is too long for a path
    if "," in text and not is_file:
        alpha, *rates = (part.strip() for part in text.split(","))
        if len(rates) > 2:
            raise UsageError(f"{text!r} has {1 + len(rates)} parts; write ALPHA,BETA or ALPHA,BETA,GAMMA: 5us,10GB/s")
        if rates == ["0"] and not _time(alpha):
            return Link(text, 0.0, 0.0)  # a link that costs nothing
        gamma = _per_byte(rates[1]) if rates[1:] and rates[1] != "0" else 0.0
        return Link(text, _time(alpha), _per_byte(rates[0]), gamma)
    if is_file:
        return _read_link(path)
    raise UsageError(
        f"there is no link {text!r}{nearest(text, LINKS)}: give one of {', '.join(LINKS)}, ALPHA,BETA (5us,10GB/s), "
        "or a JSON file with alpha_s and beta_s_per_byte"
    )


def _time(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None or not _is_finite(match[1]):
        raise UsageError(f"{text!r} is not a latency such as 5us or 5e-6")
    return float(match[1]) * _SECONDS[(match[2] or "").lower()]


def _per_byte(text: str) -> float:
    match = _RATE.fullmatch(text)
    if match is None or not _is_finite(match[1]):
        raise UsageError(f"{text!r} is neither a rate such as 10GB/s or 25Gbit/s nor seconds per byte such as 1e-10")
    value = float(match[1])
    _, prefix, binary, unit, bit_prefix, bits = match.groups()
    if unit is None and bits is None:
        if not 0 < value <= MOST_PER_BYTE:
            raise UsageError(f"{text!r} without a unit is seconds per byte, and too large: write a rate, 10GB/s")
        return value
    if not value:
        raise UsageError(f"{text!r}: a rate must be above 0")
    if bits is not None or (unit == "b" and "byte" not in text.lower()):  # Gb/s is bits, GB/s and gbyte/s are bytes
        value /= 8
    return float(1 / (value * (1024 if binary else 1000) ** _POWER[(prefix or bit_prefix or "").lower()]))


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _read_link(path: Path) -> Link:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no link can be read from it ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: a link is an object with alpha_s and beta_s_per_byte")
    alpha, beta, gamma = (
        content.get(name, default)
        for name, default in (("alpha_s", None), ("beta_s_per_byte", None), ("gamma_s_per_byte", 0.0))
    )
    if not (_is_number(alpha) and _is_number(beta) and _is_number(gamma)):
        raise UsageError(f"{path}: alpha_s and beta_s_per_byte must be numbers")
    if not beta and alpha:
        raise UsageError(
            f"{path}: beta_s_per_byte is 0, which is unlimited bandwidth: write seconds per byte, 1e-10 for 10 GB/s, "
            "or 0 for alpha_s too, for a link without cost"
        )
    name, source = (content.get(key) or default for key, default in (("name", path.stem), ("source", f"from {path}")))
    quoted = bool(content.get("quoted", False))
    return Link(str(name), float(alpha), float(beta), float(gamma), str(source), quoted)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


# --- cost of a collective --------------------------------------------------------------------------------------


class Algorithm(str, enum.Enum):
    """Algorithms of an all-reduce."""

    BINARY_TREE = "binary-tree"
    RECURSIVE_DOUBLING = "recursive-doubling"
    HALVING_DOUBLING = "halving-doubling"
    DOUBLE_TREE = "double-tree"
    RING = "ring"
    AUTO = "auto"

    def __str__(self) -> str:
        return self.value


class CollectiveCost(NamedTuple):
    """Cost of a collective: seconds of start-up, and seconds per byte."""

    start: float
    per_byte: float

    def of(self, size: float) -> float:
        """Return the seconds for a number of bytes."""
        return self.start + self.per_byte * size


def all_reduce(algorithm: Algorithm, over_link: Link, ranks: int) -> CollectiveCost:
    """Return the cost of an all-reduce; zero for one rank.

    Raises:
        UsageError: there are no ranks or too many, or the algorithm is `auto`, which depends on the size.
    """
    _check_ranks(ranks)
    alpha, beta, gamma = over_link.alpha, over_link.beta, over_link.gamma
    if ranks == 1:
        return CollectiveCost(0.0, 0.0)
    log = math.log2(ranks)
    match algorithm:
        case Algorithm.BINARY_TREE:
            return CollectiveCost(2 * alpha * log, (2 * beta + gamma) * log)
        case Algorithm.RECURSIVE_DOUBLING:
            return CollectiveCost(alpha * log, (beta + gamma) * log)
        case Algorithm.HALVING_DOUBLING:
            return CollectiveCost(2 * alpha * log, 2 * beta - (2 * beta + gamma) / ranks + gamma)
        case Algorithm.DOUBLE_TREE:
            return CollectiveCost(2 * alpha * log, beta + gamma)
        case Algorithm.RING:
            return CollectiveCost(2 * (ranks - 1) * alpha, (2 * beta + gamma) * (ranks - 1) / ranks)
        case _:
            raise UsageError("which algorithm is the fastest depends on the size")


def all_reduce_seconds(algorithm: Algorithm, over_link: Link, ranks: int, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes.

    `auto` is the faster of ring and double tree, the algorithms that NCCL chooses from on any link. Each rank sends all
    bytes up its two trees and down again, so `auto` uses 2 β per byte for the tree instead of the published formula.
    """
    if over_link.curves is not None:
        return over_link.curves.seconds("all_reduce", over_link, ranks, size)
    if algorithm is not Algorithm.AUTO:
        return all_reduce(algorithm, over_link, ranks).of(size)
    tree_cost = all_reduce(Algorithm.DOUBLE_TREE, over_link, ranks)
    auto_tree_cost = tree_cost._replace(per_byte=2 * over_link.beta + over_link.gamma if ranks > 1 else 0.0)
    return min(all_reduce(Algorithm.RING, over_link, ranks).of(size), auto_tree_cost.of(size))


def gather_seconds(over_link: Link, ranks: int, size: float) -> float:
    """Return the seconds of an all-gather on a ring whose output has `size` bytes."""
    _check_ranks(ranks)
    if over_link.curves is not None:
        return over_link.curves.seconds("all_gather", over_link, ranks, size)
    return (ranks - 1) * over_link.alpha + (ranks - 1) / ranks * over_link.beta * size


def scatter_seconds(over_link: Link, ranks: int, size: float) -> float:
    """Return the seconds of a reduce-scatter on a ring whose input has `size` bytes."""
    _check_ranks(ranks)
    if over_link.curves is not None:
        return over_link.curves.seconds("reduce_scatter", over_link, ranks, size)
    return (ranks - 1) * over_link.alpha + (ranks - 1) / ranks * (over_link.beta + over_link.gamma) * size


def _check_ranks(ranks: int) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks} ranks: give 1 to {MOST_RANKS:,}")
