"""The LLM author: the same stages as the built-in one, asked of any OpenAI-compatible endpoint, under the same checks.

domain -> subjects -> schema -> records -> tools -> policy -> tasks -> harder tasks. Everything that comes back is JSON that is checked at once: a
row, tool or task that fails is thrown away and counted, an answer that cannot be used is asked for again with what was wrong, at most
ATTEMPTS times. The policy is generated from the tools, as always; the calculator and the hand-over are given.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Sequence

from nanorchestra.errors import UserError
from nanorchestra.tools.experts import EndpointError, chat_completion
from worlds.toolscale import program
from worlds.toolscale.domains import policy
from worlds.toolscale.formats import normalised
from worlds.toolscale.pipeline import Part, measured
from worlds.toolscale.score import Scorer
from worlds.toolscale.tasks import env_assertions
from worlds.toolscale.verify import DUPLICATE, FORMAT, REASONS, signature, verify
from worlds.toolscale.world import World, check_schema, row_problems

ATTEMPTS, ROUNDS = 3, 30  # of one question; questions of a stage
RECORDS, TOOLS, TASKS = 200, 12, 10  # at least so many in a world, a world, a batch
SILENT, REPEATED = "the author did not answer with what was asked for", "the author repeated itself"
_LANGUAGE = program.__doc__.split("\n\n", 1)[1]
_TASK = """{"user_scenario": {"persona": null, "instructions": {"reason_for_call": "You want ...", "known_info": "You are ...", "unknown_info": "You do not know ... or null",
"task_instructions": "how the user behaves"}}, "actions": [{"name": tool, "arguments": {...}}, ...], "communicate_info": ["what the agent must say", ...], "nl_assertions": ["one sentence"]}"""
GIVEN = [
    {
        "kind": "calculate",
        "function": {
            "name": "calculate",
            "description": "The value of an expression of numbers, + - * / and brackets.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
        "program": [{"op": "return", "value": {"object": {"value": {"calculate": "$expression"}}}}],
    },
    {
        "kind": "handover",
        "function": {
            "name": "transfer_to_human_agents",
            "description": "Hands the user over to a person, with the reason.",
            "parameters": {
                "type": "object",
                "properties": {
                    "reason": {"type": "string", "enum": ["outside_these_services", "exception"]}
                },
                "required": ["reason"],
            },
        },
        "program": [{"op": "return", "value": "The user is being handed over."}],
    },
]


class Unusable(Exception):
    """An answer that cannot be used, and what is wrong with it in words that can be told to the author."""


class Author:
    """Writes worlds and tasks. `levels` are those of tasks: how often a task is made harder, and how many tools it is shown."""

    def __init__(
        self,
        endpoint: str,
        model: str,
        seed: int = 0,
        levels: Sequence[int] = (1, 2, 3, 4, 5),
        key_variable: str = "OPENAI_API_KEY",
        timeout_s: float = 180.0,
    ):
        self.endpoint, self.model, self.seed, self.levels, self.key_variable, self.timeout_s = (
            endpoint,
            model,
            seed,
            levels,
            key_variable,
            timeout_s,
        )
        self.made: dict[str, World] = {}

    def ask(self, prompt: str, accept: Callable[[Any], Any]) -> Any:
        """What `accept` makes of the JSON that answers the prompt; it raises Unusable or UserError for what it cannot use. Unusable after ATTEMPTS."""
        messages, problem = [{"role": "user", "content": prompt + "\n\nAnswer with JSON only."}], ""
        for _ in range(ATTEMPTS):
            try:
                message, _ = chat_completion(
                    self.endpoint,
                    {"model": self.model, "messages": messages},
                    key_variable=self.key_variable,
                    timeout_s=self.timeout_s,
                    attempts=2,
                )
                return accept(_json(message.get("content") or ""))
            except EndpointError as error:
                problem = f"no answer ({error})"
            except (Unusable, UserError) as error:
                problem = str(error)
                messages[1:] = [
                    {"role": "assistant", "content": message.get("content") or ""},
                    {
                        "role": "user",
                        "content": f"That cannot be used: {problem}. Give the whole JSON again.",
                    },
                ]
        raise Unusable(problem)

    # --- worlds

    def worlds(self, domains: Sequence[str], directory: Path | None) -> dict[str, World]:
        """The world of each domain (any words): read from `directory` if it was made before, else written. One that fails is named and left out."""
        for domain in domains:
            name = re.sub(r"\W+", "_", domain.casefold()).strip("_") or "domain"
            try:
                there = directory is not None and (directory / name / "tools.json").exists()
                self.made[domain] = (
                    World.load(directory / name) if there else self.world(domain, name)
                )
                if directory is not None and not there:
                    self.made[domain].save(directory / name)
            except Unusable as problem:
                print(f"domain {domain!r}: left out: {problem}", file=sys.stderr)
        if not self.made:
            raise UserError(
                f"--author llm: no domain could be written by {self.model!r} at {self.endpoint}"
            )
        return self.made

    def world(self, domain: str, name: str) -> World:
        """One new world. Raises Unusable if a stage does not come to its end."""
        subjects = self.ask(
            f"List 30 different subjects (places, groups, situations) that make records and requests of the domain '{domain}' varied. A JSON list of short texts.",
            _texts,
        )
        schema = self.ask(
            f"Design the database of a service desk for the domain '{domain}': 3 to 5 tables, among them the customers, with links between them. JSON: "
            '{table: {"key": field, "fields": {field: {"type": "string|integer|number|boolean", "enum": [optional], "link": "optional table whose key it holds"}}}}. Keys are strings.',
            _schema,
        )
        tables = self._records(domain, subjects, schema)
        tools = self._tools(domain, schema)
        habits = [
            "Identify the user before anything else, and look up every identifier that the user does not give.",
            "Hand over with `transfer_to_human_agents` what no tool can do (reason outside_these_services), or what a rule forbids and the user wants a person to look at (reason exception).",
        ]
        world = World(
            name,
            schema,
            tables,
            tools,
            policy(f"a {domain} service", "2026-01-15", schema, tools, habits),
        )
        try:
            world.check()
        except UserError as error:
            raise Unusable(str(error)) from None
        return world

    def _records(self, domain: str, subjects: list[str], schema: dict[str, Any]) -> program.Tables:
        tables: program.Tables = {table: {} for table in schema}
        thrown: Counter[str] = Counter()
        for number in range(ROUNDS):
            if sum(map(len, tables.values())) >= RECORDS:
                break
            taken = {table: list(rows)[-8:] for table, rows in tables.items()}
            try:
                new = self.ask(
                    f"Domain '{domain}', schema {json.dumps(schema)}. Write 8 realistic, different records for each table about the subject '{subjects[number % len(subjects)]}'. "
                    f"JSON: {{table: {{key: record}}}}. Keys must be new; the last ones in use: {json.dumps(taken)}. Links must lead to records that are there or among the new ones.",
                    _tables(schema),
                )
            except Unusable as problem:
                thrown[str(problem)] += 1
                continue
            both = {table: rows | new.get(table, {}) for table, rows in tables.items()}
            while problems := row_problems(
                schema, both
            ):  # a row may lead to one that is thrown away
                thrown["rows that break the schema or a link"] += len(problems)
                for table, key in problems:
                    del both[table][key]
            if sum(map(len, both.values())) == sum(map(len, tables.values())):
                thrown[REPEATED] += 1
            tables = both
        for reason, count in thrown.items():
            print(f"domain {domain!r}: records: {count} times: {reason}", file=sys.stderr)
        if sum(map(len, tables.values())) < RECORDS or not all(tables.values()):
            raise Unusable(
                f"{sum(map(len, tables.values()))} records after {ROUNDS} questions; {RECORDS} are needed, and some in each table"
            )
        return tables

    def _tools(self, domain: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
        tools = {tool["function"]["name"]: tool for tool in GIVEN}
        thrown: Counter[str] = Counter()
        for _ in range(ROUNDS):
            kinds = Counter(tool["kind"] for tool in tools.values())
            if len(tools) >= TOOLS and kinds["read"] >= 3 and kinds["write"] >= 3:
                break

            def accept(value: Any) -> list[Any]:
                if not isinstance(value, list):
                    raise Unusable("a list of tools is needed")
                fit = []
                for tool in value:
                    try:
                        program.check_tool(tool, schema, domain)
                        fit.append(tool)
                    except UserError as error:
                        thrown[str(error)] += 1
                if not fit:
                    raise Unusable("; ".join(thrown) or "the list is empty")
                return fit

            try:
                new = self.ask(
                    f"Domain '{domain}', schema {json.dumps(schema)}. Write 6 tools of a service agent, reads and writes, other than {', '.join(tools)}. A tool is "
                    f'{{"kind": "read" or "write", "function": OpenAI function schema, "program": [step, ...]}}. The programs:\n\n{_LANGUAGE}\n\nGive every write its preconditions. A JSON list.',
                    accept,
                )
            except Unusable:
                continue
            before = len(tools)
            for tool in new:
                tools.setdefault(tool["function"]["name"], tool)
            thrown[REPEATED] += len(new) - (len(tools) - before)
        for reason, count in thrown.items():
            if count:
                print(f"domain {domain!r}: tools: {count} times: {reason}", file=sys.stderr)
        if len(tools) < TOOLS:
            raise Unusable(f"{len(tools)} tools after {ROUNDS} questions; {TOOLS} are needed")
        return [*(tool for tool in tools.values() if tool not in GIVEN), *GIVEN]

    # --- tasks

    def make_batch(self, domain: str, number: int) -> Part:
        """A batch of proved tasks; fewer than TASKS, or none, if the author gives no more."""
        world, rng = self.made[domain], random.Random(f"{self.seed}/{domain}/{number}")
        tasks: list[dict[str, Any]] = []
        seen: set[str] = set()
        rejected: Counter[str] = Counter()

        def consider(raw: dict[str, Any], level: int, shown: list[str]) -> dict[str, Any] | None:
            task, reason = self._proved(
                world, raw, f"{world.domain}-{self.seed}-{number}-{len(tasks)}", level, shown
            )
            if task is not None and signature(task) in seen:
                task, reason = None, DUPLICATE
            if task is None:
                rejected[reason] += 1
            return task

        for attempt in range(2 * TASKS):
            if len(tasks) >= TASKS:
                break
            level = self.levels[attempt % len(self.levels)]
            shown = sorted(
                rng.sample(list(world.by_name), min(len(world.by_name), 4 + 3 * level))
                + [tool["function"]["name"] for tool in GIVEN]
            )
            sample = {
                table: {key: rows[key] for key in rng.sample(sorted(rows), min(len(rows), 6))}
                for table, rows in world.tables.items()
            }
            facts = f"Tools: {json.dumps([world.by_name[name] for name in dict.fromkeys(shown)])}\nSome records: {json.dumps(sample)}\nPolicy:\n{world.policy}"
            rules = (
                f"The golden actions are all calls, in order, that fulfil the request, lookups too. Each argument stands in the user's words or is returned by an earlier action; "
                f"identifiers that a lookup returns must not stand in the user's words. The words must leave only one way. A task is {_TASK}"
            )
            try:
                for raw in self.ask(
                    f"{facts}\n\nWrite 3 different tasks of about {2 * level} actions. {rules}. A JSON list.",
                    _objects,
                ):
                    task = consider(raw, level, shown)
                    for _ in range((level - 1) // 2 if task is not None else 0):
                        harder = self.ask(
                            f"{facts}\n\nMake this task harder: one more constraint, step or entity. {rules}.\nThe task: {json.dumps(task)}\nA JSON list of one task.",
                            _objects,
                        )[0]
                        task = consider(harder, level, shown) or task
                    if task is not None:
                        seen.add(signature(task))
                        tasks.append(task)
            except Unusable:
                rejected[SILENT] += 1
                if rejected[SILENT] >= ATTEMPTS and not tasks:
                    break
        return measured(world, tasks, rejected)

    def _proved(
        self, world: World, raw: dict[str, Any], name: str, level: int, shown: list[str]
    ) -> tuple[dict[str, Any] | None, str]:
        """The task in the tau2 format and "", or None and why it was thrown away."""
        try:
            criteria = raw.get("evaluation_criteria") or {}
            actions = [
                {"name": action["name"], "arguments": action["arguments"]}
                for action in raw.get("actions") or criteria.get("actions") or ()
            ]
            task = normalised(
                {
                    "id": name,
                    "user_scenario": {"persona": None} | raw["user_scenario"],
                    "evaluation_criteria": {
                        "actions": actions,
                        "communicate_info": raw.get("communicate_info")
                        or criteria.get("communicate_info"),
                        "nl_assertions": raw.get("nl_assertions") or criteria.get("nl_assertions"),
                    },
                },
                world.domain,
            )
            task["user_scenario"]["instructions"]["domain"] = world.domain
            scorer = Scorer(world, task)
            assertions = env_assertions(scorer.start(), scorer.gold)
        except UserError as error:
            return None, REASONS[1] if "golden call" in str(error) else FORMAT
        except (KeyError, TypeError, AttributeError):
            return None, FORMAT
        criteria = task["evaluation_criteria"]
        criteria["env_assertions"] = assertions
        criteria["reward_basis"] = (
            ["DB", "ACTION"]
            + ["COMMUNICATE"] * bool(criteria["communicate_info"])
            + ["ENV_ASSERTION"] * bool(assertions)
        )
        task |= {
            "level": level,
            "tools": [
                tool
                for tool in world.by_name
                if tool in shown or any(tool == action["name"] for action in criteria["actions"])
            ],
            "template": signature(task)[:10],
        }
        reason = verify(world, task)
        return (None, reason) if reason else (task, "")


def _json(text: str) -> Any:
    """The JSON value in an answer, which may stand in a fence or between words."""
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    text = fenced[1] if fenced else text
    starts = [position for position in (text.find("{"), text.find("[")) if position >= 0]
    try:
        return json.JSONDecoder().raw_decode(text, min(starts))[0]
    except ValueError:
        raise Unusable("it is not JSON") from None


def _texts(value: Any) -> list[str]:
    if (
        not isinstance(value, list)
        or len(
            found := list(
                dict.fromkeys(text for text in value if isinstance(text, str) and text.strip())
            )
        )
        < 5
    ):
        raise Unusable("a JSON list of at least 5 different texts is needed")
    return found


def _objects(value: Any) -> list[dict[str, Any]]:
    value = [value] if isinstance(value, dict) else value
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(element, dict) for element in value)
    ):
        raise Unusable("a JSON list of objects is needed")
    return value


def _schema(value: Any) -> dict[str, Any]:
    check_schema(value, "schema")
    if len(value) < 3 or not any(
        "link" in spec for shape in value.values() for spec in shape["fields"].values()
    ):
        raise Unusable("at least 3 tables with links between them are needed")
    return value


def _tables(schema: dict[str, Any]) -> Callable[[Any], program.Tables]:
    def accept(value: Any) -> program.Tables:
        if (
            not isinstance(value, dict)
            or not value
            or not all(table in schema and isinstance(rows, dict) for table, rows in value.items())
        ):
            raise Unusable(
                f"an object of the tables {', '.join(schema)} is needed, each an object of records"
            )
        return value

    return accept
