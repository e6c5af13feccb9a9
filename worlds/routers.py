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

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from worlds.programs import ProgramAttempt, Programs, play_program
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


def routers_of(world: World) -> dict[str, Router | ProgramRouter]:
    """Returns the routers of a world by name; if a domain offers no expert, the controls."""
    if isinstance(world, RecordedWorld):
        return programs_by_name(Baselines(world).programs())
    if isinstance(world, Desk):
        return programs_by_name(PROGRAMS | learners(world))
    tasks = [world.task("all", index) for index in range(SEEN)]
    if isinstance(world, DomainWorld) and not any(map(experts, tasks)):
        names = CONTROLS
    else:
        names = EXPERT_ORDERS if all(map(experts, tasks)) else ()
    return {name: Router(name) for name in names}


def programs_by_name(programs: dict[str, Programs]) -> dict[str, ProgramRouter]:
    """Returns the routers that play programs."""
    return {name: ProgramRouter(each) for name, each in programs.items()}


def learners(world: Desk) -> dict[str, Programs]:
    """Returns the learners of the desk; each practises before it first plays, for some seconds."""
    return {
        f"table-{PRACTISED}": Learner(world, Table(), PRACTISED),
        f"linear-{PRACTISED}": Learner(world, Linear(), PRACTISED),
    }


@dataclass
class ProgramRouter:
    """Plays attempts by a program for each task."""

    programs: Programs
    on_done: OnDone | None = None

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment."""
        attempts = []
        for env, seed in zip(environments, seeds, strict=True):
            attempts.append(play_program(self.programs(env.task), env, seed))
            if self.on_done:
                self.on_done(attempts[-1])
        return attempts


@dataclass
class Router:
    """Plays attempts as a policy does. `name` is a key of EXPERT_ORDERS or CONTROLS."""

    name: str
    on_done: OnDone | None = None

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment."""
        tokenizer = Tokenizer.from_dir(NANO)
        for env in environments:
            env.evidence.tokenizer = tokenizer  # counts what an expert of a role reads
        attempts = []
        for attempt in in_daemons(self._play, zip(environments, seeds, strict=True), PARALLEL):
            attempts.append(attempt)
            if self.on_done:
                self.on_done(attempt)
        return attempts

    def _play(self, seeded: tuple[Environment, int]) -> Trajectory:
        env, seed = seeded
        with in_attempt(seed):
            if self.name in CONTROLS:
                return CONTROLS[self.name](env, seed)
            return ask_until_two_agree(EXPERT_ORDERS[self.name](env.task), env, seed)


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


def from_the_cheapest_up(task: Task) -> list[OfferedExpert]:
    """Returns the experts from the cheapest up."""
    return sorted(experts(task), key=_usd_per_million)


def cheapest(task: Task) -> list[OfferedExpert]:
    """Returns the cheapest expert."""
    return from_the_cheapest_up(task)[:1]


def most_expensive(task: Task) -> list[OfferedExpert]:
    """Returns the most expensive expert."""
    return from_the_cheapest_up(task)[-1:]


EXPERT_ORDERS = {
    "strongest": most_expensive,
    "cheapest": cheapest,
    "cascade": from_the_cheapest_up,
}


def _usd_per_million(expert: OfferedExpert) -> float:
    return expert.usd_per_million


def ask_until_two_agree(
    order: Sequence[OfferedExpert], env: Environment, seed: int = 0
) -> Trajectory:
    """Returns an attempt that asks experts in order until two answers agree, or a conversation."""
    attempt = ProgramAttempt(env, seed)
    if isinstance(env, DomainEnvironment):
        _converse(order, attempt)
        return attempt.finish()
    answers = []
    for expert in order:
        result = attempt.call(ToolCall(expert.tool, expert.arguments))
        if attempt.failed:
            break
        attempt.trajectory.answer = result.content
        answers.append(normalise(final_answer(result.content)))
        if answers.count(answers[-1]) > 1 and not result.error:
            break
    return attempt.finish()


def _converse(order: Sequence[OfferedExpert], attempt: ProgramAttempt) -> None:
    """Lets each expert do turns until the conversation is over; all but the last until an error."""
    for expert in order:
        while True:
            result = attempt.call(ToolCall(expert.tool, expert.arguments))
            if attempt.failed:
                return
            attempt.trajectory.answer = result.content
            if attempt.env.over or len(attempt.trajectory.turns) >= TURNS:
                return
            erred = result.error or "Error: " in result.content
            if erred and expert is not order[-1]:
                break


# Domains without experts: controls.


def copy_what_is_said(env: DomainEnvironment, seed: int = 0) -> Trajectory:
    """Returns an attempt that looks nothing up: it is told which writes and hand-overs are right.

    It makes those all of whose arguments stand in the user's message.
    """
    attempt = ProgramAttempt(env, seed)
    for place in env.scorer.effects:
        name, arguments = env.scorer.golden[place]
        if all(mentions(env.task.question, value) for value in arguments.values()):
            attempt.call(ToolCall(name, arguments))
    return _told(attempt, SAY["done"].format(""))


def do_nothing(env: DomainEnvironment, seed: int = 0) -> Trajectory:
    """Returns an attempt that refuses."""
    return _told(ProgramAttempt(env, seed), SAY["refuse"])


def _told(attempt, message) -> Trajectory:
    """The attempt, after a last message to the user."""
    attempt.env.hear(message)
    attempt.trajectory.answer = message
    return attempt.finish()


CONTROLS = {"copier": copy_what_is_said, "nothing": do_nothing}
