"""The tasks and worlds of a run: read from files, split, and offered with experts and preferences.

`load_world(PATH)` reads what data_gen.py wrote, or rows of ToolScale as released; small.py makes
tasks in memory. The world's `task(split, index)` returns a Task, its `environment(task, seed)` one
attempt at it.
"""

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanorchestra.agent.limits import SECONDS_PER_TOKEN
from nanorchestra.agent.world import Lesson, Split
from nanorchestra.errors import require
from nanorchestra.files import read_json_lines
from nanorchestra.records import Bounds, Preference, Price, Task, ToolCall
from nanorchestra.schemas import Json
from reward import POLICY, PRICES
from worlds import preferences
from worlds.toolscale.domain import Domain, load
from worlds.toolscale.environment import SIMULATED, DomainEnvironment, Models
from worlds.toolscale.expert import SAY, altered, right_turns
from worlds.toolscale.foreign import load_foreign
from worlds.toolscale.offers import draw_experts
from worlds.toolscale.rows import read_row, restored, unfit
from worlds.toolscale.user import ScriptedUser, opening

NEEDED = ("id", "domain", "user_scenario", "evaluation_criteria")  # fields of a task
TASKS_HELD_OUT = 5  # of tasks that are not of held-out domains, every fifth of a domain is held out
STEP_TOKENS = 4000, 400  # that an expert reads and writes for a step, for the bounds of a reward


