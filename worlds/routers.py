"""Fixed strategies that a trained policy must beat, and learners of another kind.

Routers play in the same environments as the policy and are scored and billed in the same way, but
pay for no tokens of their own. Those of the desk are programs written for it, of which `perfect` is
the ceiling, and learners that have made as many attempts as a policy. Those of recorded answers are
their baselines. In other worlds a router is an order of the experts, which are asked until two
answers agree; in a conversation the first expert does every turn, and after an error the next.
Where a domain offers no expert there are two controls: one copies what the user says, one does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from nanorchestra.agent.attempts import OnDone
from nanorchestra.agent.environment import Environment
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.agent.threads import in_daemons
from nanorchestra.agent.world import World
from nanorchestra.model.checkpoint import NANO
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Task, ToolCall, Trajectory
from nanorchestra.schemas import Json
from nanorchestra.tools.roles import final_answer
from worlds.desk import Desk
from worlds.desk_learner import Learner, Linear, Table
from worlds.desk_programs import PROGRAMS
from worlds.judge import normalise
from worlds.programs import Play, Program, play_program
from worlds.recorded import RecordedWorld
from worlds.recorded_programs import Baselines
from worlds.toolscale.dataset import DomainWorld
from worlds.toolscale.environment import EXPERT, DomainEnvironment
from worlds.toolscale.expert import SAY
from worlds.toolscale.words import mentions

SEEN = 20  # tasks of a world that say which routers it has
PARALLEL = 16  # attempts at a time
PRACTISED = 12_800  # attempts of a learner, as many as configs/nano.toml makes
TURNS = 40  # of a conversation at most


def routers_of(world: World) -> dict[str, Router]:
    """Returns the routers of a world by name; if a domain offers no expert, the controls."""
    if isinstance(world, RecordedWorld):
        return routers_by_name(Baselines(world).programs())
    if isinstance(world, Desk):
        return routers_by_name(PROGRAMS | learners(world))
    tasks = [world.task("all", index) for index in range(SEEN)]
    if isinstance(world, DomainWorld) and not any(map(experts, tasks)):
        return routers_by_name(CONTROLS)
    return routers_by_name(EXPERT_ORDERS, PARALLEL) if all(map(experts, tasks)) else {}


def routers_by_name(plays: dict[str, Play], parallel: int = 1) -> dict[str, Router]:
    """Returns the routers that play programs, by name."""
    return {name: Router(play, parallel) for name, play in plays.items()}


def learners(world: Desk) -> dict[str, Play]:
    """Returns the learners of the desk; each practises before it first plays, for some seconds."""
    return {
        f"table-{PRACTISED}": Learner(world, Table(), PRACTISED),
        f"linear-{PRACTISED}": Learner(world, Linear(), PRACTISED),
    }


@dataclass
class Router:
    """Plays attempts by a program, as a policy does; `parallel` of them at a time."""

    play: Play
    parallel: int = 1
    on_done: OnDone | None = None

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment."""
        tokenizer = Tokenizer.from_dir(NANO)
        for env in environments:
            env.evidence.tokenizer = tokenizer  # counts what an expert of a role reads
        attempts = []
        seeded = zip(environments, seeds, strict=True)
        for attempt in in_daemons(self._attempt, seeded, self.parallel):
            attempts.append(attempt)
            if self.on_done:
                self.on_done(attempt)
        return attempts

    def _attempt(self, seeded: tuple[Environment, int]) -> Trajectory:
        env, seed = seeded
        with in_attempt(seed):
            return play_program(self.play, env, seed)


# The experts on offer, and orders of them.


@dataclass(frozen=True)
class OfferedExpert:
    """An expert by the call that asks it, and its price, input and output together."""

    tool: str
    usd_per_million: float
    arguments: Json = field(default_factory=dict)


def experts(task: Task) -> list[OfferedExpert]:
    """Returns the experts that can answer, or in a conversation do a turn."""
    offered = []
    for expert in task.data.get("experts", ()):
        call = {"expert": expert["alias"]}
        offered.append(OfferedExpert(EXPERT, sum(expert["usd"]), call))
    for tool in task.data.get("tools", ()):
        for alias, model in tool.get("models", {}).items():
            price = sum(model["usd"])
            if tool["name"] == alias:
                offered.append(OfferedExpert(alias, price))
            elif tool["name"] == "answer":  # the published role
                offered.append(OfferedExpert("answer", price, {"model": alias}))
    return offered


Order = Callable[[Task], list[OfferedExpert]]


def from_the_cheapest_up(task: Task) -> list[OfferedExpert]:
    """Returns the experts from the cheapest up."""
    return sorted(experts(task), key=_usd_per_million)


def cheapest(task: Task) -> list[OfferedExpert]:
    """Returns the cheapest expert."""
    return from_the_cheapest_up(task)[:1]


def most_expensive(task: Task) -> list[OfferedExpert]:
    """Returns the most expensive expert."""
    return from_the_cheapest_up(task)[-1:]


def _usd_per_million(expert: OfferedExpert) -> float:
    return expert.usd_per_million


def ask_until_two_agree(env: Environment, order: Order) -> Program:
    """Asks experts in order until two answers agree; in a conversation they do its turns."""
    if isinstance(env, DomainEnvironment):
        return (yield from _converse(env, order(env.task)))
    answers, content = [], ""
    for expert in order(env.task):
        result = yield ToolCall(expert.tool, expert.arguments)
        content = result.content
        answers.append(normalise(final_answer(content)))
        if answers.count(answers[-1]) > 1 and not result.error:
            break
    return content


def _converse(env: DomainEnvironment, experts: list[OfferedExpert]) -> Program:
    """Lets each expert do turns until the conversation is over; all but the last until an error."""
    content, turns = "", 0
    for expert in experts:
        while True:
            result = yield ToolCall(expert.tool, expert.arguments)
            content, turns = result.content, turns + 1
            if env.over or turns >= TURNS:
                return content
            erred = result.error or "Error: " in content
            if erred and expert is not experts[-1]:
                break
    return content


EXPERT_ORDERS: dict[str, Play] = {
    "strongest": partial(ask_until_two_agree, order=most_expensive),
    "cheapest": partial(ask_until_two_agree, order=cheapest),
    "cascade": partial(ask_until_two_agree, order=from_the_cheapest_up),
}


# Domains without experts: controls.


def copy_what_is_said(env: DomainEnvironment) -> Program:
    """Looks nothing up: it is told which writes and hand-overs are right.

    It makes those all of whose arguments stand in the user's message.
    """
    for place in env.scorer.effects:
        name, arguments = env.scorer.golden[place]
        if all(mentions(env.task.question, value) for value in arguments.values()):
            yield ToolCall(name, arguments)
    return _told(env, SAY["done"].format(""))


def do_nothing(env: DomainEnvironment) -> Program:
    """Refuses."""
    yield from ()
    return _told(env, SAY["refuse"])


def _told(env, message) -> str:
    """Tells the user a message, and returns it: the answer of the attempt."""
    env.hear(message)
    return message


CONTROLS: dict[str, Play] = {"copier": copy_what_is_said, "nothing": do_nothing}
