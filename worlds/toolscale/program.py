"""Runs the programs of tools, which are text, and evaluates the expressions of domain files.

    "order = get(orders, order_id)"                        the record with that key
    "user = find(users, name == given, 'no such user')"    the only record that fits
    "open = select(order.lines, sent == False)"            all that fit, of a table or of a list
    "rows = select(orders, user == user, fields=[order, total])"    only these fields of them
    "lines = change(order.lines, line_id in ids, sent=True)"     the list, with those that fit set
    "require(order.status == 'open', 'It is {order.status}.', 'Only open ones can be sent.')"
    "total = round(sum(open, price) * lookup(user.tier, {'gold': 0.9}), 2)"
    "insert(orders, key, field=value)", "update(orders, key, field=value)", "delete(orders, key)"
    "return {'order_id': order_id}"

The syntax is Python's, the meaning is not: names are arguments and variables, the first name of a
comparison in `find`, `select` and `change` is a field. Nothing of Python is executed: METHODS
and FUNCTIONS, at the end, are all that can be called.

Records and tables {table: {key: record}} are never changed in place: a write makes a new table, and
the caller's tables take over the new ones only when the whole program has run. So a call that fails
changes nothing, and a copy of the tables is a copy of their outer dict.
"""

import ast
import operator
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Json = dict[str, Any]  # a JSON object
Tables = dict[str, dict[str, Json]]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, options: value in options,
}
STEPS = ast.Return, ast.Assign, ast.Expr
VALUES = {  # what _value evaluates
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.Compare,
    ast.Call,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.List,
    ast.Dict,
}
PARTS = {*STEPS, *VALUES, *OPERATORS, ast.Load, ast.Store, ast.And, ast.keyword}

# What a program that cannot go on raises.
FAULTS = LookupError, TypeError, ValueError, ArithmeticError, AttributeError


class ToolError(Exception):
    """A call that cannot be done. The message is what the agent reads."""


def run(tool: Json, arguments: Json, tables: Tables) -> Any:
    """Returns what the tool's program returns and puts the tables that it wrote into `tables`.

    Raises ToolError, and then `tables` are as they were.
    """
    call, value = _Call(dict(arguments), dict(tables)), None
    try:
        for step in map(parse, tool["program"]):
            value = call._value(step.value)
            if isinstance(step, ast.Assign):
                call._scope[step.targets[0].id] = value
    except FAULTS as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        name = tool["function"]["name"]
        raise ToolError(f"{name} cannot be done with these arguments ({reason})") from None
    tables.update(call._tables)
    return value


def evaluate(text: str, scope: Json, tables: Tables | None = None) -> Any:
    """Returns the value of an expression over variables.

    Raises one of FAULTS, or ToolError.
    """
    return _Call(scope, tables or {})._value(parse(text).value)


@lru_cache(maxsize=8192)
def parse(text: str) -> Any:
    """Returns the syntax tree of a step or an expression. Raises ValueError."""
    step = _tree(text)
    for part in ast.walk(step):
        known = type(part) in PARTS
        if isinstance(part, ast.Call):
            known = isinstance(part.func, ast.Name) and part.func.id in METHODS | FUNCTIONS.keys()
        elif isinstance(part, ast.Compare):
            known = len(part.ops) == 1  # a chain, a < b < c, would be read as its first part
        elif isinstance(part, ast.Assign):
            known = len(part.targets) == 1
        if not known or not isinstance(step, STEPS):
            raise ValueError(f"{text!r} is not a step ({ast.unparse(part)} has no meaning here)")
    return step