@dataclass(frozen=True)
class DomainWorld:
    """tau2 tasks and the domains that they are about.

    `splits`: split -> tau2 tasks; "all" has every one. `domains`: by name. For a task without
    `experts` three are drawn. A task with a `policy` of its own shows that instead of its
    domain's. With `models.experts` these alone are offered. `skill` is the share of the
    demonstrations that are right. `preference` is that of every task without one, None: drawn.
    """

    splits: dict[str, Sequence[Json]]
    domains: dict[str, Domain]
    seed: int = 0
    name: str = ""
    models: Models = SIMULATED
    skill: float = 1.0
    preference: Preference | None = None

    def size(self, split: Split) -> int:
        """Returns how many different tasks a split has."""
        return len(self.splits[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of a split, taken round and round."""
        tau2 = self.splits[split][index % self.size(split)]
        if split == "all":
            split = "held_out"
        rng = random.Random(f"{self.seed}/{split}/{index}/{tau2['id']}")
        experts = tau2.get("experts")
        if experts is None:
            experts = draw_experts(rng, split)
        if self.models.experts is not None:
            experts = [expert for expert in experts if expert["model"] in self.models.experts]
        if "preference" in tau2:
            preference = Preference.of("", tau2["preference"], tau2["id"])
        elif self.preference is not None:
            preference = self.preference
        else:
            aliases = [expert["alias"] for expert in experts]
            preference = preferences.draw(rng, aliases, split)
        kinds = self.domains[tau2["domain"]].kinds
        offers = {name: kinds[name] for name in tau2["tools"]}
        for expert in experts:
            offers[expert["alias"]] = expert["model"]
        return Task(
            f"{tau2['id']}/{split}-{index}",
            opening(tau2),
            preference,
            _bounds(tau2, experts),
            self.name,
            tau2.get("kind", tau2["domain"]),
            offers,
            {"task": tau2, "experts": experts},
        )

    def environment(self, task: Task, seed: int) -> DomainEnvironment:
        """Returns one attempt at a task; `seed` is that of the simulated experts."""
        tau2 = task.data["task"]
        return DomainEnvironment(self.domains[tau2["domain"]], task, seed, self.models)

    def lesson(self, index: int, most_tools: int = 0) -> tuple[DomainEnvironment, Iterator[Lesson]]:
        """Returns an environment, and a teacher's turns in it. There is no limit of tools."""
        env = self.environment(self.task("train", index), 0)
        return env, teach(env, self.skill)


def _bounds(tau2, experts) -> Bounds:
    """Bounds in US dollars and seconds.

    From nothing to the most expensive, and the slowest, expert for every golden step and the last
    message; without experts, the policy.
    """
    steps = 1 + len(tau2["evaluation_criteria"]["actions"])
    prices = [Price(*expert["usd"]) for expert in experts] or [PRICES[POLICY]]
    usd = max(price.cost(*STEP_TOKENS) for price in prices)
    alone_s = STEP_TOKENS[1] * SECONDS_PER_TOKEN
    seconds = max((expert["latency_s"] for expert in experts), default=alone_s)
    return Bounds((0.0, steps * usd), (0.0, steps * seconds))


def teach(env: DomainEnvironment, skill: float = 1.0) -> Iterator[Lesson]:
    """Yields the turns of an agent that does all that is right until the user is content.

    With probability 1 - skill it does one thing wrong instead and says that it is done. No calls of
    experts: the lessons show how the tools are used, not which expert to ask. The user is the
    scripted one, which comes to an end.
    """
    env.user = ScriptedUser(env.task.data["task"])
    rng = random.Random(f"{env.task.id}/teach")
    if rng.random() >= skill:
        for place in env.scorer.effects[:1]:
            call = ToolCall(*altered(env.domain, env.scorer.golden[place], rng))
            yield Lesson("", "", call, env.do(call))
        yield Lesson("", SAY["done"].format(""))
        return
    for lesson in right_turns(env):
        yield Lesson("", *lesson)


def load_world(
    path: str | Path,
    seed: int = 0,
    models: Models = SIMULATED,
    preference: Preference | None = None,
) -> DomainWorld:
    """Reads a directory that data_gen.py wrote, or a .jsonl file of tasks or rows of ToolScale.

    The domains are in worlds/DOMAIN beside the tasks. Tasks that cannot be scored here are left
    out, with a line on stderr. `preference` is that of tasks without one, None: drawn. Raises
    UserError if something is missing or damaged.
    """
    name, path = str(path), Path(path)  # task.world names it so, "data/" too
    file = path if path.suffix == ".jsonl" else path / "tasks.jsonl"
    home = file.parent / "worlds"
    tasks, kept, left_out = load_tasks(file), [], Counter()
    if preference is not None:
        _check_preference(preference, tasks)
    called = defaultdict(set)  # the tools that the tasks of a domain call
    for task in tasks:
        actions = task["evaluation_criteria"]["actions"]
        called[task["domain"]].update(action["name"] for action in actions)
    worlds = {domain: _load_domain(home / domain, called[domain]) for domain in sorted(called)}
    for task in tasks:
        world = worlds[task["domain"]]
        if why := unfit(world, task, models):
            left_out[why] += 1
            continue
        every = list(world.kinds)
        task["tools"] = [name for name in every if name in task.get("tools", every)] or every
        for action in task["evaluation_criteria"]["actions"]:
            parameters = world.functions[action["name"]]["function"]["parameters"]
            action["arguments"] = restored(action["arguments"], parameters)
        kept.append(task)
    reasons = ", ".join(f"{count} ({why})" for why, count in left_out.items())
    tally = f"of {len(tasks)} tasks {reasons or 'none'} are left out"
    splits = split(kept)
    require(
        all(splits.values()), f"{file}: a domain needs at least {TASKS_HELD_OUT} tasks; {tally}"
    )
    if left_out:
        print(f"{file}: {tally}", file=sys.stderr)
    splits["all"] = splits["train"] + splits["held_out"]
    return DomainWorld(splits, worlds, seed, name, models, preference=preference)


def _load_domain(directory: Path, called: Collection[str]) -> Domain:
    """A domain of ours, which has its file, or of others."""
    if (directory / "domain.py").is_file():
        return load(directory)
    return load_foreign(directory, called)


def split(tasks: Sequence[Json]) -> dict[str, list[Json]]:
    """Returns {"train", "held_out"}: as the tasks say, or every fifth of each domain."""
    splits: dict[str, list[Json]] = {"train": [], "held_out": []}
    stated = {task.get("split") for task in tasks} == set(splits)
    counts = Counter()
    for task in tasks:
        counts[task["domain"]] += 1
        name = "train" if counts[task["domain"]] % TASKS_HELD_OUT else "held_out"
        splits[task["split"] if stated else name].append(task)
    return splits


def _check_preference(preference, tasks) -> None:
    """Raises UserError if a preference names tools that its tasks know by other names."""
    named = [*preference.tools, *preference.never]
    for task in tasks:
        require(
            "preference" in task or not named,
            f"task.preference names {', '.join(named)}; {task['id']} offers experts under aliases "
            "of its own, so it can have words, outcome, cost, latency, usd and seconds",
        )


def load_tasks(path: Path) -> list[Json]:
    """Returns the tasks of a .jsonl file. UserError that names the line."""
    tasks = {}
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        task = read_row(row, where)
        if task is None:
            continue
        missing = [name for name in NEEDED if not task.get(name)]
        require(not missing, f"{where}: {', '.join(missing)} is missing")
        require(task["id"] not in tasks, f"{where}: id {task['id']!r} stands twice")
        tasks[task["id"]] = task
    return list(tasks.values())
