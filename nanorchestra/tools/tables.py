"""A tool that reads the records of a task."""

import json
from dataclasses import dataclass

from nanorchestra.agent.tool import Tool
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json, arguments_schema


@dataclass
class RecordsTool(Tool):
    """Reads one row of a table by its id. `tables` is {table: {id as text: row}}."""

    name: str
    description: str
    tables: dict[str, dict[str, Json]]
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    kind, blocking = "records", False
    parameters = arguments_schema(table="string", id="integer")

    def call(self, arguments: Json) -> ToolResult:
        """Returns the row as JSON."""
        table, key = arguments["table"], str(arguments["id"])
        row = self.tables.get(table, {}).get(key)
        if row is not None:
            text = json.dumps(row)
        elif table in self.tables:
            text = f"Error: no row {key}"
        else:
            text = f"Error: no table {table}; there are {', '.join(self.tables)}"
        return ToolResult(text, self.usd_per_call, self.latency_s, error=row is None)
