"""Writes the blueprint of a domain with a language model behind an OpenAI-compatible endpoint.

The model is shown the blueprint of the railway and writes one for another domain: names, fields,
ranges and phrases. The answer is checked; one that cannot be used is asked for again with what was
wrong. From there on the world and its tasks are made and proved as those of the built-in domains.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from nanorchestra.errors import UserError, require
from nanorchestra.tools.experts import EndpointError, chat_completion
from worlds.toolscale.domains import build, load_blueprint
from worlds.toolscale.world import write_json

ATTEMPTS = 3
PROMPT = """This JSON describes the service desk of a railway: what its people, places, items, \
deals and other records are called, which further fields they have, and how customers ask.

{example}

Write the same for the domain "{domain}", with other words, as rich and of the same form. "domain" \
must be "{name}". The placeholders in braces must stay. Answer with JSON only."""


def write_blueprints(
    domains: Sequence[str], directory: Path, endpoint: str, model: str, seed: int
) -> list[str]:
    """Returns the blueprint file of each domain, which may be any words.

    A file that is there already is kept. A domain that fails is named and left out. Raises
    UserError if none is left.
    """
    files = []
    for domain in domains:
        name = re.sub(r"\W+", "_", domain.casefold()).strip("_")
        path = directory / f"{name}.json"
        text = PROMPT.format(
            example=json.dumps(load_blueprint("railway")), domain=domain, name=name
        )
        try:
            if not path.exists():
                _write(text, path, endpoint, model, seed)
            files.append(str(path))
        except UserError as problem:
            path.unlink(missing_ok=True)
            print(f"domain {domain!r}: left out: {problem}", file=sys.stderr)
    require(files, f"--author llm: {model!r} at {endpoint} wrote no domain")
    return files


def _write(text: str, path: Path, endpoint: str, model: str, seed: int) -> None:
    """Asks for the blueprint until a world can be built from it, at most ATTEMPTS times."""
    problem, messages = "", [{"role": "user", "content": text}]
    for _ in range(ATTEMPTS):
        body = {"model": model, "messages": messages}
        try:
            message, _ = chat_completion(endpoint, body, timeout_s=180.0, attempts=2)
        except EndpointError as error:
            problem = f"no answer ({error})"
            continue
        answer = message.get("content") or ""
        try:
            found = re.search(r"\{.*\}", answer, re.DOTALL)
            write_json(path, json.loads(found[0] if found else ""))
            build(str(path), seed)
            require(load_blueprint(str(path))["domain"] == path.stem, "domain is another")
            return
        except (UserError, ValueError) as error:
            problem = str(error).removeprefix(f"{path}: ")
        again = f"That cannot be used: {problem}. Give the whole JSON again."
        messages[1:] = [{"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": again})
    raise UserError(problem)
