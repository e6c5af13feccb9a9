"""The worlds of a run: which world each task comes from, and what training asks of all of them.

The places of a run are counted 0, 1, 2, ... through the warm start and GRPO. Place i belongs to the
world in whose share of [0, 1) the number (u + i * (sqrt(5) - 1) / 2) mod 1 lies, with u drawn from
the seed. Any n places in a row then hold each world by its share, give or take one or two (Weyl's
equidistribution; the golden ratio has the smallest discrepancy).
"""

import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import DRAWN, TaskSection
from nanorchestra.errors import require
from nanorchestra.records import Task, Trajectory, words_and_vector
from nanorchestra.schemas import Json
from nanorchestra.tools.models import ExpertTool
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from reward import POLICY, PRICES, group_rewards
from tools import load_tools
from worlds import evaluation, questions, routers
from worlds.miniature import world as miniature
from worlds.miniature.induction import draft_induction
from worlds.miniature.tables import HELD_OUT, TRAIN
from worlds.miniature.teacher import teach, texts
from worlds.toolscale import dataset as toolscale
from worlds.toolscale.small import small_world
from worlds.wording import understood

MINIATURE, DOMAINS = "miniature", "domains"  # worlds that need no files
GOLDEN = (math.sqrt(5) - 1) / 2


def parse_mixture(text: str) -> dict[str, float]:
    """Returns the shares that task.world states, which add up to 1.

    "miniature=0.99, data/=0.01" names worlds and weights; a weight that is missing is 1. UserError.
    """
    entries = [entry.partition("=") for entry in text.split(",")]
    try:
        weights = {name.strip(): float(weight or 1) for name, _, weight in entries}
    except ValueError:
        weights = {}
    require(
        len(weights) == len(entries)
        and all(name and 0 < weight < math.inf for name, weight in weights.items()),
        f"task.world is {text!r}; it must name each world once with a weight above 0, like "
        "'miniature=0.9, data/=0.1'",
    )
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def places(
    shares: dict[str, float], seed: int, count: int, start: int = 0
) -> list[tuple[str, int]]:
    """Returns the world and the number of its task for the places start .. start + count.

    Tasks are numbered 0, 1, 2, ... in each world. The shares add up to 1.
    """
    names, numbers, found = list(shares), Counter(), []
    ends = [*accumulate(shares.values())][:-1]
    u = random.Random(f"{seed}/mixture").random()
    for place in range(start + count):
        name = names[bisect(ends, (u + place * GOLDEN) % 1)]
        found.append((name, numbers[name]))
        numbers[name] += 1
    return found[start:]


