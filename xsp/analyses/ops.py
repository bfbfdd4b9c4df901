"""Operators by the time that they took themselves, as `key_averages(group_by_input_shape=True)` of torch.profiler."""

from __future__ import annotations

from xsp import owntimes
from xsp.analyses.contract import Table, analysis
from xsp.analyses.formulas import share
from xsp.span import Level
from xsp.trace import Trace
from xsp.views import NS


@analysis("ops", "Operators by self time", Level.OP)
def OPS(trace: Trace) -> Table:
    """Operators of one name, phase and input shapes together: calls, self time on the host, whole time.

    As `key_averages(group_by_input_shape=True)` of torch.profiler, of one step and with true times where they are
    known. `self_ms` is without the operators inside, so that it adds up to the time of the outermost operators, of
    which `percent_of_operators` is; a library's primitives inside an operator are in it. `total_ms` is of the whole
    calls. An operator that does nothing but call another of its name counts once.

    `device_ms` is the time of the kernels and copies that the operator itself launched; null without a device. `flops`
    are those of the operators themselves, all calls together. Shapes are null where no step was described.
    """
    owntimes.make(trace)
    return trace.sql(
        f"""
        WITH launched AS (
            SELECT parent_id AS span_id, sum({NS}) AS ns FROM merged
            WHERE level = {int(Level.KERNEL)} AND parent_id IS NOT NULL GROUP BY parent_id
        ), called AS (  -- an operator that only calls another of its name is one with it
            SELECT coalesce(within_id, span_id) AS called_id, sum(without_ops_ns) AS self_ns, sum(flops) AS flops,
                   sum(launched.ns) AS device_ns
            FROM own_times JOIN merged USING (span_id) LEFT JOIN launched USING (span_id)
            GROUP BY coalesce(within_id, span_id)
        ), grouped AS (
            SELECT name, phase, input_shapes, count(*) AS calls, sum(self_ns) AS self_ns, sum({NS}) AS total_ns,
                   sum(device_ns) AS device_ns, sum(called.flops)::BIGINT AS flops
            FROM called JOIN merged ON span_id = called_id GROUP BY name, phase, input_shapes
        )
        SELECT name, phase, calls, self_ns / 1e6 AS self_ms,
               {share("self_ns", "sum(self_ns) OVER ()")} AS percent_of_operators, input_shapes AS shapes,
               total_ns / 1e6 AS total_ms, device_ns / 1e6 AS device_ms, flops
        FROM grouped ORDER BY self_ms DESC, name, shapes
        """
    )
