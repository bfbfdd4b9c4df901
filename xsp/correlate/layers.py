"""The layer of each span in a table that does not state it, derived from the parents."""

from __future__ import annotations

import duckdb

from xsp.schema import MAX_NESTING, WEAK_RULES, Grade, Level


def fill(con: duckdb.DuckDBPyConnection, name: str) -> None:
    """Write `layer_id` and `grade` of all spans of a table; spans nested too deeply or in a cycle get no layer.

    Args:
        con: holds the table.
        name: name of the table, with the columns of `xsp.schema.COLUMNS` and span ids that are unique within a trace.
    """
    weak = ", ".join(f"'{rule}'" for rule in WEAK_RULES)
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE span_layers AS
        WITH RECURSIVE walk(trace_id, span_id, layer_id, weak, distance) AS (
            SELECT trace_id, span_id, CASE WHEN level = {int(Level.LAYER)} THEN span_id END, false, 0 FROM {name} child
            WHERE NOT EXISTS (
                SELECT 1 FROM {name} parent WHERE parent.trace_id = child.trace_id AND parent.span_id = child.parent_id)
            UNION ALL
            SELECT child.trace_id, child.span_id,
                   CASE WHEN child.level = {int(Level.LAYER)} THEN child.span_id ELSE walk.layer_id END,
                   child.level <> {int(Level.LAYER)} AND (walk.weak OR coalesce(child.parent_rule IN ({weak}), false)),
                   distance + 1
            FROM {name} child JOIN walk ON walk.trace_id = child.trace_id AND walk.span_id = child.parent_id
            WHERE distance < {MAX_NESTING}
        )
        SELECT trace_id, span_id, walk.layer_id, weak FROM {name} LEFT JOIN walk USING (trace_id, span_id)
        """
    )
    con.execute(
        f"""
        UPDATE {name} SET layer_id = layers.layer_id, grade = CASE
            WHEN {name}.device IS NULL THEN NULL
            WHEN layers.layer_id IS NULL THEN '{Grade.UNKNOWN}'
            WHEN layers.weak THEN '{Grade.INFERRED}' ELSE '{Grade.EXACT}' END
        FROM span_layers layers WHERE layers.trace_id = {name}.trace_id AND layers.span_id = {name}.span_id
        """
    )
    con.execute("DROP TABLE span_layers")