class Worlds:
    """The worlds named in task.world, as a run practises in them.

    A task is a function of its place, so that every rank and a resumed run have the same.
    """

    price = PRICES[POLICY]
    initialise = staticmethod(draft_induction)
    measure = staticmethod(evaluation.measure)
    summarise = staticmethod(evaluation.summarise)

    def __init__(
        self,
        settings: TaskSection,
        seed: int,
        sandbox: Sandbox,
        spending: Spending | None = None,
    ):
        self.seed, self.sandbox = seed, sandbox
        self.shares = parse_mixture(settings.world)
        self.miniature = miniature.World(seed)
        names = [name for name in self.shares if name != MINIATURE]
        self.domains = {name: open_world(name, seed, sandbox, settings, spending) for name in names}

    def tasks(self, count: int, start: int, split: str = TRAIN) -> list[Task]:
        """Returns the tasks of the places start .. start + count, of training or held out."""
        found = places(self.shares, self.seed, count, start)
        return [self.domains.get(name, self.miniature).task(split, n) for name, n in found]

    def epoch(self) -> int:
        """Returns how many training tasks the worlds have. UserError if they have no end."""
        require(
            MINIATURE not in self.shares,
            "grpo.epochs: the miniature has tasks without end; set grpo.steps, and epochs to 0",
        )
        return sum(len(world.splits[TRAIN]) for world in self.domains.values())

    def lesson_tasks(self, count: int, start: int, most_tools: int = 0) -> list[Task]:
        """Returns tasks to demonstrate, with `most_tools` tools on offer at most (0: no limit).

        With a limit only the miniature's: the long texts of a domain would dominate the loss while
        the model learns to copy.
        """
        found = places(self.shares, self.seed, count, start)
        if most_tools and MINIATURE in self.shares:
            found = [(name, n) for name, n in found if name == MINIATURE]
        lessons = miniature.World(self.seed, True, most_tools)
        return [self.domains.get(name, lessons).task(TRAIN, n) for name, n in found]

    def held_out(self, count: int) -> list[Task]:
        """Returns the held-out tasks of the first `count` places."""
        return self.tasks(count, 0, HELD_OUT)

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns the environment of one attempt at a task."""
        if domain := self.domains.get(task.data.get("world")):
            return domain.environment(task, seed)
        return miniature.environment(task, seed, self.sandbox)

    def teach(self, env: Environment) -> Iterable[Lesson]:
        """Returns a demonstration, which acts in `env` as it is iterated over."""
        if isinstance(env, toolscale.DomainEnvironment):
            return toolscale.teach(env, self.domains[env.task.data["world"]].skill)
        require(
            not isinstance(env, questions.QuestionEnvironment),
            "task.world: nothing demonstrates questions; set warm_start.steps = 0, or imitate "
            "recorded attempts with warm_start.trajectories",
        )
        return teach(env, 0)

    def texts(self, count: int) -> Iterator[str]:
        """Yields about `count` demonstrations as text, for a tokenizer to be trained on."""
        counts = Counter(name for name, _ in places(self.shares, self.seed, count))
        if counts[MINIATURE]:
            yield from texts(miniature.World(self.seed, True), counts[MINIATURE], self.sandbox)
        for name, world in self.domains.items():
            yield from toolscale.texts(world, counts[name])

    def training_rewards(
        self, task: Task, members: Sequence[Trajectory], bounds: str
    ) -> list[float]:
        """Returns what the group's advantages are computed from.

        bounds "group": the paper's rewards, with extrema of the group. "task": the absolute ones.
        """
        if bounds == "task":
            return [member.reward for member in members]
        return group_rewards(members, task.preference)

    def attempt(
        self, rollout: Rollout, tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[Trajectory], int]:
        """Returns one scored attempt at each training task, and how many were repeated."""
        return evaluation.attempt(rollout, tasks, seeds, self.environment)

    def evaluate(self, rollout: Rollout, tasks: Sequence[Task]) -> list[Trajectory]:
        """Returns one scored attempt at each held-out task."""
        return evaluation.evaluate(rollout, tasks, self.seed, self.environment)

    def routers(self, tasks: Sequence[Task]) -> dict[str, Json]:
        """Returns the summary of each fixed router, which plays nothing but the miniature."""
        if self.domains:
            return {}
        return {
            name: evaluation.summarise(tasks, self.evaluate(router, tasks))
            for name, router in routers.routers_of(self, self.seed).items()
            if name != routers.TRAINED
        }


def _paid_as(tool, payee) -> ExpertTool | None:
    """Returns an expert whose bill is under the name of what it is asked for."""
    if tool is None:
        return None
    paid = {name: replace(expert, payee=payee) for name, expert in tool.experts.items()}
    return replace(tool, experts=paid)


def open_world(
    name: str,
    seed: int,
    sandbox: Sandbox,
    settings: TaskSection,
    spending: Spending | None = None,
) -> toolscale.ToolScaleWorld | questions.QuestionWorld:
    """Returns a world beside the miniature: "domains", or one that was read from files. UserError.

    Files are "questions:FILE", a directory of data_gen.py or of tau2-bench, or a .jsonl file of
    tau2 tasks or of ToolScale's rows.
    """
    if name == DOMAINS:
        return small_world(seed, name)
    asks = name.startswith(questions.PREFIX)
    require(
        asks or Path(name).exists(),
        f"task.world: there is no world {name!r}; it must be {MINIATURE}, {DOMAINS}, "
        f"{questions.PREFIX}FILE, a directory of data_gen.py or tau2-bench, or a .jsonl file of "
        "tau2 tasks or ToolScale rows",
    )
    simulated = settings.experts == "simulated"
    tools = []
    if settings.tools:
        tools = load_tools(settings.tools, sandbox, spending, simulated)
    experts = {tool.name: tool for tool in tools if isinstance(tool, ExpertTool)}
    named = (settings.user, settings.judge)
    require(
        {"", *experts} >= set(named),
        f"task.user and task.judge are {named}; each must be an expert of the catalogue "
        f"task.tools, {settings.tools!r}, or empty",
    )
    user = _paid_as(experts.get(settings.user), "user")
    judge = _paid_as(experts.get(settings.judge), "judge")
    offered = [tool for tool in tools if tool.name not in named]
    if asks:
        return questions.load_world(name, seed, settings, offered, judge)
    models = {tool.expert.model: tool.expert for tool in offered if isinstance(tool, ExpertTool)}
    models = toolscale.Models(user, judge, None if simulated else models)
    preference = None
    if settings.preference != DRAWN:
        words, vector = words_and_vector(settings.preference)
        names = {*vector, *vector.get("never", ())}  # load_world knows whether they may be
        preference = understood(words, vector, "task.preference", names, names)
    return toolscale.load_world(name, seed, models, preference)
