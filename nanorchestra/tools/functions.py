"""Makes a tool of a Python function: its type hints become the schema, its docstring the text.

    from tools import tool

    @tool(usd_per_call=0.001)
    def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
        '''Converts an amount of Swiss francs.'''

Under a line "Args:" the docstring may describe parameters, as in "amount: in Swiss francs".

A function of the kind "search" returns the documents for a query, one of the kind "code" what a
program prints. With a published role in the catalogue it works for the role's expert:

    @tool(kind="search")
    def pages(query: str) -> list[str]:
        '''Finds pages, the best first.'''
"""

import functools
import inspect
import json
import re
import runpy
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, validate_call
from pydantic.errors import PydanticUserError

from nanorchestra.agent.failures import EndpointError, is_infrastructure
from nanorchestra.agent.threads import in_daemon
from nanorchestra.agent.tool import Tool
from nanorchestra.errors import UserError, require
from nanorchestra.files import own_fault
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json, whole_characters
from nanorchestra.tools.entries import Decorated
from nanorchestra.tools.replies import UNRECORDED, Replies
from nanorchestra.validation import validated

FUNCTION = "function"  # a kind that works for no role
NEEDED = {"search": "query", "code": "code"}  # the one argument that a function of a kind needs
TYPES = "str, int, float, bool, Literal, list, dict, a TypedDict, a dataclass or a union of these"
MOST_GIVEN_UP = 64  # calls that were given up and may still run
GIVEN_UP: list[Future] = []  # those calls; some may have ended since


class GivenUpError(Exception):
    """A call took too long, which its arguments may have caused: no failure of a network."""


@dataclass
class FunctionTool(Tool):
    """A Python function of the user's. A call ends after `timeout_s` seconds.

    `kind` is "function", "search" or "code". What one of the last two returns is evidence.
    """

    name: str
    description: str
    parameters: Json
    function: Callable[..., Any]
    usd_per_call: float = 0.0
    timeout_s: float = 60.0
    kind: str = FUNCTION
    replies: Replies = UNRECORDED
    blocking = True

    def call(self, arguments: Json) -> ToolResult:
        """Returns what the function returns: text, or else JSON.

        A list that a search returns is one of documents, the best first.
        """
        body = {"arguments": arguments, "usd": self.usd_per_call}
        request = {"url": f"function {self.name}", "body": body}
        return self.replies.result(request, lambda: self._called(arguments))

    def _called(self, arguments) -> ToolResult:
        start = time.monotonic()
        try:
            value = within_seconds(self.timeout_s, lambda: self.function(**arguments))
            return self._result(value, arguments, time.monotonic() - start)
        except BaseException as error:  # of the function, in a thread that Ctrl-C does not reach
            return ToolResult(
                f"Error: {self.name}: {type(error).__name__}: {error}",
                self.usd_per_call,
                time.monotonic() - start,
                error=True,
                infrastructure=is_infrastructure(error),
            )

    def _result(self, value, arguments, seconds) -> ToolResult:
        """Returns the observation of a value, with what it adds to the evidence."""
        if self.kind == "search":
            documents = _documents(value)
            text = "\n\n".join(documents) or "nothing found"
            findings = {"documents": documents[::-1]}  # the last one is the best
        else:
            text = _text(value)
            findings = {"code": [[arguments["code"], text]]} if self.kind == "code" else {}
        return ToolResult(text, self.usd_per_call, seconds, findings=findings)


def within_seconds(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns `call()` from a daemon thread. GivenUpError after `seconds`; the thread is left.

    A thread cannot be ended, so EndpointError where MOST_GIVEN_UP calls that were left still run.
    """
    GIVEN_UP[:] = [future for future in GIVEN_UP if not future.done()]
    if len(GIVEN_UP) >= MOST_GIVEN_UP:
        raise EndpointError(f"{len(GIVEN_UP)} calls that were given up still run; end this process")
    future = in_daemon(call)
    wait([future], seconds)
    if not future.done():
        GIVEN_UP.append(future)
        raise GivenUpError(f"it took more than {seconds:g} s")
    return future.result()


def _documents(value) -> list[str]:
    """Returns what a search returned as texts: the value, or its entries, without blank ones."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    texts = [_text(entry) for entry in entries if entry is not None]
    return [text for text in texts if text.strip()]


def _text(value) -> str:
    """Returns text as it is, but for what UTF-8 cannot hold, and other values as JSON."""
    return whole_characters(value if isinstance(value, str) else json.dumps(value, default=str))


def tool(
    function: Callable[..., Any] | None = None, *, kind: str = FUNCTION, **settings: float
) -> Any:
    """Decorates a typed, documented function, which becomes a FunctionTool of its name.

    `settings` are usd_per_call and timeout_s. UserError if a type hint or the docstring is missing,
    if a type has no JSON form, or if a function of this kind needs another argument.
    """
    if function is None:
        return lambda given: tool(given, kind=kind, **settings)
    where = f"function {function.__name__}"
    text, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    require(text.strip(), f"{where}: it has no docstring, which tells the policy what it does")
    told = dict(re.findall(r"^ +(\w+)[^:\n]*: (.+)$", section, re.MULTILINE))
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name != "return":
            _check_type(hint, f"{where}: parameter {name}")
    schema = TypeAdapter(function).json_schema()
    require(schema["type"] == "object", f"{where}: name each parameter; *args are not offered")
    for name, shape in schema["properties"].items():
        shape.pop("title", None)  # a type with a name of its own has it elsewhere
        require(shape, f"{where}: parameter {name} has no type hint; write {name}: str")
        if name in told:
            shape["description"] = told[name]
    settings = validated(Decorated, settings | {"kind": kind}, where)
    if kind in NEEDED:
        _check_argument(kind, schema, where)
    description = " ".join(text.split())
    checked = _validated(function)
    return FunctionTool(function.__name__, description, schema, checked, **settings)


def _validated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with its arguments validated before it is called.

    pydantic's own call runs the function inside Rust, and a process that ends while such a call is
    given up aborts: its thread cannot be unwound there.
    """

    @functools.wraps(function)
    def collect(*args, **kwargs):
        return args, kwargs

    collected = validate_call(collect)

    def call(**arguments):
        args, kwargs = collected(**arguments)
        return function(*args, **kwargs)

    return call


def _check_type(hint, where) -> None:
    """Raises UserError unless values of a type can be written in JSON."""
    try:
        TypeAdapter(hint).json_schema()
    except PydanticUserError:
        name = inspect.formatannotation(hint)
        raise UserError(f"{where} is {name}, which JSON cannot hold; write {TYPES}") from None


def _check_argument(kind, schema, where) -> None:
    """Raises UserError unless what a function needs is what a tool of the kind is given."""
    name = NEEDED[kind]
    is_text = schema["properties"].get(name, {}).get("type") == "string"
    alone = set(schema.get("required", [])) <= {name}
    right = f"its argument is {name}: str, and all others have defaults"
    require(is_text and alone, f"{where}: kind is {kind!r}, so {right}")


def load_functions(path: str | Path) -> list[FunctionTool]:
    """Returns the functions that a Python file decorates with @tool. UserError names the file."""
    require(Path(path).is_file(), f"{path}: no such file")
    try:
        module = runpy.run_path(str(path))
    except Exception as error:
        raise UserError(own_fault(error, str(path), str(path))) from None
    tools = [value for value in module.values() if isinstance(value, FunctionTool)]
    require(tools, f"{path}: no function is decorated with @tool (from tools import tool)")
    return tools
