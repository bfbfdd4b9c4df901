"""Translation of DuckDB's SQL to Spark's: one function per rule for constructs that sqlglot does not translate.

A rule takes a node of the parsed query and returns its replacement. A construct without a translation raises an
error with its name; it is never replaced by a merely similar construct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlglot import ErrorLevel, exp, parse_one
from sqlglot.errors import ParseError, UnsupportedError

from xsp.errors import AnalysisError

UNSUPPORTED_FUNCTIONS = {"hash": "hash values of another engine are other values"}
"""Functions that both engines have under the same name, with different results → the reason for the error."""


def parse(query: str) -> exp.Expression:
    """Return the parsed query of DuckDB.

    Raises:
        AnalysisError: sqlglot cannot parse it.
    """
    try:
        return parse_one(query, read="duckdb")
    except ParseError as error:
        reason = error.errors[0].get("description", "cannot be parsed") if error.errors else str(error)
        raise AnalysisError(f"the SQL does not carry over to Spark: {reason}") from error


def translate(tree: exp.Expression) -> str:
    """Return the query as Spark's SQL.

    Raises:
        AnalysisError: a part of it has no counterpart in Spark; the message names it.
    """
    for rule in RULES:
        tree = tree.transform(rule)
    try:
        sql: str = tree.sql("spark", unsupported_level=ErrorLevel.RAISE)
    except UnsupportedError as error:
        raise AnalysisError(f"the SQL does not carry over to Spark: {error}") from error
    return sql


def tables(tree: exp.Expression) -> set[str]:
    """Return the names of the tables that a query reads, without the tables that it defines itself."""
    defined = {cte.alias for cte in tree.find_all(exp.CTE)}
    return {table.name for table in tree.find_all(exp.Table)} - defined


def materialized(tree: exp.Expression) -> Iterator[tuple[exp.CTE, str]]:
    """Yield each MATERIALIZED table of a WITH clause, with its self-contained query in Spark's SQL.

    The caller may replace a table before it requests the next one.
    """
    earlier: list[exp.CTE] = []
    for cte in tree.ctes:
        if cte.args.get("materialized"):
            query = cte.this.copy()
            clause = query.args.get("with_")
            query.set(
                "with_",
                exp.With(expressions=[table.copy() for table in earlier + (clause.expressions if clause else [])]),
            )
            yield cte, translate(query)
        earlier.append(cte)


def _inline(node: exp.Expression) -> exp.Expression:
    """Remove MATERIALIZED: Spark itself decides whether to store a table of a WITH clause."""
    if isinstance(node, exp.CTE):
        node.set("materialized", None)
    return node


def _asof(node: exp.Expression) -> exp.Expression:
    """Translate an ASOF join: each row of the right side applies until the next row with the same keys begins."""
    if not isinstance(node, exp.Join) or node.args.get("method") != "ASOF":
        return node
    name, equalities, inequality = node.this.alias_or_name, [], None
    for condition in node.args["on"].flatten():
        if isinstance(condition, exp.EQ):
            equalities.append(condition)
        else:
            inequality = condition
    if not isinstance(inequality, exp.LTE) or inequality.this.table != name:
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    keys = [side for condition in equalities for side in (condition.this, condition.expression) if side.table == name]
    start = exp.column(inequality.this.name)
    end = exp.Window(
        this=exp.Lead(this=start.copy()),
        partition_by=[exp.column(column.name) for column in keys],
        order=exp.Order(expressions=[exp.Ordered(this=start.copy(), nulls_first=False)]),
    )
    intervals = exp.select("*", exp.alias_(end, "asof_until")).from_(exp.to_table(node.this.name)).subquery(name)
    end_column = exp.column("asof_until", table=name)
    is_current = exp.or_(
        end_column.is_(exp.null()), exp.LT(this=inequality.expression.copy(), expression=end_column.copy())
    )
    node.set("method", None)
    node.set("this", intervals)
    node.set("on", exp.and_(node.args["on"], is_current))
    return node


def _filtered_window(node: exp.Expression) -> exp.Expression:
    """Translate FILTER over a window, which Spark lacks: values that do not count become null."""
    if not isinstance(node, exp.Window) or not isinstance(node.this, exp.Filter):
        return node
    function, condition = node.this.this.copy(), node.this.expression.this
    operand = exp.Literal.number(1) if isinstance(function.this, exp.Star) else function.this
    function.set("this", exp.Case(ifs=[exp.If(this=condition.copy(), true=operand.copy())]))
    node.set("this", function)
    return node


def _first_or_last(node: exp.Expression) -> exp.Expression:
    """Translate `first` and `last(… ORDER BY …)` to the value with the smallest or largest key.

    Keys are negated for descending order.
    """
    if not isinstance(node, exp.First | exp.Last) or not isinstance(node.this, exp.Order):
        return node
    keys = [exp.Neg(this=key.this.copy()) if key.args.get("desc") else key.this.copy()
            for key in node.this.expressions]  # fmt: skip
    of_extreme = exp.ArgMin if isinstance(node, exp.First) else exp.ArgMax
    return of_extreme(this=node.this.this.copy(), expression=_struct(keys))


def _ordered_list(node: exp.Expression) -> exp.Expression:
    """Translate `list(… ORDER BY …)`: sort it afterwards, by its values or by key structs; Spark collects unordered."""
    if not isinstance(node, exp.ArrayAgg) or not isinstance(node.this, exp.Order):
        return node
    element, (key,) = node.this.this, node.this.expressions[:1]
    first = element.expressions[0] if isinstance(element, exp.Tuple) else element
    if len(node.this.expressions) == 1 and first == key.this and not key.args.get("desc"):
        return exp.func("sort_array", exp.ArrayAgg(this=element.copy()))
    pairs = exp.func("sort_array", exp.ArrayAgg(this=_struct([term.this.copy() for term in node.this.expressions]
                                                            + [element.copy()])))  # fmt: skip
    if any(term.args.get("desc") for term in node.this.expressions):
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    last_field = f"f{len(node.this.expressions) + 1}"
    parameter = exp.to_identifier("one")
    return exp.func("transform", pairs, exp.Lambda(this=exp.column(last_field, table="one"), expressions=[parameter]))


def _comprehension(node: exp.Expression) -> exp.Expression:
    """Translate a list comprehension to `transform`; fields of its elements are accessed by position."""
    if not isinstance(node, exp.Array) or not isinstance(node.expressions[0] if node.expressions else None,
                                                        exp.Comprehension):  # fmt: skip
        return node
    comprehension = node.expressions[0]
    name = comprehension.expression.name

    def field(child: exp.Expression) -> exp.Expression:
        if isinstance(child, exp.Bracket) and child.this.name == name:
            return exp.column(f"f{int(child.expressions[0].name) + 1}", table=name)
        return child

    function = exp.Lambda(this=comprehension.this.transform(field), expressions=[exp.to_identifier(name)])
    return exp.func("transform", comprehension.args["iterator"].copy(), function)


def _tuple(node: exp.Expression) -> exp.Expression:
    """Translate an unnamed tuple to a struct with fields named by position."""
    if isinstance(node, exp.Tuple) and not isinstance(node.parent, (exp.In, exp.Values)):
        return _struct([element.copy() for element in node.expressions])
    return node


def _struct(fields: list[exp.Expression]) -> exp.Expression:
    arguments = [part for number, field in enumerate(fields, 1) for part in (exp.Literal.string(f"f{number}"), field)]
    return exp.func("named_struct", *arguments)


def _quantiles(node: exp.Expression) -> exp.Expression:
    """Translate `quantile_cont` to Spark's `percentile`, which interpolates the same way."""
    if isinstance(node, exp.PercentileCont):
        return exp.func("percentile", node.this.copy(), node.expression.copy())
    return node


