"""Checks data from files and language models against the JSON Schemas in shapes.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import schema_error
from nanorchestra.errors import require
from nanorchestra.files import read_json

Json = dict[str, Any]  # a JSON object
SHAPES = read_json(Path(__file__).with_suffix(".json"))


def check_shape(name: str, value: Any, where: str) -> None:
    """Raises UserError, which begins with `where`, if the value has not the shape of that name."""
    problem = schema_error(value, SHAPES[name] | {"$defs": SHAPES["$defs"]})
    require(problem is None, f"{where}: {problem}")
