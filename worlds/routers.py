"""Fixed strategies that a trained policy must beat; `perfect` is the ceiling of the miniature.

Routers play in the same environments as the policy and are scored and billed in the same way, but
pay for no tokens of their own. In the miniature a router is an order of the tools on offer, which
are used until one is sure; `vote` asks all experts if neither cost nor time counts. In other worlds
it is an order of the experts, which are asked until two answers agree; in a conversation the first
expert does every turn, and after an error the next. Where a domain offers no expert there are two
controls: one copies what the user says, one does nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

import numpy as np

from nanorchestra.agent.environment import Environment, score_answer
from nanorchestra.agent.limits import UserLimits
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.agent.world import World
from nanorchestra.model.checkpoint import NANO
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Price, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.schemas import Json
from nanorchestra.tools.roles import final_answer
from reward import task_rewards
from tools import Skill
from worlds.desk import Desk
from worlds.desk_programs import PROGRAMS, Program
from worlds.judge import normalise
from worlds.miniature.offers import (
    Offer,
    Reading,
    call_for,
    expected_cost,
    fits,
    is_expert,
    read_result,
    skill,
)
from worlds.miniature.tables import SPECIALISTS
from worlds.recorded import RecordedWorld
from worlds.recorded_programs import Baselines, Programs
from worlds.skill_table import UNKNOWN, estimated_skill, skill_table
from worlds.toolscale.dataset import DomainWorld
from worlds.toolscale.environment import EXPERT, DomainEnvironment
from worlds.toolscale.expert import SAY
from worlds.toolscale.words import mentions

MINIATURE = "miniature"  # the world
SEEN = 20  # tasks of a world that say which routers it has
PARALLEL = 16  # attempts at a time
TABLES = (50, 500)  # single calls from which a router learns the skills
DRAWN = 20  # tables of each size
VOTE = "vote"
UNSURE = 0.3  # of a vote
TURNS = 40  # of a conversation at most
STRENGTHS = ("small", *SPECIALISTS.values(), "medium", "large")  # from the weakest, by their names


def routers_of(world: World) -> dict[str, Router | ProgramRouter]:
    """Returns the routers of a world by name; if a domain offers no expert, the controls.

    Those of recorded answers are their baselines.

    A mixture has those that its worlds share, and plays each task as the task's world does.
    """
    if isinstance(world, RecordedWorld):
        programs = Baselines(world).programs()
        return {name: ProgramRouter(each) for name, each in programs.items()}
    tasks = [world.task("held_out", index) for index in range(SEEN)]
    if world.name == MINIATURE:
        names = list(TOOL_ORDERS)
    elif world.name == Desk.name:
        names = list(PROGRAMS)
    elif isinstance(world, DomainWorld) and not any(map(experts, tasks)):
        names = list(CONTROLS)
    elif not all(task.world == MINIATURE or experts(task) for task in tasks):
        names = []
    elif all(task.world == world.name for task in tasks):
        names = list(EXPERT_ORDERS)
    else:
        names = [name for name in EXPERT_ORDERS if name in TOOL_ORDERS]
    return {name: Router(name) for name in names}


@dataclass(frozen=True)
class ProgramRouter:
    """Plays attempts by a program for each task, in a world of recorded answers."""

    programs: Programs

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment."""
        attempts = []
        for env, seed in zip(environments, seeds, strict=True):
            attempts.append(play_program(self.programs(env.task), env, seed))
        return attempts


