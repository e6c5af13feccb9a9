"""Makes a tool of a Python function: its type hints become the schema, its docstring the text.

    from tools import tool

    @tool(usd_per_call=0.001)
    def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
        '''Converts an amount of Swiss francs.'''

Under a line "Args:" the docstring may describe parameters, as in "amount: in Swiss francs".
"""

from __future__ import annotations

import inspect
import json
import re
import time
import traceback
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_text
from nanorchestra.records import ToolResult
from nanorchestra.tools.http import within

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
TYPES |= {list: "array", type(None): "null"}


@dataclass
class FunctionTool:
    """A Python function of the user's. A call ends after `timeout_s` seconds."""

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    usd_per_call: float = 0.0
    timeout_s: float = 60.0
    kind, blocking = "function", True

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns what the function returns: text, a ToolResult, or else JSON."""
        start, error = time.monotonic(), False
        try:
            value = within(self.timeout_s, lambda: self.function(**arguments))
            text = value if isinstance(value, str | ToolResult) else json.dumps(value, default=str)
        except TimeoutError:
            text, error = f"Error: {self.name} took more than {self.timeout_s:g} s", True
        except Exception as problem:
            text, error = f"Error: {self.name}: {type(problem).__name__}: {problem}", True
        if isinstance(text, ToolResult):
            return text
        return ToolResult(text, self.usd_per_call, time.monotonic() - start, error)


def tool(function: Callable[..., Any] | None = None, **settings: float) -> Any:
    """Decorates a typed, documented function, which becomes a FunctionTool of its name.

    `settings` are usd_per_call and timeout_s. UserError if a type hint or the docstring is missing.
    """
    if function is None:
        return lambda given: tool(given, **settings)
    where = f"function {function.__name__}"
    text, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    require(text.strip(), f"{where}: it has no docstring, which tells the policy what it does")
    told = dict(re.findall(r"^ +(\w+)[^:\n]*: (.+)$", section, re.MULTILINE))
    hints, properties, required = typing.get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        require(named, f"{where}: {parameter} is not offered to a policy; name each parameter")
        require(name in hints, f"{where}: parameter {name} has no type hint; write {name}: str")
        schema = _schema(hints[name], f"{where}: parameter {name}")
        properties[name] = schema | ({"description": told[name]} if name in told else {})
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    made = FunctionTool(function.__name__, " ".join(text.split()), schema, function)
    return replace(made, **settings)


def load_functions(path: str | Path) -> list[FunctionTool]:
    """Returns the functions that a Python file decorates with @tool. UserError names the file."""
    module = {"__name__": Path(path).stem, "__file__": str(path)}
    try:
        exec(compile(read_text(path), str(path), "exec", dont_inherit=True), module)
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:
        # the second frame is of the file itself
        line = getattr(error, "lineno", 0) or traceback.extract_tb(error.__traceback__)[1].lineno
        problem = f"{path}, line {line}: {type(error).__name__}: {error}"
        raise UserError(problem.splitlines()[0]) from None
    found = [value for value in module.values() if isinstance(value, FunctionTool)]
    require(found, f"{path}: no function is decorated with @tool (from tools import tool)")
    return found


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint. UserError if it has none."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(choice, where) for choice in inner]}
    known = f"{where} is {hint}; it must be {', '.join(t.__name__ for t in TYPES)} or Literal"
    require(origin in TYPES, known)
    schema: dict[str, Any] = {"type": TYPES[origin]}
    if inner and origin is list:
        schema["items"] = _schema(inner[0], where)
    if inner and origin is dict:
        schema["additionalProperties"] = _schema(inner[1], where)
    return schema
