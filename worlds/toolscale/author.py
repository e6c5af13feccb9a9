"""Writes the blueprint of a domain with a language model behind an OpenAI-compatible endpoint.

The model is shown the blueprint of the railway and writes one for another domain: names, fields,
ranges and phrases. The answer is checked; one that cannot be used is asked for again with what was
wrong. From there on the world and its tasks are made and proved as those of the built-in domains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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

    A file that is there already is kept. Raises UserError if a domain cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    example, files = json.dumps(load_blueprint("railway")), []
    for domain in domains:
        name = re.sub(r"\W+", "_", domain.casefold()).strip("_")
        path, draft = directory / f"{name}.json", directory / f"draft-{name}.json"

        def accept(answer: str, name: str = name, draft: Path = draft) -> None:
            found = re.search(r"\{.*\}", answer, re.DOTALL)
            blueprint = json.loads(found[0] if found else "")
            require(blueprint["domain"] == name, f"domain must be {name!r}")
            write_json(draft, blueprint)
            build(str(draft), seed)

        if not path.exists():
            text = PROMPT.format(example=example, domain=domain, name=name)
            problem = _ask(text, endpoint, model, accept)
            require(problem is None, f"domain {domain!r}: {model!r} at {endpoint}: {problem}")
            draft.replace(path)
        files.append(str(path))
    return files


def _ask(text: str, endpoint: str, model: str, accept: Callable[[str], None]) -> str | None:
    """Asks until an answer is accepted, at most ATTEMPTS times; what is wrong with the last."""
    problem, messages = None, [{"role": "user", "content": text}]
    for _ in range(ATTEMPTS):
        body = {"model": model, "messages": messages}
        try:
            message, _ = chat_completion(endpoint, body, timeout_s=180.0, attempts=2)
            answer = message.get("content") or ""
            return accept(answer)
        except EndpointError as error:
            problem = f"no answer ({error})"
        except (UserError, ValueError, KeyError) as error:
            problem = str(error)
            again = f"That cannot be used: {problem}. Give the whole JSON again."
            messages[1:] = [{"role": "assistant", "content": answer}]
            messages.append({"role": "user", "content": again})
    return problem
