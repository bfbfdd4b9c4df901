"""Matching of the rows of a counter report with the kernels of the timed steps.

Two runs of a program launch the same kernels in the same order. Rows and kernels are grouped by layer, name, grid and
block. If a group has as many rows as kernels, the k-th row belongs to the k-th kernel; otherwise nothing in the group
is joined, because it is unknown which row or kernel is missing.

- **Layer.** The counter step marks the call of each module with an NVTX range (`layer_range`), so that a row has the
  layer of its launch. A kernel has a layer if evidence from its own step shows that it was launched there. Launches
  elsewhere (backward passes, optimizers, graphs) form groups over the whole step, and so do all kernels of a report
  without such ranges that was made by hand.
- **Name.** The name of the function, without namespaces, template arguments and parameters, which every tool writes
  differently (`<4, …>` is `<(int)4, …>` elsewhere).
- **Grid and block**, if both sides state them for every kernel of that name.
- **Order.** The order of launches: by correlation id on the timed side, by position in the report on the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from xsp.counters.reading import ReplayedKernel, Size

Group = tuple[object, ...]
LAYER = "xsp.layer#"
"""Prefix of the names of ranges that mark a layer."""


class TimedKernel(NamedTuple):
    """A kernel of the timed steps."""

    key: str
    """Its place in the structure of a step."""

    name: str
    order: tuple[int, int]
    """Sort key for the order of launches."""

    ns: float
    """Its true time if known, else the recorded one."""

    grid: Size | None = None
    block: Size | None = None
    layer: str | None = None
    """Name of its layer's range, see `layer_range`; None if it was launched outside module calls."""


class JoinResult(NamedTuple):
    """The result of joining a report."""

    rows: Mapping[str, ReplayedKernel]
    """Key of the kernel → row."""

    row_count: int
    has_layers: bool
    """Whether the report has ranges of layers."""


def layer_range(ordinal: int, name: str) -> str:
    """Return the NVTX range of a module's call; `xsp_collectors.cuda.profilerrange` pushes it.

    Args:
        ordinal: index of the call among the calls of this module in the step, from 0.
        name: name of the module in its model.
    """
    return f"{LAYER}{ordinal}#{name}"


def join(kernels: Sequence[TimedKernel], rows: Sequence[ReplayedKernel]) -> JoinResult:
    """Match the rows of a report with kernels.

    Args:
        kernels: kernels of one timed step.
        rows: rows of a report on one step, in launch order.
    """
    has_layers = any(_layer_of(row) is not None for row in rows)
    has_shape = _names_with_shape(kernels, rows)
    in_order = sorted(kernels, key=lambda kernel: kernel.order)

    def shape_group(entry: TimedKernel | ReplayedKernel) -> Group:
        name = function_name(entry.name)
        return name, *((entry.grid, entry.block) if has_shape[name] else (None, None))

    def layer_group(entry: TimedKernel | ReplayedKernel) -> Group:
        layer = _layer_of(entry) if isinstance(entry, ReplayedKernel) else entry.layer
        return layer if has_layers else None, *shape_group(entry)

    pairs = _match_groups(in_order, rows, layer_group)
    joined_rows = {id(row) for row in pairs.values()}
    pairs |= _match_groups(  # a kernel with an unknown layer may have been launched in any layer
        [kernel for kernel in in_order if kernel.layer is None and kernel.key not in pairs],
        [row for row in rows if id(row) not in joined_rows],
        shape_group,
    )
    return JoinResult(pairs, len(rows), has_layers)


def _match_groups(
    kernels: Iterable[TimedKernel],
    rows: Iterable[ReplayedKernel],
    group_of: Callable[[TimedKernel | ReplayedKernel], Group],
) -> dict[str, ReplayedKernel]:
    """Pair the k-th kernel of a group with its k-th row, if the group has as many kernels as rows."""
    kernels_by_group: dict[Group, list[TimedKernel]] = defaultdict(list)
    rows_by_group: dict[Group, list[ReplayedKernel]] = defaultdict(list)
    for kernel in kernels:
        kernels_by_group[group_of(kernel)].append(kernel)
    for row in rows:
        rows_by_group[group_of(row)].append(row)
    return {
        kernel.key: row
        for group, members in kernels_by_group.items()
        if len(members) == len(rows_by_group.get(group, ()))
        for kernel, row in zip(members, rows_by_group[group], strict=True)
    }


def function_name(name: str) -> str:
    """Return the name of a kernel's function: no return type, namespaces, template arguments, parameters.

    >>> plain("void at::native::vectorized_elementwise_kernel<(int)4, at::Add<float>>(int, T2)")
    'vectorized_elementwise_kernel'
    """
    letters, depth = [], 0
    for letter in name.replace("(anonymous namespace)", "").replace("<unnamed>", "").replace("->", ""):
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth = max(0, depth - 1)
        elif not depth:
            letters.append(letter)
    words = "".join(letters).split("[clone")[0].split()
    return words[-1].rpartition("::")[2] if words else name


def _layer_of(row: ReplayedKernel) -> str | None:
    return next((name for name in reversed(row.ranges) if name.startswith(LAYER)), None)


def _names_with_shape(kernels: Iterable[TimedKernel], rows: Iterable[ReplayedKernel]) -> Mapping[str, bool]:
    """Return, for each name, whether grid and block of all its kernels are known on both sides."""
    has_shape: dict[str, bool] = defaultdict(lambda: True)
    entries: list[TimedKernel | ReplayedKernel] = [*kernels, *rows]
    for entry in entries:
        has_shape[function_name(entry.name)] &= entry.grid is not None and entry.block is not None
    return has_shape
