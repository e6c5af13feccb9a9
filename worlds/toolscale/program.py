"""Tools as data: a tool is an OpenAI function schema, a kind and a small declarative program; this is the one interpreter of such programs.

A program is a list of steps over tables {table: {key: record}}. It runs in process on plain dicts and atomically: a call that fails
changes nothing. Records are never changed in place, a write puts a new one, so that a copy of the tables is a copy of their outer dicts.
No step executes Python that somebody wrote; arithmetic is the four operations.

    {"op": "get", "table": T, "key": E, "as": V, "error": TEXT}               the record with that key, else the error
    {"op": "find", "table": T, "where": [[FIELD, CMP, E], ...], "as": V, "error": TEXT}       the only record that fits, else the error
    {"op": "select", "table": T, "where": [...], "fields": [...], "order": FIELD, "as": V}    all that fit (fields, order: optional)
    {"op": "aggregate", "function": "count|sum|mean|min|max", "rows": E, "field": FIELD, "as": V}
    {"op": "require", "if": [E, CMP, E], "error": TEXT, "rule": TEXT}         a precondition; `rule` is its sentence in the policy
    {"op": "compute", "as": V, "value": E, "rule": TEXT}
    {"op": "insert", "table": T, "key": E, "record": {FIELD: E}}
    {"op": "update", "table": T, "key": E, "set": {FIELD: E}}
    {"op": "delete", "table": T, "key": E}
    {"op": "return", "value": E}

E is a literal, "$name" or "$name.field" (an argument or a variable), or one operation: {"+": [E, E]}, "-", "*", "/", {"round": [E, digits]},
{"lookup": [E, {literal: value}]}, {"next_id": [TABLE, PREFIX]}, {"calculate": E}, {"object": {NAME: E}}. CMP: == != < <= > >= in.
A TEXT may name variables in braces: "There is no order {order_id}."
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import re
from typing import Any

from nanorchestra.errors import UserError

Tables = dict[str, dict[str, dict[str, Any]]]
KINDS = ("read", "write", "calculate", "handover")
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
AGGREGATE = {
    "count": len,
    "sum": lambda v: round(sum(v), 2),
    "mean": lambda v: round(sum(v) / len(v), 2),
    "min": min,
    "max": max,
}
STEPS = {
    "get": ("table", "key", "as", "error"),
    "find": ("table", "where", "as", "error"),
    "select": ("table", "where", "as"),
    "aggregate": ("function", "rows", "as"),
    "require": ("if", "error"),
    "compute": ("as", "value"),
    "insert": ("table", "key", "record"),
    "update": ("table", "key", "set"),
    "delete": ("table", "key"),
    "return": ("value",),
}
OPTIONAL = {
    "select": ("fields", "order"),
    "aggregate": ("field",),
    "require": ("rule",),
    "compute": ("rule",),
}


class ToolError(Exception):
    """A call that cannot be done. The message is what the agent reads."""


def run(tool: dict[str, Any], arguments: dict[str, Any], tables: Tables) -> Any:
    """The value that the tool's program returns. Raises ToolError, and then `tables` are as they were."""
    scope, undo = dict(arguments), []
    try:
        for step in tool["program"]:
            if step["op"] == "return":
                return _value(step["value"], scope, tables)
            _step(step, scope, tables, undo)
        return None
    except BaseException as error:
        for table, key, old in reversed(undo):
            if key is None:
                tables[table] = old  # a delete: the whole table, so that the order is kept too
            elif old is None:
                del tables[table][key]
            else:
                tables[table][key] = old
        if isinstance(
            error, (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError)
        ):
            raise ToolError(
                f"{tool['function']['name']} cannot be done with these arguments ({type(error).__name__}: {error})"
            ) from None
        raise


