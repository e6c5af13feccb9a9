"""Makes a tool of a Python function: its type hints become the schema, its docstring the text.

    from tools import tool

    @tool(usd_per_call=0.001)
    def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
        '''Converts an amount of Swiss francs.'''

Under a line "Args:" the docstring may describe parameters, as in "amount: in Swiss francs".
"""

import inspect
import json
import re
import runpy
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, validate_call

from nanorchestra.errors import UserError, require
from nanorchestra.records import RESULT_WORDS, ToolResult
from nanorchestra.schemas import Json
from nanorchestra.tools.failures import is_infrastructure
from nanorchestra.tools.http import within


@dataclass
class FunctionTool:
    """A Python function of the user's. A call ends after `timeout_s` seconds.

    A function that charges by itself, in the ToolResult that it returns, charges `usd_per_call` US
    dollars at most: a user's limit holds by it.
    """

    name: str
    description: str
    parameters: Json
    function: Callable[..., Any]
    usd_per_call: float = 0.0
    timeout_s: float = 60.0
    result_words: int = RESULT_WORDS
    kind, blocking = "function", True

    def call(self, arguments: Json) -> ToolResult:
        """Returns what the function returns: text, a ToolResult, or else JSON."""
        start, error, infrastructure = time.monotonic(), True, False
        try:
            value = within(self.timeout_s, lambda: self.function(**arguments))
            if isinstance(value, ToolResult) and value.cost_usd <= self.usd_per_call:
                return value
            if isinstance(value, ToolResult):
                stated = f"usd_per_call states ${self.usd_per_call:g} at most"
                text = f"Error: {self.name} has charged ${value.cost_usd:g}; {stated}"
                return replace(value, content=text, error=True)
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            error = False
        except TimeoutError:
            text = f"Error: {self.name} took more than {self.timeout_s:g} s"
        except (Exception, SystemExit) as problem:
            text = f"Error: {self.name}: {type(problem).__name__}: {problem}"
            infrastructure = is_infrastructure(problem)
        return ToolResult(text, self.usd_per_call, time.monotonic() - start, error, infrastructure)


def tool(function: Callable[..., Any] | None = None, **settings: float) -> Any:
    """Decorates a typed, documented function, which becomes a FunctionTool of its name.

    `settings` are usd_per_call, timeout_s and result_words. UserError if a type hint or the
    docstring is missing.
    """
    if function is None:
        return lambda given: tool(given, **settings)
    where = f"function {function.__name__}"
    text, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    require(text.strip(), f"{where}: it has no docstring, which tells the policy what it does")
    told = dict(re.findall(r"^ +(\w+)[^:\n]*: (.+)$", section, re.MULTILINE))
    schema = TypeAdapter(function).json_schema()
    require(schema["type"] == "object", f"{where}: name each parameter; *args are not offered")
    for name, shape in schema["properties"].items():
        del shape["title"]
        require(shape, f"{where}: parameter {name} has no type hint; write {name}: str")
        if name in told:
            shape["description"] = told[name]
    description = " ".join(text.split())
    return FunctionTool(function.__name__, description, schema, validate_call(function), **settings)


def load_functions(path: str | Path) -> list[FunctionTool]:
    """Returns the functions that a Python file decorates with @tool. UserError names the file."""
    try:
        module = runpy.run_path(str(path))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = (lines or [getattr(error, "lineno", 0)])[0]
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{path}, line {line}: {name}{error}".splitlines()[0]) from None
    found = [value for value in module.values() if isinstance(value, FunctionTool)]
    require(found, f"{path}: no function is decorated with @tool (from tools import tool)")
    return found