@lru_cache(maxsize=4096)
def parse_call(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the tool and the expressions of a golden call: "cancel(order.id, why)".

    Raises ValueError, AttributeError.
    """
    node = _tree(text).value
    return node.func.id, tuple(map(ast.unparse, node.args))


def _tree(text) -> ast.stmt:
    """Returns the syntax tree of one statement. Raises ValueError."""
    try:
        (step,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a step ({error})") from None
    return step


def rules(tool: Json) -> list[str]:
    """Returns what the tool's program demands, a sentence each: the third text of `require`."""
    sentences = []
    for line in tool["program"]:
        match parse(line).value:
            case ast.Call(func=ast.Name(id="require"), args=[_, _, rule]):
                sentences.append(rule.value)
    return list(dict.fromkeys(sentences))


@dataclass
class _Call:
    """One run of a program: the variables so far, the tables as changed, and all functions."""

    _scope: Json
    _tables: Tables

    def _value(self, node):
        value = self._value
        match node:
            case ast.Name():
                return self._scope[node.id]
            case ast.Constant():
                return node.value
            case ast.Attribute():
                return value(node.value)[node.attr]
            case ast.Call():
                return self._called(node)
            case ast.Compare(ops=[sign], comparators=[right]):
                return OPERATORS[type(sign)](value(node.left), value(right))
            case ast.BinOp():
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BoolOp():
                return all(map(value, node.values))
            case ast.List():
                return [*map(value, node.elts)]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {key.value: value(each) for key, each in pairs}

    def _called(self, node):
        if function := FUNCTIONS.get(node.func.id):
            return function(*map(self._value, node.args))
        named = {each.arg: each.value for each in node.keywords}
        return getattr(self, node.func.id)(*node.args, **named)

    def _record(self, fields):
        return {field: self._value(node) for field, node in fields.items()}

    def _demand(self, condition, text):
        if not condition:
            named = r"\{([\w.]+)\}"
            raise ToolError(re.sub(named, lambda m: self._text(m[1]), text))

    def _text(self, expression):
        return str(self._value(parse(expression).value))

    def _rows(self, rows):
        """The records of a table or of a list."""
        is_table = isinstance(rows, ast.Name) and rows.id not in self._scope
        return list(self._tables[rows.id].values() if is_table else self._value(rows))

    def _fitting(self, rows, where):
        """Those of the records that fit all comparisons."""
        for each in where:
            fits, wanted = OPERATORS[type(each.ops[0])], self._value(each.comparators[0])
            rows = [row for row in rows if fits(row[each.left.id], wanted)]
        return rows

    # The functions that take names of tables and fields: their arguments are syntax trees.

    def get(self, table, key):
        record = self._tables[table.id].get(self._value(key))
        self._demand(record is not None, f"{table.id} has no {{{ast.unparse(key)}}}.")
        return record

    def find(self, rows, *where):
        *where, error = where
        hits = self._fitting(self._rows(rows), where)
        self._demand(len(hits) == 1, error.value)
        return hits[0]

    def select(self, rows, *where, fields=None):
        hits = self._fitting(self._rows(rows), where)
        if fields is None:
            return hits
        return [{field.id: row[field.id] for field in fields.elts} for row in hits]

    def change(self, rows, /, *where, **fields):
        rows = self._rows(rows)
        fitting = {id(row) for row in self._fitting(rows, where)}
        values = self._record(fields)
        return [row | values if id(row) in fitting else row for row in rows]

    def require(self, condition, error, rule=None):
        self._demand(self._value(condition), error.value)

    def insert(self, table, key, /, **fields):
        rows, new = self._tables[table.id], self._value(key)
        self._demand(new not in rows, f"{table.id}: {new} is there already")
        self._tables[table.id] = rows | {new: self._record(fields)}

    def update(self, table, key, /, **fields):
        rows, known = self._tables[table.id], self._value(key)
        self._tables[table.id] = rows | {known: rows[known] | self._record(fields)}

    def delete(self, table, key):
        rows = dict(self._tables[table.id])
        del rows[self._value(key)]
        self._tables[table.id] = rows

    def next_id(self, table, prefix):
        ends = [key.removeprefix(prefix.value) for key in self._tables[table.value]]
        numbers = (int(end) for end in ends if end.isdecimal())
        return prefix.value + str(1 + max(numbers, default=0))

    def sum(self, rows, field):
        return round(sum(row[field.id] for row in self._rows(rows)), 2)


def calculate(expression: str) -> float:
    """Returns the value of +, -, *, / and brackets over numbers, to two decimals.

    Raises ToolError for anything else, and for more than 200 characters.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression)
    try:
        if len(text) <= 200 and re.fullmatch(r"[\d\s.+\-*/()]+", text):
            return round(evaluate(text, {}), 2)
    except (ValueError, TypeError, ArithmeticError):
        pass
    raise ToolError(
        f"cannot calculate {expression!r}: numbers, + - * / and brackets only, at most 200 "
        "characters, and no division by zero"
    )


FUNCTIONS = {  # of values; those of tables, lists and fields are methods of _Call
    "round": round,
    "count": len,
    "lookup": lambda key, values: values[str(key)],
    "calculate": calculate,
}
METHODS = {name for name in vars(_Call) if name[0] != "_"}
