"""Domains of others, whose tools are Python: a toolkit of a user, or one of the package tau2.

    DIR/db.json, DIR/policy.md    the records and the rules in words
    DIR/toolkit.py                class Toolkit: made with the value of db.json, which is its `db`

Each public method with a docstring is a tool; its schema comes from its type hints, and what it
raises is what the agent reads. A domain without toolkit.py is one of a package `tau2`:
tau2.domains.DOMAIN.environment, with its own records and policy if DIR has none.
"""

import copy
import importlib
import inspect
import runpy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, read_text
from nanorchestra.schemas import Json, argument_error
from nanorchestra.tools.functions import tool
from worlds.toolscale.domain import Domain
from worlds.toolscale.toolkit import ToolError, as_json

READS = ("read", "think", "generic")  # tau2's types of tools that change nothing
HANDOVER = "transfer_to_human_agents"


@dataclass(eq=False)
class ForeignKit:
    """A toolkit of others with the interface of ours. `schemas` are its tools as OpenAI functions.

    Invariant: the toolkit's `db` is never changed; a write makes a toolkit with a changed copy.
    """

    toolkit: Any
    schemas: list[Json]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignKit) and self.toolkit.db == other.toolkit.db

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each tool: one may write unless it says that it only reads."""
        kinds = {}
        for schema in self.schemas:
            name = schema["function"]["name"]
            reads = getattr(getattr(self.toolkit, name), "__tool_type__", "") in READS
            kinds[name] = "handover" if name == HANDOVER else "read" if reads else "write"
        return kinds

    def functions(self) -> list[Json]:
        """Returns the OpenAI function objects."""
        return self.schemas

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The tables of the database."""
        db = self.toolkit.db
        values = db.values() if isinstance(db, dict) else vars(db).values()
        return [value for value in values if isinstance(value, dict)]

    def copy(self) -> "ForeignKit":
        """Returns a database that can be written without changing this one."""
        return replace(self)

    def call(self, name: str, arguments: Any) -> Any:
        """Does a call, and returns its result as JSON. ToolError, and then nothing has changed."""
        schemas = {each["function"]["name"]: each["function"] for each in self.schemas}
        if name not in schemas:
            raise ToolError(f"no tool named {name!r}")
        if problem := argument_error(arguments, schemas[name]["parameters"]):
            raise ToolError(f"{name}: {problem}")
        reads = self.kinds()[name] == "read"
        db = self.toolkit.db if reads else copy.deepcopy(self.toolkit.db)
        toolkit = type(self.toolkit)(db)
        try:
            value = as_json(getattr(toolkit, name)(**arguments))
        except Exception as error:  # whatever a toolkit raises is what the agent reads
            raise ToolError(str(error) or type(error).__name__) from None
        if not reads:
            self.toolkit = toolkit
        return value


def load_foreign(directory: Path, called: Collection[str] = ()) -> Domain:
    """Reads a domain whose tools are a toolkit, or in the package tau2.

    `called` are the names of the tools that its tasks call. UserError says what is missing.
    """
    source, db, policy = directory / "toolkit.py", None, ""
    if source.is_file() or (directory / "db.json").is_file():
        db, policy = read_json(directory / "db.json"), read_text(directory / "policy.md")
    try:
        if source.is_file():
            toolkit = runpy.run_path(str(source))["Toolkit"](db)
            methods = inspect.getmembers(toolkit, inspect.ismethod)
            schemas = [tool(m).schema for name, m in methods if m.__doc__ and name[0] != "_"]
        else:
            name = f"tau2.domains.{directory.name}.environment"
            environment = importlib.import_module(name).get_environment()
            toolkit = environment.tools
            if db is None:
                policy = environment.get_policy()
            else:
                toolkit.db = type(toolkit.db).model_validate(db)
            functions = [each.openai_schema["function"] for each in environment.get_tools()]
            schemas = [{"type": "function", "function": each} for each in functions]
    except Exception as error:  # whatever the code of others raises
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        methods = f" with the methods {', '.join(sorted(called))}" if called else ""
        raise UserError(
            f"{directory}: the code of its tools cannot be used ({cause}); it must be domain.py as "
            f"data_gen.py writes it, toolkit.py{methods}, or a package tau2 that has this domain "
            "(docs/worlds.md)"
        ) from None
    return Domain(directory.name, ForeignKit(toolkit, schemas), policy)
