"""Compiles what domain files write as text into the JSON that program.py runs.

    "order = get(orders, order_id)"                        the record with that key
    "user = find(users, name == given, 'no such user')"    the only record that fits
    "open = select(order.lines, sent == False)"            all that fit, of a table or of a list
    "lines = change(order.lines, line_id in ids, sent=True)"     the list, with those that fit set
    "require(order.status == 'open', 'It is {order.status}.', 'Only open ones can be sent.')"
    "total = round(sum(open, price) * lookup(user.tier, {'gold': 0.9}), 2)"
    "insert(orders, key, field=value)", "update(orders, key, field=value)", "delete(orders, key)"
    "return {'order_id': order_id}"

The syntax is Python's, the meaning is not: names are arguments and variables, the first name of a
comparison in `find`, `select` and `change` is a field.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from worlds.toolscale.program import Json

OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
}
Condition = tuple[Any, str, Any]  # two expressions and how they compare


def program(lines: list[str]) -> list[Json]:
    """Returns the steps of a program. Raises ValueError that names the line."""
    steps: list[Json] = []
    for line in lines:
        try:
            steps.append(_step(ast.parse(line).body[0], {step.get("as") for step in steps}))
        except (SyntaxError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{line!r} is no step ({error})") from None
    return steps


@lru_cache(maxsize=4096)
def expression(text: str) -> Any:
    """Returns the expression of a text."""
    return _expression(ast.parse(text, mode="eval").body)


@lru_cache(maxsize=4096)
def conditions(text: str) -> tuple[Condition, ...]:
    """Returns the comparisons of a text, which `and` joins; none of an empty one."""
    if not text:
        return ()
    node = ast.parse(text, mode="eval").body
    parts = node.values if isinstance(node, ast.BoolOp) else [node]
    return tuple(_comparison(part) for part in parts)


@lru_cache(maxsize=4096)
def call(text: str) -> tuple[str, tuple[Any, ...]]:
    """Returns the name and the expressions of a call: "cancel(order.id, why)"."""
    node = ast.parse(text, mode="eval").body
    return node.func.id, tuple(map(_expression, node.args))


def _step(node: Any, variables: set[str | None]) -> Json:
    if isinstance(node, ast.Return):
        return {"op": "return", "value": _expression(node.value)}
    named = {"as": node.targets[0].id} if isinstance(node, ast.Assign) else {}
    made = node.value
    op = made.func.id if isinstance(made, ast.Call) else ""
    if op not in STEPS:
        return {"op": "compute", "value": _expression(made)} | named
    first, rest = made.args[0], made.args[1:]
    values = {each.arg: _expression(each.value) for each in made.keywords}
    step: Json = {"op": op} | named
    if "fields" in values:
        step["fields"] = [each[1:] for each in values["fields"]["list"]]
    if op == "require":
        texts = [each.value for each in rest]
        return (
            step | {"if": [*_comparison(first)]} | dict(zip(("error", "rule"), texts, strict=False))
        )
    table = isinstance(first, ast.Name) and first.id not in variables
    step |= {"table": first.id} if table else {"rows": _expression(first)}
    if STEPS[op]:
        step["key"] = _expression(rest[0])
    else:
        where = [_comparison(each) for each in rest if isinstance(each, ast.Compare)]
        step["where"] = [[left[1:], compare, right] for left, compare, right in where]
    if op in ("get", "find"):
        last = rest[-1]
        said = last.value if isinstance(last, ast.Constant) else ""
        step["error"] = said or f"{first.id} has no {{{step['key'][1:]}}}."
    if op in ("insert", "update", "change"):
        step["record" if op == "insert" else "set"] = values
    return step


STEPS = {  # whether the second argument is a key
    "require": False,
    "get": True,
    "find": False,
    "select": False,
    "change": False,
    "insert": True,
    "update": True,
    "delete": True,
}


def _comparison(node: Any) -> Condition:
    compare = COMPARISONS[type(node.ops[0])]
    return _expression(node.left), compare, _expression(node.comparators[0])


def _expression(node: Any) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return f"${node.id}"
        case ast.Attribute():
            return f"{_expression(node.value)}.{node.attr}"
        case ast.BinOp():
            return {OPERATORS[type(node.op)]: [_expression(node.left), _expression(node.right)]}
        case ast.List():
            return {"list": [_expression(each) for each in node.elts]}
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {"object": {key.value: _expression(value) for key, value in pairs}}
        case ast.Call(func=ast.Name(id="lookup"), args=[key, table]):
            return {"lookup": [_expression(key), ast.literal_eval(table)]}
        case ast.Call(func=ast.Name(id=("sum" | "mean") as name), args=[rows, field]):
            return {name: [_expression(rows), field.id]}
        case ast.Call(func=ast.Name(id=("count" | "calculate") as name), args=[value]):
            return {name: _expression(value)}
        case ast.Call(func=ast.Name(id=("round" | "next_id") as name)):
            return {name: [_expression(each) for each in node.args]}
    raise ValueError(f"{ast.unparse(node)} has no meaning here")
