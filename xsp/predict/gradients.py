"""Gradient bytes of a run's layers: from the trainable parameters of their modules, or as stated by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xsp.predict.training import Layer
from xsp.schema import ROOT, TRAINABLE, Level, Rule
from xsp.store.trace import Trace
from xsp.store.views import FULL_NAME


class ModuleGradients(NamedTuple):
    """Layers with the gradients of their modules."""

    layers: tuple[Layer, ...]
    source: str
    """The source of the gradients."""

    frozen_bytes: int
    """Bytes of parameters without a gradient."""


def module_gradients(trace: Trace, layers: Sequence[Layer], unknown: list[str]) -> ModuleGradients | None:
    """Return the layers with the bytes of their own gradients; None if the trace has none.

    The gradient of a module that is called several times is ready when the backward pass of its first call has ended.

    Args:
        trace: trace of the step.
        layers: layers in the order of execution, by the full names of modules.
        unknown: list of texts on what the trace lacks, which is extended.
    """
    idle_models, idle_bytes = _idle_models(trace)
    rows = _modules(trace, idle_models)
    bytes_by_module = {str(row[0]): int(row[1]) for row in rows}
    trainable, parameters = (sum(int(row[column] or 0) for row in rows) for column in (2, 3))
    is_known = all(row[4] for row in rows)
    excess_bytes = sum(bytes_by_module.values()) - trainable
    if excess_bytes > 0:
        shared_module = next((row[0] for row in reversed(rows) if int(row[1]) == excess_bytes), None)
        if shared_module is not None:
            bytes_by_module[shared_module] = 0  # an earlier module shares them; they arrive in its backward pass
        else:
            unknown.append(f"{excess_bytes:,} bytes of parameters that modules share are counted twice")
    if not any(bytes_by_module.values()):
        return None
    absent = sum(1 for layer in layers if layer.name not in bytes_by_module)
    if 0 < absent < len(layers) and not idle_models:
        unknown.append(f"parameters of {absent} of {len(layers)} calls of modules")
    if is_known:
        unknown.append("how many parameters a module has: all of its own count as one gradient")
    else:
        unknown.append("frozen parameters: all parameters are assumed to have gradients, one for each module")
    frozen = max(0, parameters - trainable)
    source = "gradients: the parameters of each module, as recorded"
    if frozen:
        source = (
            f"gradients: the parameters of each module that take one, as recorded; "
            f"{frozen / 1e6:.4g} of {parameters / 1e6:.4g} MB of parameters are frozen"
        )
    if idle_bytes:
        source += f"; without {idle_bytes / 1e6:.4g} MB of models that have no backward pass in this step"
    remaining = dict(bytes_by_module)
    if absent == len(layers):  # the layers are not modules
        source += "; spread over the backward pass in proportion to time" * (absent > 1)
        return ModuleGradients(spread_over_layers(layers, sum(bytes_by_module.values())), source, frozen)
    result = []
    for layer in layers:
        size = remaining.pop(layer.name, 0)
        result.append(replace(layer, gradients=(size,) if size else ()))
    return ModuleGradients(tuple(result), source, frozen)


_MODEL = f"coalesce(json_extract_string({{0}}.attributes, '$.{ROOT}'), '')"
"""The model of the program that a module belongs to; empty for the first model."""


def _modules(trace: Trace, idle_models: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return a row for each module that was called, in the order of their first calls.

    Args:
        trace: trace of the step.
        idle_models: models that are left out, by their names from `_idle_models`.

    Returns:
        The full name; bytes of the module's own trainable parameters; for outermost modules only, bytes of all
        trainable and of all parameters inside; whether frozen parameters are known; and the index of the first call.
    """
    return trace.sql(
        f"""
        WITH calls AS (
            SELECT span_id, {FULL_NAME.format("merged")} AS name, param_bytes, layer_index, depth, parent_id,
                   TRY_CAST(json_extract_string(attributes, '$.{TRAINABLE}') AS BIGINT) AS trainable,
                   coalesce(trainable, param_bytes) AS gradient_bytes
            FROM merged WHERE level = {int(Level.LAYER)} AND param_bytes IS NOT NULL
                AND NOT list_contains(?, {_MODEL.format("merged")})
        ), inner_modules AS (
            SELECT outer_name, sum(gradient_bytes) AS bytes FROM (
                SELECT DISTINCT outer_calls.name AS outer_name, calls.name, calls.gradient_bytes
                FROM calls JOIN merged parents ON parents.span_id = calls.parent_id
                JOIN calls outer_calls ON outer_calls.span_id = parents.layer_id WHERE outer_calls.name <> calls.name
            ) GROUP BY outer_name
        )
        SELECT name, greatest(max(gradient_bytes) - coalesce(any_value(inner_modules.bytes), 0), 0)::BIGINT,
               max(gradient_bytes) FILTER (coalesce(depth, 0) = 0)::BIGINT,
               max(param_bytes) FILTER (coalesce(depth, 0) = 0)::BIGINT,
               bool_and(param_bytes = 0 OR trainable IS NOT NULL), min(layer_index)
        FROM calls LEFT JOIN inner_modules ON inner_modules.outer_name = calls.name
        GROUP BY name ORDER BY min(layer_index)
        """,
        [idle_models],
    ).fetchall()


def _idle_models(trace: Trace) -> tuple[list[str], int]:
    """Return the models without backward operators, and the bytes of their parameters; none if no model has any.

    With DistributedDataParallel around each model, only models with a backward pass reduce gradients.
    """
    rows = trace.sql(
        f"""
        SELECT {_MODEL.format("calls")} AS model, count(operators.span_id),
               max(calls.param_bytes) FILTER (coalesce(calls.depth, 0) = 0)
        FROM merged calls LEFT JOIN merged operators
            ON operators.parent_id = calls.span_id AND operators.parent_rule = '{Rule.SEQUENCE}'
        WHERE calls.level = {int(Level.LAYER)} GROUP BY model
        """
    ).fetchall()
    idle = [row for row in rows if not row[1]] if any(row[1] for row in rows) else []
    return [str(row[0]) for row in idle], sum(int(row[2] or 0) for row in idle)


def spread_over_layers(layers: Sequence[Layer], total_bytes: int) -> tuple[Layer, ...]:
    """Return the layers with the stated bytes of gradients, divided in proportion to the time of backward passes."""
    total = sum(layer.backward for layer in layers)
    return tuple(
        replace(layer, gradients=(round(total_bytes * (layer.backward / total if total else 1 / len(layers))),))
        for layer in layers
    )
