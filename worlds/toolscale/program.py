"""Tools as data: a tool is an OpenAI function schema, a kind and a program; runs such programs.

A program is a list of steps over tables {table: {key: record}}. Records and tables are never
changed in place: a write makes a new table, and the caller's tables take over the new ones only
when the whole program has run. So a call that fails changes nothing, and a copy of the tables is a
copy of their outer dict. No step executes code; arithmetic is the four operations.

    {"op": "get", "table": T, "key": E, "as": V, "error": TEXT}    the record with that key
    {"op": "find", "table": T, "where": [[FIELD, CMP, E], ...], "as": V, "error": TEXT}
                                                                   the only record that fits
    {"op": "select", "table": T, "where": [...], "fields": [...], "as": V}
                                             all that fit; "fields" may be left out
    {"op": "change", "rows": E, "where": [...], "set": {FIELD: E}, "as": V}
                                             the rows, with those that fit changed
    {"op": "require", "if": [E, CMP, E], "error": TEXT, "rule": TEXT}
                                             a precondition; `rule` is its sentence in the policy
    {"op": "compute", "as": V, "value": E, "rule": TEXT}
    {"op": "insert", "table": T, "key": E, "record": {FIELD: E}}
    {"op": "update", "table": T, "key": E, "set": {FIELD: E}}
    {"op": "delete", "table": T, "key": E}
    {"op": "return", "value": E}

`find` and `select` take {"rows": E}, a list of records, in place of a table.
E is a literal, "$name" or "$name.field" (an argument or a variable), or one operation:
{"+": [E, E]}, "-", "*", "/", {"round": [E, digits]}, {"lookup": [E, {literal: value}]},
{"next_id": [TABLE, PREFIX]}, {"calculate": E}, {"object": {NAME: E}}, {"list": [E, ...]},
{"count": E}, {"sum": [E, FIELD]}, {"mean": [E, FIELD]}.
CMP is one of == != < <= > >= in. A TEXT may name variables: "There is no order {order_id}."
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

Json = dict[str, Any]  # a JSON object
Tables = dict[str, dict[str, Json]]
ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, options: value in options,
}


class ToolError(Exception):
    """A call that cannot be done. The message is what the agent reads."""


def run(tool: Json, arguments: Json, tables: Tables) -> Any:
    """Returns what the tool's program returns and puts the tables that it wrote into `tables`.

    Raises ToolError, and then `tables` are as they were.
    """
    call = _Call(arguments, tables)
    try:
        for step in tool["program"]:
            if step["op"] == "return":
                result = call.value(step["value"])
                tables.update(call.tables)
                return result
            getattr(call, step["op"])(step)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        name = tool["function"]["name"]
        raise ToolError(f"{name} cannot be done with these arguments ({reason})") from None
    tables.update(call.tables)


def evaluate(e: Any, scope: Json) -> Any:
    """Returns the value of an expression over variables. Raises LookupError, TypeError."""
    return _Call(scope, {}).value(e)


class _Call:
    """One run of a program: the variables so far, the tables as changed, a method for each step."""

    def __init__(self, scope: Json, tables: Tables):
        self.scope, self.tables = dict(scope), dict(tables)

    def value(self, e: Any) -> Any:
        if isinstance(e, str) and e.startswith("$"):
            name, *path = e[1:].split(".")
            found = self.scope[name]
            for field in path:
                found = found[field]
            return found
        if isinstance(e, dict):
            ((operation, operands),) = e.items()
            if operation in ARITHMETIC:
                return ARITHMETIC[operation](*map(self.value, operands))
            return OPERATIONS[operation](self, operands)
        return e

    def values(self, record: Json) -> Json:
        return {field: self.value(e) for field, e in record.items()}

    def demand(self, condition: bool, text: str) -> None:
        if not condition:
            reference = r"\{([\w.]+)\}"
            raise ToolError(re.sub(reference, lambda m: str(self.value("$" + m[1])), text))

    def get(self, step: Json) -> None:
        record = self.tables[step["table"]].get(self.value(step["key"]))
        self.demand(record is not None, step["error"])
        self.scope[step["as"]] = record

    def fitting(self, step: Json) -> list[Json]:
        rows = self.value(step["rows"]) if "rows" in step else self.tables[step["table"]].values()
        rows = list(rows)
        for field, compare, right in step["where"]:
            fits, wanted = COMPARE[compare], self.value(right)
            rows = [row for row in rows if fits(row[field], wanted)]
        return rows

    def find(self, step: Json) -> None:
        rows = self.fitting(step)
        self.demand(len(rows) == 1, step["error"])
        self.scope[step["as"]] = rows[0]

    def select(self, step: Json) -> None:
        rows = self.fitting(step)
        if "fields" in step:
            rows = [{field: row[field] for field in step["fields"]} for row in rows]
        self.scope[step["as"]] = rows

    def change(self, step: Json) -> None:
        fitting, values = self.fitting(step), self.values(step["set"])
        rows = self.value(step["rows"])
        self.scope[step["as"]] = [row | values if row in fitting else row for row in rows]

    def require(self, step: Json) -> None:
        left, compare, right = step["if"]
        self.demand(COMPARE[compare](self.value(left), self.value(right)), step["error"])

    def compute(self, step: Json) -> None:
        self.scope[step["as"]] = self.value(step["value"])

    def insert(self, step: Json) -> None:
        rows, key = self.tables[step["table"]], self.value(step["key"])
        self.demand(key not in rows, f"{step['table']}: {key} is there already")
        self.tables[step["table"]] = rows | {key: self.values(step["record"])}

    def update(self, step: Json) -> None:
        rows, key = self.tables[step["table"]], self.value(step["key"])
        self.tables[step["table"]] = rows | {key: rows[key] | self.values(step["set"])}

    def delete(self, step: Json) -> None:
        rows = dict(self.tables[step["table"]])
        del rows[self.value(step["key"])]
        self.tables[step["table"]] = rows

    def column(self, operands: list[Any]) -> list[float]:
        rows, field = operands
        return [row[field] for row in self.value(rows)]

    def next_id(self, operands: list[str]) -> str:
        table, prefix = operands
        ends = [key.removeprefix(prefix) for key in self.tables[table]]
        return prefix + str(1 + max((int(end) for end in ends if end.isdecimal()), default=0))


OPERATIONS = {
    "round": lambda call, e: round(call.value(e[0]), e[1]),
    "lookup": lambda call, e: e[1][str(call.value(e[0]))],
    "calculate": lambda call, e: calculate(call.value(e)),
    "next_id": _Call.next_id,
    "object": _Call.values,
    "list": lambda call, e: [call.value(each) for each in e],
    "count": lambda call, e: len(call.value(e)),
    "sum": lambda call, e: round(sum(call.column(e)), 2),
    "mean": lambda call, e: round(sum(call.column(e)) / len(call.column(e)), 2),
}
_SIGNS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}


def calculate(expression: str) -> float:
    """Returns the value of +, -, *, / and brackets over numbers, to two decimals.

    Raises ToolError for anything else, and for more than 200 characters.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression)
    try:
        if len(text) <= 200 and re.fullmatch(r"[\d\s.+\-*/()]+", text):
            return round(_arithmetic(ast.parse(text.strip(), mode="eval").body), 2)
    except (SyntaxError, LookupError, ArithmeticError, AttributeError, TypeError, MemoryError):
        pass
    raise ToolError(
        f"cannot calculate {expression!r}: numbers, + - * / and brackets only, at most 200 "
        "characters, and no division by zero"
    )


def _arithmetic(node: Any) -> float:
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp():
            value = _arithmetic(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
    operation = ARITHMETIC[_SIGNS[type(node.op)]]
    return operation(_arithmetic(node.left), _arithmetic(node.right))
