"""Runs a directory that data_gen.py wrote as a domain of tau2-bench.

    from worlds.toolscale.export import register
    register("data/", "railway")       # then tau2's own runner knows toolscale_railway

The toolkit executes the programs of tools.json. tau2-bench is installed from its repository.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json_lines
from worlds.toolscale.domain import Domain
from worlds.toolscale.program import Json, ToolError

TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
FIELDS = ("id", "user_scenario", "evaluation_criteria", "description")


def register(directory: str | Path, domain: str) -> None:
    """Makes a domain of the directory known to tau2-bench as toolscale_DOMAIN, with its tasks."""
    task = import_module("tau2.data_model.tasks").Task
    registry = import_module("tau2.registry").registry

    def read(split: str | None = None) -> list[Any]:
        rows = tasks(Path(directory), domain)
        return [task.model_validate(row) for row in rows]

    name = f"toolscale_{domain}"  # tau2-bench has a telecom of its own
    registry.register_domain(lambda **_: environment(Path(directory), domain), name)
    registry.register_tasks(read, name)


def tasks(directory: Path, domain: str) -> list[Json]:
    """Returns the tasks of a domain with tau2's fields; what was read is not scored there."""
    rows = [row for _, row in read_json_lines(directory / "tasks.jsonl") if row["domain"] == domain]
    for row in rows:
        row["evaluation_criteria"]["reward_basis"].remove("ACTION")
    return [{name: row[name] for name in FIELDS} for row in rows]


def environment(directory: Path, domain: str) -> Any:
    """Returns tau2's environment of a domain: its tables, its tools and its policy."""
    made, kit = (import_module(f"tau2.environment.{name}") for name in ("environment", "toolkit"))
    loaded = Domain.load(directory / "worlds" / domain)
    kinds = {"write": kit.ToolType.WRITE, "read": kit.ToolType.READ}
    methods = {
        name: kit.is_tool(kinds.get(tool["kind"], kit.ToolType.GENERIC))(_method(loaded, name))
        for name, tool in loaded.by_name.items()
    }
    tables = type("Tables", (made.DB,), {"__annotations__": {"tables": dict[str, dict]}})
    tools = type("Tools", (kit.ToolKitBase,), methods)(tables(tables=loaded.tables))
    return made.Environment(domain_name=domain, policy=loaded.policy, tools=tools)


def _method(domain, name) -> Callable[..., Any]:
    """A tool as a method of a toolkit, whose `db.tables` it changes."""
    function = domain.by_name[name]["function"]

    def call(self: Any, **arguments: Any) -> Any:
        tables = dict(self.db.tables)
        try:
            result = domain.call(tables, name, arguments)
        except ToolError as error:
            raise ValueError(str(error)) from None
        self.db.tables = tables
        return result

    types = {"self": object} | {
        argument: TYPES[shape["type"]]
        for argument, shape in function["parameters"]["properties"].items()
    }
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each, place, annotation=types[each]) for each in types]
    call.__name__, call.__doc__ = name, function["description"]
    call.__signature__ = inspect.Signature(parameters)
    return call