def _step(
    step: dict[str, Any],
    scope: dict[str, Any],
    tables: Tables,
    undo: list[tuple[str, str | None, Any]],
) -> None:
    op = step["op"]
    if op == "require":
        left, compare, right = step["if"]
        if not COMPARE[compare](_value(left, scope, tables), _value(right, scope, tables)):
            raise ToolError(_text(step["error"], scope))
    elif op == "get":
        record = tables[step["table"]].get(_value(step["key"], scope, tables))
        if record is None:
            raise ToolError(_text(step["error"], scope))
        scope[step["as"]] = record
    elif op == "compute":
        scope[step["as"]] = _value(step["value"], scope, tables)
    elif op in ("select", "find"):
        tests = [
            (field, COMPARE[compare], _value(right, scope, tables))
            for field, compare, right in step["where"]
        ]
        rows = [
            row
            for row in tables[step["table"]].values()
            if all(test(row[field], right) for field, test, right in tests)
        ]
        if op == "find":
            if len(rows) != 1:
                raise ToolError(_text(step["error"], scope))
            rows = rows[0]
        else:
            if "order" in step:
                rows.sort(key=operator.itemgetter(step["order"]))
            if "fields" in step:
                rows = [{field: row[field] for field in step["fields"]} for row in rows]
        scope[step["as"]] = rows
    elif op == "aggregate":
        rows = _value(step["rows"], scope, tables)
        values = [row[step["field"]] for row in rows] if "field" in step else rows
        if not values and step["function"] in ("mean", "min", "max"):
            raise ToolError("there is nothing to aggregate")
        scope[step["as"]] = AGGREGATE[step["function"]](values)
    else:
        table, key = tables[step["table"]], _value(step["key"], scope, tables)
        if (op == "insert") == (key in table):
            raise ToolError(
                f"{step['table']}: {key} {'is there already' if op == 'insert' else 'is not there'}"
            )
        if op == "delete":
            undo.append((step["table"], None, dict(table)))
            del table[key]
            return
        fields = {
            field: _value(e, scope, tables)
            for field, e in step["record" if op == "insert" else "set"].items()
        }
        undo.append((step["table"], key, table.get(key)))
        table[key] = fields if op == "insert" else table[key] | fields


def _value(e: Any, scope: dict[str, Any], tables: Tables) -> Any:
    if isinstance(e, str):
        if not e.startswith("$"):
            return e
        name, *path = e[1:].split(".")
        found = scope[name]
        for part in path:
            found = found[part]
        return found
    if not isinstance(e, dict):
        return e
    ((name, operands),) = e.items()
    if name in ARITHMETIC:
        left, right = operands
        return ARITHMETIC[name](_value(left, scope, tables), _value(right, scope, tables))
    if name == "round":
        return round(_value(operands[0], scope, tables), operands[1])
    if name == "lookup":
        return operands[1][str(_value(operands[0], scope, tables))]
    if name == "object":
        return {key: _value(inner, scope, tables) for key, inner in operands.items()}
    if name == "next_id":
        table, prefix = operands
        return prefix + str(
            1
            + max(
                (
                    int(digits)
                    for key in tables[table]
                    if (digits := key[len(prefix) :]).isdecimal()
                ),
                default=0,
            )
        )
    if name == "calculate":
        return calculate(_value(operands, scope, tables))
    raise ValueError(f"unknown operation {name!r}")


def _text(template: str, scope: dict[str, Any]) -> str:
    return re.sub(r"\{([\w.]+)\}", lambda match: str(_value("$" + match[1], scope, {})), template)


def calculate(expression: str) -> float:
    """The value of +, -, *, / and brackets over numbers, to two decimals. Raises ToolError for anything else."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression)
    try:
        if len(text) > 200 or not re.fullmatch(r"[\d\s.+\-*/()]+", text):
            raise ValueError
        return round(_arithmetic(ast.parse(text.strip(), mode="eval").body), 2)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        raise ToolError(
            f"cannot calculate {expression!r}: numbers, + - * / and brackets only, at most 200 characters"
        ) from None


def _arithmetic(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return (
            -_arithmetic(node.operand)
            if isinstance(node.op, ast.USub)
            else _arithmetic(node.operand)
        )
    operations = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    if isinstance(node, ast.BinOp) and type(node.op) in operations:
        return ARITHMETIC[operations[type(node.op)]](
            _arithmetic(node.left), _arithmetic(node.right)
        )
    raise ValueError


def canonical(value: Any) -> str:
    """The JSON text that is the same for any order of keys. Raises UserError for what JSON cannot hold."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"database: not JSON ({error}); tables hold strings, finite numbers, booleans, null, lists and objects with text keys"
        ) from None


def database_hash(tables: Any) -> str:
    """SHA-256 of the canonical JSON of the tables, in hexadecimal."""
    return hashlib.sha256(canonical(tables).encode()).hexdigest()


# --- checking a tool before it is ever run ---------------------------------------------------------------------------------------------