def _pattern(node: exp.Expression) -> exp.Expression:
    """Move the flags of a regular expression into the pattern: Spark has no argument for them."""
    if isinstance(node, exp.RegexpLike) and node.args.get("flag") is not None:
        flag = node.args["flag"].name
        return exp.RegexpLike(this=node.this.copy(), expression=exp.Literal.string(f"(?{flag}){node.expression.name}"))
    return node


def _json(node: exp.Expression) -> exp.Expression:
    """Translate `json_valid`: text is valid JSON if Spark can parse it."""
    if isinstance(node, exp.Anonymous) and node.name.lower() == "json_valid":
        return exp.func("try_parse_json", node.expressions[0].copy()).is_(exp.null()).not_()
    return node


def _json_list(node: exp.Expression) -> exp.Expression:
    """Translate the extraction of several JSON paths at once to an array of single extractions."""
    if not isinstance(node, exp.JSONExtractScalar) or not isinstance(node.expression, exp.Array):
        return node
    return exp.func("array", *(exp.func("get_json_object", node.this.copy(), path.copy())
                               for path in node.expression.expressions))  # fmt: skip


def _subscript(node: exp.Expression) -> exp.Expression:
    """Translate `list[:n]`; refuse a computed index, which counts from 1 in DuckDB and from 0 in Spark."""
    if not isinstance(node, exp.Bracket):
        return node
    (index,) = node.expressions
    if isinstance(index, exp.Slice) and index.this is None:
        return exp.func("slice", node.this.copy(), exp.Literal.number(1), index.expression.copy())
    if not isinstance(index, exp.Literal):
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    return node


def _numbers(node: exp.Expression) -> exp.Expression:
    """Cast decimal literals to double, as DuckDB does in formulas; in Spark they would stay decimals."""
    if isinstance(node, exp.Literal) and not node.is_string and not node.is_int:
        return exp.cast(node.copy(), "double") if not isinstance(node.parent, exp.Cast) else node
    if isinstance(node, exp.DataType) and node.this in (exp.DataType.Type.INT128, exp.DataType.Type.UINT128):
        return exp.DataType.build("decimal(38, 0)")
    return node


def _reject_unsupported(node: exp.Expression) -> exp.Expression:
    name = node.sql_name().lower() if isinstance(node, exp.Func) else ""
    if isinstance(node, exp.Anonymous):
        name = node.name.lower()
    if name in UNSUPPORTED_FUNCTIONS:
        raise AnalysisError(f"the SQL does not carry over to Spark: {name}(): {UNSUPPORTED_FUNCTIONS[name]}")
    return node


RULES: tuple[Callable[[exp.Expression], exp.Expression], ...] = (
    _reject_unsupported, _inline, _asof, _filtered_window, _first_or_last, _ordered_list, _comprehension, _tuple,
    _quantiles, _pattern, _json, _json_list, _subscript, _numbers,
)  # fmt: skip
