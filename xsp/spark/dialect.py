"""Translation of DuckDB's SQL to Spark's: one function per rule for constructs that sqlglot does not translate.

A rule takes a node of the parsed query and returns its replacement. A construct without a translation raises an
error with its name; it is never replaced by something that merely looks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlglot import ErrorLevel, exp, parse_one
from sqlglot.errors import ParseError, UnsupportedError

from xsp.errors import AnalysisError

REFUSED = {"hash": "hash values of another engine are other values"}
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
        written: str = tree.sql("spark", unsupported_level=ErrorLevel.RAISE)
    except UnsupportedError as error:
        raise AnalysisError(f"the SQL does not carry over to Spark: {error}") from error
    return written


def tables(tree: exp.Expression) -> set[str]:
    """Return the names of the tables that a query reads, without the tables that it defines itself."""
    defined = {each.alias for each in tree.find_all(exp.CTE)}
    return {each.name for each in tree.find_all(exp.Table)} - defined


def materialized(tree: exp.Expression) -> Iterator[tuple[exp.CTE, str]]:
    """Yield each MATERIALIZED table of a WITH clause, with its self-contained query in Spark's SQL.

    The caller may replace a table before it requests the next one.
    """
    defined: list[exp.CTE] = []
    for each in tree.ctes:
        if each.args.get("materialized"):
            alone = each.this.copy()
            inner = alone.args.get("with_")
            alone.set(
                "with_", exp.With(expressions=[one.copy() for one in defined + (inner.expressions if inner else [])])
            )
            yield each, translate(alone)
        defined.append(each)


def _inline(node: exp.Expression) -> exp.Expression:
    """Remove MATERIALIZED: Spark itself decides whether to store a table of a WITH clause."""
    if isinstance(node, exp.CTE):
        node.set("materialized", None)
    return node


def _asof(node: exp.Expression) -> exp.Expression:
    """Translate an ASOF join: each row of the right side applies until the next row with the same keys begins."""
    if not isinstance(node, exp.Join) or node.args.get("method") != "ASOF":
        return node
    name, equal, later = node.this.alias_or_name, [], None
    for each in node.args["on"].flatten():
        if isinstance(each, exp.EQ):
            equal.append(each)
        else:
            later = each
    if not isinstance(later, exp.LTE) or later.this.table != name:
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    own = [side for each in equal for side in (each.this, each.expression) if side.table == name]
    begins = exp.column(later.this.name)
    until = exp.Window(
        this=exp.Lead(this=begins.copy()),
        partition_by=[exp.column(each.name) for each in own],
        order=exp.Order(expressions=[exp.Ordered(this=begins.copy(), nulls_first=False)]),
    )
    held = exp.select("*", exp.alias_(until, "asof_until")).from_(exp.to_table(node.this.name)).subquery(name)
    bound = exp.column("asof_until", table=name)
    holds = exp.or_(bound.is_(exp.null()), exp.LT(this=later.expression.copy(), expression=bound.copy()))
    node.set("method", None)
    node.set("this", held)
    node.set("on", exp.and_(node.args["on"], holds))
    return node


def _filtered_window(node: exp.Expression) -> exp.Expression:
    """Translate FILTER over a window, which Spark lacks: values that do not count become null."""
    if not isinstance(node, exp.Window) or not isinstance(node.this, exp.Filter):
        return node
    function, condition = node.this.this.copy(), node.this.expression.this
    counted = exp.Literal.number(1) if isinstance(function.this, exp.Star) else function.this
    function.set("this", exp.Case(ifs=[exp.If(this=condition.copy(), true=counted.copy())]))
    node.set("this", function)
    return node


def _first(node: exp.Expression) -> exp.Expression:
    """Translate `first(… ORDER BY …)` to the value with the smallest key; keys are negated for descending order."""
    if not isinstance(node, exp.First) or not isinstance(node.this, exp.Order):
        return node
    keys = [exp.Neg(this=each.this.copy()) if each.args.get("desc") else each.this.copy()
            for each in node.this.expressions]  # fmt: skip
    return exp.ArgMin(this=node.this.this.copy(), expression=_struct(keys))


def _ordered_list(node: exp.Expression) -> exp.Expression:
    """Translate `list(… ORDER BY …)`: sort it afterwards, by its values or by key structs; Spark collects unordered."""
    if not isinstance(node, exp.ArrayAgg) or not isinstance(node.this, exp.Order):
        return node
    what, (key,) = node.this.this, node.this.expressions[:1]
    first = what.expressions[0] if isinstance(what, exp.Tuple) else what
    if len(node.this.expressions) == 1 and first == key.this and not key.args.get("desc"):
        return exp.func("sort_array", exp.ArrayAgg(this=what.copy()))
    pairs = exp.func("sort_array", exp.ArrayAgg(this=_struct([each.this.copy() for each in node.this.expressions]
                                                            + [what.copy()])))  # fmt: skip
    if any(each.args.get("desc") for each in node.this.expressions):
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    last = f"f{len(node.this.expressions) + 1}"
    one = exp.to_identifier("one")
    return exp.func("transform", pairs, exp.Lambda(this=exp.column(last, table="one"), expressions=[one]))


def _comprehension(node: exp.Expression) -> exp.Expression:
    """Translate a list comprehension to `transform`; fields of its elements are accessed by position."""
    if not isinstance(node, exp.Array) or not isinstance(node.expressions[0] if node.expressions else None,
                                                        exp.Comprehension):  # fmt: skip
        return node
    made = node.expressions[0]
    name = made.expression.name

    def field(each: exp.Expression) -> exp.Expression:
        if isinstance(each, exp.Bracket) and each.this.name == name:
            return exp.column(f"f{int(each.expressions[0].name) + 1}", table=name)
        return each

    function = exp.Lambda(this=made.this.transform(field), expressions=[exp.to_identifier(name)])
    return exp.func("transform", made.args["iterator"].copy(), function)


def _tuple(node: exp.Expression) -> exp.Expression:
    """Translate an unnamed tuple to a struct with fields named by position."""
    if isinstance(node, exp.Tuple) and not isinstance(node.parent, (exp.In, exp.Values)):
        return _struct([each.copy() for each in node.expressions])
    return node


def _struct(fields: list[exp.Expression]) -> exp.Expression:
    named = [part for number, each in enumerate(fields, 1) for part in (exp.Literal.string(f"f{number}"), each)]
    return exp.func("named_struct", *named)


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
    return exp.func("array", *(exp.func("get_json_object", node.this.copy(), each.copy())
                               for each in node.expression.expressions))  # fmt: skip


def _part(node: exp.Expression) -> exp.Expression:
    """Translate `list[:n]`; refuse a computed index, which counts from 1 in DuckDB and from 0 in Spark."""
    if not isinstance(node, exp.Bracket):
        return node
    (place,) = node.expressions
    if isinstance(place, exp.Slice) and place.this is None:
        return exp.func("slice", node.this.copy(), exp.Literal.number(1), place.expression.copy())
    if not isinstance(place, exp.Literal):
        raise AnalysisError(f"the SQL does not carry over to Spark: {node.sql('duckdb')}")
    return node


def _numbers(node: exp.Expression) -> exp.Expression:
    """Cast decimal literals to double, as DuckDB does in formulas; in Spark they would stay decimals."""
    if isinstance(node, exp.Literal) and not node.is_string and not node.is_int:
        return exp.cast(node.copy(), "double") if not isinstance(node.parent, exp.Cast) else node
    if isinstance(node, exp.DataType) and node.this in (exp.DataType.Type.INT128, exp.DataType.Type.UINT128):
        return exp.DataType.build("decimal(38, 0)")
    return node


def _refused(node: exp.Expression) -> exp.Expression:
    name = node.sql_name().lower() if isinstance(node, exp.Func) else ""
    if isinstance(node, exp.Anonymous):
        name = node.name.lower()
    if name in REFUSED:
        raise AnalysisError(f"the SQL does not carry over to Spark: {name}(): {REFUSED[name]}")
    return node


RULES: tuple[Callable[[exp.Expression], exp.Expression], ...] = (
    _refused, _inline, _asof, _filtered_window, _first, _ordered_list, _comprehension, _tuple, _quantiles, _pattern,
    _json, _json_list, _part, _numbers,
)  # fmt: skip