def check_tool(tool: Any, schema: dict[str, Any], where: str) -> None:
    """Raises UserError if the tool is not what `run` takes: a step, table, field, variable or parameter that does not exist is named.

    `schema` is {table: {"key": field, "fields": {field: {"type": ...}}}}.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,64}", name):
        raise UserError(
            f"{where}: function.name is {name!r}; it must be letters, digits and underscores"
        )
    where = f"{where}: {name}"
    if tool.get("kind") not in KINDS:
        raise UserError(
            f"{where}: kind is {tool.get('kind')!r}; it must be one of {', '.join(KINDS)}"
        )
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not isinstance(function.get("description"), str):
        raise UserError(
            f"{where}: a description and parameters with properties (a JSON schema) are needed"
        )
    for parameter, shape in properties.items():
        if not isinstance(shape, dict) or shape.get("type") not in (
            "string",
            "integer",
            "number",
            "boolean",
            "array",
            "object",
        ):
            raise UserError(
                f"{where}: parameter {parameter}: type must be string, integer, number, boolean, array or object"
            )
    for parameter in parameters.get("required", ()):
        if parameter not in properties:
            raise UserError(
                f"{where}: required parameter {parameter!r} is not among its properties"
            )
    program = tool.get("program")
    if not isinstance(program, list) or not program:
        raise UserError(f"{where}: program is {program!r:.40}; it must be a list of steps")
    checker = _Checker(schema, dict.fromkeys(properties))
    for number, step in enumerate(program):
        try:
            checker.step(step)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(f"{where}: step {number}: {error}") from None
    if tool["kind"] == "read" and any(
        step["op"] in ("insert", "update", "delete") for step in program
    ):
        raise UserError(f"{where}: kind is read, but its program writes; the kind must be write")


class _Checker:
    """Walks a program's steps; `known` maps each variable to the set of fields it is known to have (None: not known)."""

    def __init__(self, schema: dict[str, Any], known: dict[str, set[str] | None]):
        self.schema, self.known = schema, known

    def step(self, step: dict[str, Any]) -> None:
        op = step.get("op")
        if op not in STEPS:
            raise ValueError(f"op is {op!r}; it must be one of {', '.join(STEPS)}")
        if missing := [field for field in STEPS[op] if field not in step]:
            raise ValueError(f"{op} needs {missing[0]!r}")
        if unknown := set(step) - {"op", *STEPS[op], *OPTIONAL.get(op, ())}:
            raise ValueError(f"{op} has no setting {sorted(unknown)[0]!r}")
        fields = self.fields(step["table"]) if "table" in step else set()
        for field, compare, right in step.get("where", ()):
            self.field(step["table"], field)
            self.comparison(compare)
            self.value(right)
        for field in (*step.get("fields", ()), *((step["order"],) if "order" in step else ())):
            self.field(step["table"], field)
        for field, e in (step.get("record") or step.get("set") or {}).items():
            self.field(step["table"], field)
            self.value(e)
        if op == "insert" and (missing := fields - set(step["record"])):
            raise ValueError(f"the record for {step['table']} lacks {sorted(missing)[0]!r}")
        for part in ("key", "value", "rows"):
            if part in step:
                self.value(step[part])
        if op == "require":
            left, compare, right = step["if"]
            self.value(left), self.comparison(compare), self.value(right)
        if op == "aggregate" and (
            step["function"] not in AGGREGATE or step["function"] != "count" and "field" not in step
        ):
            raise ValueError(
                f"function is {step['function']!r}; it must be one of {', '.join(AGGREGATE)}, and all but count need a field"
            )
        for reference in re.findall(r"\{([\w.]+)\}", step.get("error", "")):
            self.value("$" + reference)
        if "as" in step:
            self.known[step["as"]] = fields if op in ("get", "find") else None

    def fields(self, table: str) -> set[str]:
        if table not in self.schema:
            raise ValueError(f"there is no table {table!r}; there are {', '.join(self.schema)}")
        return set(self.schema[table]["fields"])

    def field(self, table: str, field: str) -> None:
        if field not in self.fields(table):
            raise ValueError(
                f"table {table!r} has no field {field!r}; it has {', '.join(self.schema[table]['fields'])}"
            )

    def comparison(self, compare: str) -> None:
        if compare not in COMPARE:
            raise ValueError(f"comparison is {compare!r}; it must be one of {', '.join(COMPARE)}")

    def value(self, e: Any) -> None:
        if isinstance(e, str) and e.startswith("$"):
            name, *path = e[1:].split(".")
            if name not in self.known:
                raise ValueError(f"{e}: there is no argument or variable {name!r}")
            if path and self.known[name] is not None and path[0] not in self.known[name]:
                raise ValueError(
                    f"{e}: no field {path[0]!r}; {name} has {', '.join(sorted(self.known[name]))}"
                )
        elif isinstance(e, dict):
            if len(e) != 1:
                raise ValueError(f"{e!r:.60}: one operation is needed")
            ((name, operands),) = e.items()
            if name in ARITHMETIC:
                left, right = operands
                self.value(left), self.value(right)
            elif name in ("round", "lookup"):
                inner, with_ = operands
                self.value(inner)
                if not isinstance(with_, int if name == "round" else dict):
                    raise ValueError(f"{name}: {with_!r:.40} is not what it takes")
            elif name == "object":
                for inner in operands.values():
                    self.value(inner)
            elif name == "next_id":
                table, prefix = operands
                self.fields(table)
            elif name == "calculate":
                self.value(operands)
            else:
                raise ValueError(f"unknown operation {name!r}")