@dataclass(frozen=True)
class Router:
    """Plays attempts as a policy does. `name` is a key of a table of this file."""

    name: str

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment."""
        tokenizer = Tokenizer.from_dir(NANO)
        attempts = []
        with ThreadPoolExecutor(PARALLEL) as pool:
            for env, seed in zip(environments, seeds, strict=True):
                env.evidence.tokenizer = tokenizer  # counts what an expert of a role reads
                attempts.append(pool.submit(self._play, env, seed))
        return [attempt.result() for attempt in attempts]

    def _play(self, env: Environment, seed: int) -> Trajectory:
        with in_attempt(seed):
            if env.task.world == Desk.name:
                return play_program(PROGRAMS[self.name](env.task), env, seed)
            if env.task.world == MINIATURE:
                use = vote if self.name == VOTE else use_until_sure
                return use(TOOL_ORDERS[self.name](env.task), env, seed)
            if self.name in CONTROLS:
                return CONTROLS[self.name](env, seed)
            return ask_until_two_agree(EXPERT_ORDERS[self.name](env.task), env, seed)


# The miniature: orders of the tools on offer.


def strongest(task: Task) -> list[Offer]:
    """Returns the tool that fits, else the expert that names suggest to be the strongest."""
    return sorted(_allowed(task), key=_strength)[-1:]


def cascade(task: Task) -> list[Offer]:
    """Returns the tool that fits, then the experts from the cheapest up."""
    return sorted(_allowed(task), key=lambda offer: (is_expert(offer), offer["price"]))


def blind(task: Task) -> list[Offer]:
    """Returns what `informed` would if the user wanted a right answer alone, and kept to the bans.

    It reads neither preference nor prices.
    """
    bans = dict.fromkeys(task.preference.avoided, -1.0)
    return informed(replace(task, preference=Preference(task.preference.text, tools=bans)))


def informed(task: Task) -> list[Offer]:
    """Returns the two tools with the highest expected reward of a single call."""
    return informed_order(task)[:2]


def perfect(task: Task) -> Sequence[Offer]:
    """Returns the order of one to three tools with the highest expected reward."""
    allowed = _allowed(task)
    plans = [plan for length in (1, 2, 3) for plan in permutations(allowed, length)]
    return plans[int(np.argmax(expected_rewards(task, plans)))]


def by_table(task: Task, calls: int) -> list[Offer]:
    """Returns what `informed` would, by skills that were estimated from so many single calls.

    Each task has one of DRAWN tables, for a single one is lucky or not.
    """
    table = skill_table(calls, number=zlib.crc32(task.id.encode()) % DRAWN)
    return informed_order(task, partial(estimated_skill, table))[:2]


def unskilled(task: Task) -> list[Offer]:
    """Returns what `informed` would if all experts were right equally often."""
    return informed_order(task, lambda task, offer: UNKNOWN)


TOOL_ORDERS = {
    "strongest": strongest,
    "cascade": cascade,
    VOTE: unskilled,
    **{f"table-{calls}": partial(by_table, calls=calls) for calls in TABLES},
    "blind": blind,
    "informed": informed,
    "perfect": perfect,
}


def hidden_skill(task: Task, offer: Offer) -> Skill:
    """Returns the skill that an expert has at the question of a task."""
    return skill(offer["what"], task.data["subject"], task.data["difficulty"])


def informed_order(
    task: Task, skill_of: Callable[[Task, Offer], Skill] = hidden_skill
) -> list[Offer]:
    """Returns the tools from the highest expected reward of a single call down.

    It looks up the hidden skills, which are the same in all tasks, so that a policy can learn them,
    or what `skill_of` takes for them.
    """
    allowed = _allowed(task)
    rewards = expected_rewards(task, [[offer] for offer in allowed], skill_of)
    return [allowed[i] for i in np.argsort(-rewards, kind="stable")]


def expected_rewards(
    task: Task,
    plans: Sequence[Sequence[Offer]],
    skill_of: Callable[[Task, Offer], Skill] = hidden_skill,
) -> np.ndarray:
    """Returns the expected reward of each plan, [plans].

    The tools of a plan are used in order until one is sure. A wrong answer earns 0.
    """
    attempts = []  # that end with the right answer: one for each tool of each plan
    chances = []  # of each of them
    numbers = []  # of their plans
    for number, plan in enumerate(plans):
        reached = 1.0  # the chance that the plan comes to this tool
        so_far = Trajectory(task.id, seed=0, outcome=1.0)
        for offer in plan:
            calls = len(task.data["tables"]) if offer["what"] == "records" else 1
            so_far = replace(
                so_far,
                calls_usd=so_far.calls_usd + expected_cost(offer, task.data["difficulty"]) * calls,
                latency_s=so_far.latency_s + offer["latency"] * calls,
                calls=so_far.calls | {offer["name"]: calls},
            )
            known = Skill(1.0, 0.0, 0.0)
            if is_expert(offer):
                known = skill_of(task, offer)
            right_and_unsure = known.right * known.unsure_if_right
            ends_right = known.right if offer is plan[-1] else known.right - right_and_unsure
            attempts.append(so_far)
            chances.append(reached * ends_right)
            numbers.append(number)
            reached *= right_and_unsure + (1 - known.right) * known.unsure_if_wrong
    rewards = task_rewards(attempts, task.preference, task.bounds)
    return np.bincount(numbers, weights=chances * rewards)


def _allowed(task: Task) -> list[Offer]:
    """Returns the tools that can answer and are not forbidden; all that can answer if none is."""
    able = [offer for offer in task.data["tools"] if usable(task, offer)]
    allowed = [offer for offer in able if offer["name"] not in task.preference.avoided]
    return allowed or able


def usable(task: Task, offer: Offer) -> bool:
    """Whether a tool can answer the question of a task."""
    return is_expert(offer) or fits(offer, task)


def _strength(offer: Offer) -> int:
    """Returns a rank by what an offer is; a tool that fits is stronger than any expert."""
    return STRENGTHS.index(offer["what"]) if is_expert(offer) else len(STRENGTHS)


# The miniature: an attempt.


def use_until_sure(order: Sequence[Offer], env: Environment, seed: int = 0) -> Trajectory:
    """Returns an attempt that uses tools in order until one is sure."""
    attempt = RouterAttempt(env, seed)
    for offer in order:
        reading = _use(offer, attempt)
        if attempt.failed:
            break
        attempt.trajectory.answer = reading.answer or ""
        if reading.sure:
            break
    return attempt.finish()


def vote(order: Sequence[Offer], env: Environment, seed: int = 0) -> Trajectory:
    """Returns an attempt that uses the first two tools in order until one is sure.

    For users who mind neither cost nor time, where no tool fits, all experts vote: an unsure answer
    counts UNSURE.
    """
    preference = env.task.preference
    if preference.cost or preference.latency or not is_expert(order[0]):
        return use_until_sure(order[:2], env, seed)
    attempt, votes = RouterAttempt(env, seed), Counter()
    for offer in order:
        reading = _use(offer, attempt)
        if attempt.failed:
            break
        if reading.answer:
            votes[reading.answer] += 1 if reading.sure else UNSURE
            attempt.trajectory.answer = votes.most_common(1)[0][0]
    return attempt.finish()


def _use(offer: Offer, attempt: RouterAttempt) -> Reading:
    """Calls a tool, and a chain of records to its end; returns what it says about the question."""
    task, row = attempt.env.task, None
    while True:
        result = attempt.call(call_for(task, offer, row))
        if result.infrastructure:
            return Reading("failed")
        reading = read_result(task, offer, result)
        row = reading.next_row
        if row is None:
            return reading


# The desk: an attempt.


def play_program(program: Program, env: Environment, seed: int = 0) -> Trajectory:
    """Returns an attempt that a program of desk_programs.py plays."""
    attempt, result = RouterAttempt(env, seed), None
    try:
        while not attempt.failed:
            result = attempt.call(program.send(result))
    except StopIteration as end:
        attempt.trajectory.answer = end.value
    return attempt.finish()


# Other worlds: the experts on offer, and orders of them.


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


# Other worlds: an attempt.


def ask_until_two_agree(
    order: Sequence[OfferedExpert], env: Environment, seed: int = 0
) -> Trajectory:
    """Returns an attempt that asks experts in order until two answers agree, or a conversation."""
    attempt = RouterAttempt(env, seed)
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


def _converse(order: Sequence[OfferedExpert], attempt: RouterAttempt) -> None:
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
    attempt = RouterAttempt(env, seed)
    for place in env.scorer.effects:
        name, arguments = env.scorer.golden[place]
        if all(mentions(env.task.question, value) for value in arguments.values()):
            attempt.call(ToolCall(name, arguments))
    return _told(attempt, SAY["done"].format(""))


def do_nothing(env: DomainEnvironment, seed: int = 0) -> Trajectory:
    """Returns an attempt that refuses."""
    return _told(RouterAttempt(env, seed), SAY["refuse"])


def _told(attempt, message) -> Trajectory:
    """The attempt, after a last message to the user."""
    attempt.env.hear(message)
    attempt.trajectory.answer = message
    return attempt.finish()


CONTROLS = {"copier": copy_what_is_said, "nothing": do_nothing}


class RouterAttempt:
    """A router's attempt, one call a turn, within the user's hard limits."""

    def __init__(self, env: Environment, seed: int):
        self.env = env
        self.trajectory = Trajectory(env.task.id, seed)
        self._limits = UserLimits(env, self.trajectory, Price(0.0, 0.0))

    @property
    def failed(self) -> bool:
        """Whether the infrastructure has failed the attempt."""
        return self.trajectory.status == "infrastructure"

    def call(self, call: ToolCall) -> ToolResult:
        """Makes a call and records it as a turn."""
        (result,) = asyncio.run(self._limits.execute([call], 1))
        turn = Turn(0, 0, "stop")
        self.trajectory.turns.append(turn)
        self.trajectory.add_calls(turn, [call], [result])
        if result.infrastructure:
            self.trajectory.status = "infrastructure"
        return result

    def finish(self) -> Trajectory:
        """Returns the trajectory with its outcome; a failed one has none."""
        if not self.failed:
            score_answer(self.env, self.trajectory)
        return self.trajectory
