"""Domains whose tools are Python: a toolkit of the user's, or that of the released rows' package.

    DIR/db.json, DIR/policy.md    as for every domain
    DIR/toolkit.py                class Toolkit: made with the value of db.json, which is its `db`

Each public method with a docstring is a tool; its schema comes from its type hints, and what it
raises is what the agent reads. A domain without tools.json and toolkit.py is that of the package
tau2 in ToolOrchestra's repository, tau2.domains.DOMAIN.environment, with its own records and policy
if DIR has none.
"""

import copy
import importlib
import inspect
import runpy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import merge, read_json, read_text
from nanorchestra.tools.functions import tool
from worlds.toolscale.domain import Domain
from worlds.toolscale.program import Json, Tables, ToolError

READS = ("read", "think", "generic")  # the package's types of tools that change nothing
OURS = {path.stem for path in Path(__file__).with_name("domains").glob("*.json")}
KINDS = {"calculate": "calculate", "transfer_to_human_agents": "handover"}


@dataclass
class ToolkitDomain(Domain):
    """A domain whose tools are methods of `toolkit`, whose `db` is the table "db".

    A call works on a copy, unless the tool says that it only reads.
    """

    toolkit: Any
    keyed = False

    def invoke(self, tables: Tables, name: str, arguments: Json) -> Any:
        """Calls the method of that name. Raises ToolError, and then `tables` are as they were."""
        writes = self.by_name.get(name, {}).get("kind") != "read"
        db = copy.deepcopy(tables["db"]) if writes else tables["db"]
        toolkit = type(self.toolkit)(db)
        try:
            value = getattr(toolkit, name)(**arguments)
        except Exception as error:  # whatever a toolkit raises is what the agent reads
            raise ToolError(str(error) or type(error).__name__) from None
        if writes:
            tables["db"] = toolkit.db
        return value

    def merged(self, data: Json) -> Tables:
        """Returns the tables with a task's data in `db`; one of pydantic is validated again."""
        db = self.tables["db"]
        if hasattr(db, "model_dump"):
            return {"db": type(db).model_validate(merge(db.model_dump(), data))}
        return {"db": merge(db, data)}


def load_domain(directory: Path, called: Collection[str] = ()) -> Domain:
    """Reads a domain whose tools are programs, a toolkit, or in the package tau2.

    `called` are the names of the tools that its tasks call. UserError says what to do.
    """
    if (directory / "tools.json").is_file():
        return Domain.load(directory)
    source = directory / "toolkit.py"
    given = source.is_file() or (directory / "db.json").is_file()
    if given:
        db, policy = read_json(directory / "db.json"), read_text(directory / "policy.md")
    try:
        if source.is_file():
            toolkit = runpy.run_path(str(source))["Toolkit"](db)
            methods = inspect.getmembers(toolkit, inspect.ismethod)
            made = [tool(m) for name, m in methods if m.__doc__ and name[0] != "_"]
            functions = [each.schema["function"] for each in made]
        else:
            name = f"tau2.domains.{directory.name}.environment"
            environment = importlib.import_module(name).get_environment()
            toolkit = environment.tools
            if given:
                toolkit.db = type(toolkit.db).model_validate(db)
            else:
                policy = environment.get_policy()
            functions = [each.openai_schema["function"] for each in environment.get_tools()]
    except Exception as error:  # whatever the code of others raises
        raise UserError(_problem(directory, error, called)) from None
    tools = []
    for function in functions:
        name = function["name"]
        reads = getattr(getattr(toolkit, name), "__tool_type__", "") in READS
        kind = KINDS.get(name, "read" if reads else "write")  # unless it says so, it may write
        tools.append({"kind": kind, "function": function})
    return ToolkitDomain(directory.name, {"db": toolkit.db}, tools, policy, toolkit)


def _problem(directory, error, called) -> str:
    """Returns in one line why the tools of a domain cannot be had, and what to do."""
    cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    kit = directory / "toolkit.py"
    if kit.is_file():
        return f"{kit}: its class Toolkit must load, made with the value of db.json; found {cause}"
    if not isinstance(error, ModuleNotFoundError):
        return (
            f"{directory}: the package tau2 cannot open this domain ({cause}); if it misses data, "
            "set REPO_PATH=ToolOrchestra"
        )
    module = error.name or ""
    if directory.name in OURS and not directory.exists():
        return (
            f"{directory}: is missing; data_gen.py writes it with tools.json beside tasks.jsonl, "
            "and both belong together"
        )
    if module.partition(".")[0] != "tau2":
        return (
            f"{directory}: the package tau2 has its tools, and needs {module}, which is not "
            "installed; install what the pyproject.toml of its repository lists"
        )
    code = (
        "the released rows lack the code of its tools; clone ToolOrchestra's repository, install "
        "what evaluation/tau2-bench/pyproject.toml lists, and set REPO_PATH=ToolOrchestra "
        "PYTHONPATH=ToolOrchestra/evaluation/tau2-bench"
    )
    if module == "tau2.domains":
        code = f"the installed tau2 is PyPI's, another project; {code}"
    methods = f", with the methods {', '.join(sorted(called))}" if called else ""
    return f"{directory}: {code}; or write {kit} (docs/toolscale.md){methods}"
