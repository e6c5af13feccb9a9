"""Domains whose tools are Python: a toolkit of the user's, or one of tau2-bench's package.

    DIR/db.json, DIR/policy.md    as for every domain
    DIR/toolkit.py                class Toolkit: made with the value of db.json, which is its `db`

Each public method with a docstring is a tool; its schema comes from its type hints, and what it
raises is what the agent reads. A domain without tools.json and toolkit.py is one of the package's:
tau2.domains.DOMAIN.environment.
"""

import copy
import importlib
import inspect
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import function_schema
from nanorchestra.errors import UserError
from nanorchestra.files import merge, read_json, read_text
from nanorchestra.tools.functions import tool
from worlds.toolscale.program import Json, Tables, ToolError
from worlds.toolscale.world import World

READS = ("read", "think", "generic")  # tau2's types of tools that change nothing
KINDS = {"calculate": "calculate", "transfer_to_human_agents": "handover"}


@dataclass
class ToolkitWorld(World):
    """A world whose tools are methods of `kit`, a class. Its only table is `db`, as the kit has it.

    A call works on a copy of it, unless the tool says that it only reads.
    """

    kit: Callable[[Any], Any]
    keyed = False

    def invoke(self, tables: Tables, name: str, arguments: Json) -> Any:
        """Calls the method of that name. Raises ToolError, and then `tables` are as they were."""
        db = tables["db"]
        if self.by_name.get(name, {}).get("kind") != "read":
            db = copy.deepcopy(db)
        toolkit = self.kit(db)
        try:
            value = getattr(toolkit, name)(**arguments)
        except Exception as error:  # whatever a toolkit raises is what the agent reads
            raise ToolError(str(error) or type(error).__name__) from None
        tables["db"] = toolkit.db
        return value

    def merged(self, data: Json) -> Tables:
        """Returns `db` with a task's data in it; one of pydantic is validated again."""
        db = self.tables["db"]
        if hasattr(db, "model_dump"):
            return {"db": type(db).model_validate(merge(db.model_dump(), data))}
        return {"db": merge(db, data)}


def load_domain(directory: Path) -> World:
    """Reads a domain whose tools are programs, a toolkit, or in tau2-bench's package. UserError."""
    if (directory / "tools.json").is_file():
        return World.load(directory)
    db, policy = read_json(directory / "db.json"), read_text(directory / "policy.md")
    source = directory / "toolkit.py"
    try:
        if source.is_file():
            toolkit = runpy.run_path(str(source))["Toolkit"](db)
            methods = inspect.getmembers(toolkit, inspect.ismethod)
            made = [tool(m) for name, m in methods if m.__doc__ and name[0] != "_"]
            functions = [function_schema(each)["function"] for each in made]
        else:
            name = f"tau2.domains.{directory.name}.environment"
            environment = importlib.import_module(name).get_environment()
            toolkit, db = environment.tools, type(environment.tools.db).model_validate(db)
            functions = [given.openai_schema["function"] for given in environment.get_tools()]
    except Exception as error:  # whatever the code of others raises
        raise UserError(
            f"{directory}: needs tools.json, a toolkit.py with a class Toolkit, or the package of "
            "tau2-bench with this domain, installed from its repository (PyPI's tau2 is another "
            f"project); found {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from None
    tools = []
    for function in functions:
        name = function["name"]
        reads = getattr(getattr(toolkit, name), "__tool_type__", "") in READS
        kind = KINDS.get(name, "read" if reads else "write")  # unless it says so, it may write
        tools.append({"kind": kind, "function": function})
    return ToolkitWorld(directory.name, {"db": db}, tools, policy, type(toolkit))
