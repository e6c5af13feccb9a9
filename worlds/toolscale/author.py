"""Writes the blueprint of a domain with a language model behind an OpenAI-compatible endpoint.

The model is shown the file of the railway and writes one for another domain: tables, tools, rules,
wishes and phrases. The answer is checked; one that cannot be used is asked for again with what was
wrong. From there on the domain and its tasks are made and proved as those of the built-in domains.
"""

import json
import re
from pathlib import Path

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError, require
from nanorchestra.tools.endpoint import Endpoint
from worlds.toolscale.blueprint import build, load_blueprint
from worlds.toolscale.domain import write_json
from worlds.toolscale.pipeline import make_batch

ATTEMPTS = 3
PROMPT = """This JSON is the service desk of a railway as data: tables and how their fields are \
drawn, tools with programs, rules, the wishes of customers and how they say them.

{example}

Write the same for the domain "{domain}", with tables, tools and wishes of its own, as rich and of \
the same form. "domain" must be "{name}". Answer with JSON only."""


def write_blueprint(domain: str, directory: Path, endpoint: str, model: str, seed: int) -> str:
    """Returns the blueprint file of a domain, which may be any words.

    A file that is there already is kept. Raises UserError if no answer can be used.
    """
    name = re.sub(r"\W+", "_", domain.casefold()).strip("_")
    require(name, f"--domains: {domain!r} has no letters")
    path, draft = directory / f"{name}.json", directory / f"draft-{name}.json"
    if path.exists():
        return str(path)
    directory.mkdir(parents=True, exist_ok=True)
    example = json.dumps(load_blueprint("railway"))
    text = PROMPT.format(example=example, domain=domain, name=name)
    messages = [{"role": "user", "content": text}]
    server = Endpoint(endpoint, "OPENAI_API_KEY", timeout_s=180.0)
    for _ in range(ATTEMPTS):
        try:
            body = {"model": model, "messages": messages}
            answer = server.complete(body, server.timeout_s).required().content["content"]
            written = re.search(r"\{.*\}", answer, re.DOTALL)
            blueprint = json.loads(written[0] if written else "")
            require(blueprint["domain"] == name, f"domain must be {name!r}")
            write_json(draft, blueprint)
            try_blueprint(str(draft), seed)
        except EndpointError as error:
            problem = f"no answer ({error})"
        except (UserError, ValueError, LookupError, TypeError, RecursionError) as error:
            problem = str(error)
            again = f"That cannot be used: {problem}. Give the whole JSON again."
            messages[1:] = [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": again},
            ]
        else:
            draft.replace(path)
            return str(path)
    raise UserError(f"domain {domain!r}: {model!r} at {endpoint}: {problem}")


def try_blueprint(name: str, seed: int) -> None:
    """Raises UserError unless a domain and tasks can be made of the blueprint file `name`."""
    try:
        build(name, seed)
        require(make_batch(seed, (1, 5), name, 0)["tasks"], f"{name}: no task of it is fit")
    except UserError:
        raise
    except Exception as error:  # whatever its words and numbers lead to
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{name}: no tasks can be made of it ({problem})") from None
