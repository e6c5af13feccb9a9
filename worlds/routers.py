"""Fixed strategies that a trained policy must beat; `perfect` is the ceiling of the miniature.

A router gives the order of the tools to use; they are used until one is sure. Routers play in the
same environments as the policy and are scored and billed in the same way, but pay for no tokens of
their own. Outside the miniature the strongest expert is the most expensive one, the cascade ends
when two answers agree, and in a conversation the first expert does every turn, and after an error
the next.
"""

import asyncio
import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations
from typing import Any

from nanorchestra.agent.environment import Environment, score_answer
from nanorchestra.agent.limits import UserLimits
from nanorchestra.agent.load import NANO
from nanorchestra.errors import require
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Price, Task, ToolCall, Trajectory, Turn
from nanorchestra.tools.roles import final_answer
from tools import Skill
from worlds.evaluation import finished, score
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
from worlds.miniature.tables import PREFERENCES, SPECIALISTS
from worlds.toolscale.environment import EXPERT

TRAINED, VOTE = "regression", "vote"
UNSURE = 0.2  # what an answer counts in a vote that an expert is not sure of
LESSONS = 2000  # training tasks at most that the trained router learns from, one expert each
AT_ONCE = 16
AVERAGE_WISH = [  # weights of outcome, cost and latency over all users
    sum(share * weights[i] / sum(weights) for share, weights in PREFERENCES.values())
    for i in range(3)
]
TURNS = 40  # of a conversation at most
STRENGTHS = ("small", *SPECIALISTS.values(), "medium", "large")


@dataclass
class Router:
    """Plays attempts, as a Rollout does, with the offers `order(task)`.

    With `votes`, users who mind neither cost nor latency get the answer that most tools gave, but
    where a tool fits the question.
    """

    order: Callable[[Task], Sequence[Offer]]
    votes: bool = False

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one scored attempt in each environment."""
        tokenizer = Tokenizer.from_dir(NANO)
        for env in environments:
            env.evidence.tokenizer = tokenizer  # counts what an expert of a published role reads
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = (self.order(env.task) for env in environments)
            return list(pool.map(partial(play, votes=self.votes), found, environments, seeds))


def routers_of(worlds: Any, seed: int) -> dict[str, Router]:
    """Returns the routers of worlds.mixture.Worlds by name; `seed` is that of random choices.

    The trained one is among them if scikit-learn is installed. Without experts there are none.
    """
    first, known = worlds.held_out(1)[0], {}
    orders = plain_orders if worlds.domains else miniature_orders
    if not offers(first):
        return {}

    def order(name, task):
        if task.id not in known:
            known[task.id] = orders(task, random.Random(f"router/{task.id}/{seed}"))
        return known[task.id][name]

    @cache
    def best():
        return _learn(worlds, seed)

    found = {
        name: Router(partial(order, name), name == VOTE) for name in orders(first, random.Random())
    }
    if importlib.util.find_spec("sklearn"):
        found[TRAINED] = Router(lambda task: best()(task))
    return found


def _learn(worlds, seed):
    """Returns the choice of the expert that is right most probably, by a logistic regression.

    Each training task shows one random expert. The features are the expert, and its pairs with the
    words of the question.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    most = [len(world.splits["train"]) for world in worlds.domains.values()]
    tasks = worlds.tasks(min([LESSONS, *most]), 0)
    drawn = {task.id: [random.Random(task.id).choice(offers(task))] for task in tasks}
    environments = [worlds.environment(task, seed) for task in tasks]
    tried = Router(lambda task: drawn[task.id]).run(environments, range(len(tasks)))
    pairs = finished(zip(tasks, tried, strict=True))
    texts = [_words(task, *drawn[task.id]) for task, _ in pairs]
    model = make_pipeline(CountVectorizer(token_pattern=r"\S+"), LogisticRegression(max_iter=1000))
    model.fit(["", "", *texts], [False, True, *(attempt.outcome == 1 for _, attempt in pairs)])

    def best(task):
        found = offers(task)
        chances = model.predict_proba([_words(task, offer) for offer in found])[:, 1]
        return [found[chances.argmax()]]

    return best


def play(
    order: Sequence[Offer], env: Environment, seed: int = 0, votes: bool = False
) -> Trajectory:
    """Returns one scored attempt that uses tools in order until one is sure, or `votes` (Router).

    A chain of records is followed to its end, as a conversation is; anything else is one call.
    Offers of other worlds than the miniature state the `arguments` of their call.
    """
    task, said, talks, given = env.task, [], hasattr(env, "over"), Counter()
    wish = task.preference
    votes = votes and not (wish.cost or wish.latency or fits(order[0], task))
    trajectory = Trajectory(task.id, seed)
    limits = UserLimits(env, trajectory, Price(0.0, 0.0))
    for offer in order:
        row, name, known = None, offer["name"], offer.get("arguments")
        while True:
            call = call_for(task, offer, row) if known is None else ToolCall(name, known)
            (result,) = asyncio.run(limits.execute([call], 1))
            trajectory.turns.append(Turn(0, 0, "stop", [call], [result]))
            trajectory.count_calls(trajectory.turns[-1])
            if result.infrastructure:
                trajectory.status = "infrastructure"
                return score(task, trajectory)
            if known is None:
                reading = read_result(task, offer, result)
            else:
                said.append(normalise(final_answer(result.content)))
                failed = result.error or talks and "Error: " in result.content
                sure = env.over if talks else not failed and said.count(said[-1]) > 1
                again = talks and not sure and len(said) < TURNS
                again &= not failed or offer is order[-1]
                reading = Reading("", result.content, sure, ("", 0) if again else None)
            row = reading.next_row
            if row is None:
                break
        given[reading.answer or ""] += 1 if reading.sure else UNSURE
        trajectory.answer = max(given, key=given.get) if votes else reading.answer or ""
        if reading.sure and not votes:
            break
    score_answer(env, trajectory)
    return score(task, trajectory)


def miniature_orders(task: Task, rng: random.Random) -> dict[str, Sequence[Offer]]:
    """Returns the tools that each router uses, in order; docs/worlds.md describes the routers."""
    usable, allowed = _usable(task)
    by_price = sorted(filter(is_expert, usable), key=lambda offer: offer["price"])
    shuffled = rng.sample(usable, len(usable))
    plans = [plan for length in (1, 2, 3) for plan in permutations(allowed, length)]
    by_wish = sorted(allowed, key=lambda offer: _rank(task, offer))
    return {
        "strongest": [max(by_price, key=_strength)],
        "cheapest": by_price[:1],
        "cascade": by_price,
        "random": shuffled[:1],
        "teacher": [offer for offer in shuffled if offer in allowed],
        "sense": by_wish[:1],
        "until_sure": by_wish,
        VOTE: by_wish,
        "no_wish": informed_order(_deaf(task, *AVERAGE_WISH))[:2],
        "no_prices": informed_order(_deaf(task, 1.0, 0.0, 0.0))[:2],
        "informed": informed_order(task)[:2],
        "perfect": max(plans, key=lambda plan: _expected_reward(task, plan)),
    }


def plain_orders(task: Task, rng: random.Random) -> dict[str, Sequence[Offer]]:
    """Returns the experts that each router uses outside the miniature. UserError without any."""
    found = sorted(offers(task), key=lambda offer: offer["price"])
    require(found, f"task {task.id} offers no expert, which a router needs")
    return {
        "strongest": found[-1:],
        "cheapest": found[:1],
        "random": [rng.choice(found)],
        "cascade": found,
    }


def informed_order(task: Task) -> list[Offer]:
    """Returns the tools from the highest expected reward of a single call down.

    It looks up the hidden skills, which are the same in all tasks, so that a policy can learn them.
    """
    _, allowed = _usable(task)
    return sorted(allowed, key=lambda offer: -_expected_reward(task, [offer]))


def _usable(task):
    """The tools that can answer, and those of them that the user did not forbid; all if none."""
    usable = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    allowed = [offer for offer in usable if offer["name"] not in task.preference.avoided]
    return usable, allowed or usable


def _deaf(task, *weights):
    """The task as one sees it who reads a ban, but whose wish has other weights."""
    bans = dict.fromkeys(task.preference.tools, -sum(weights))
    return replace(task, preference=Preference(task.preference.text, *weights, bans))


def _rank(task, offer):
    """Orders tools by what the prompt says: the fitting tool, then as the user's wish."""
    tools, wish = task.data["tools"], task.data["wish"]
    price = offer["price"] / max(tool["price"] for tool in tools)
    latency = offer["latency"] / max(tool["latency"] for tool in tools)
    specialist = offer["what"] == SPECIALISTS.get(task.data["subject"])
    badness = {
        "right": -len(STRENGTHS) if specialist else -_strength(offer),
        "cheap": price,
        "fast": latency,
        "balanced": price + latency,
    }
    return not fits(offer, task), badness[wish]


def _strength(offer):
    """The place of an expert among those that names suggest to be weaker."""
    return STRENGTHS.index(offer["what"]) if is_expert(offer) else 0


def _expected_reward(task, plan):
    """The expected reward of using tools in order until one is sure. A wrong answer earns 0."""
    data, reached, expected = task.data, 1.0, 0.0
    attempt = Trajectory(task.id, 0, outcome=1.0)
    for offer in plan:
        calls = len(data["tables"]) if offer["what"] == "records" else 1
        attempt.cost_usd += expected_cost(offer, data["difficulty"]) * calls
        attempt.latency_s += offer["latency"] * calls
        attempt.calls[offer["name"]] = calls
        known = Skill(1.0, 0.0, 0.0)
        if is_expert(offer):
            known = skill(offer["what"], data["subject"], data["difficulty"])
        unsure = known.right * known.unsure_if_right
        ends = known.right if offer is plan[-1] else known.right - unsure
        expected += reached * ends * score(task, attempt).reward
        reached *= unsure + (1 - known.right) * known.unsure_if_wrong
    return expected


def _words(task, offer):
    return " ".join(f"{offer['what']}/{word}" for word in ("", *task.question.split()))


def offers(task: Task) -> list[Offer]:
    """Returns the experts that can answer, or in a conversation do a turn."""
    found = [offer for offer in task.data["tools"] if "price" in offer and is_expert(offer)]
    for expert in task.data.get("experts", ()):
        call = {"name": EXPERT, "arguments": {"expert": expert["alias"]}}
        found.append(call | {"what": expert["model"], "price": sum(expert["usd"])})
    for tool in task.data["tools"]:
        for alias, model in tool.get("models", {}).items():
            if tool["name"] in (alias, "answer"):
                call = {"model": alias} if tool["name"] != alias else {}
                price = {"what": model["what"], "price": sum(model["usd"])}
                found.append({"name": tool["name"], "arguments": call} | price)
    return found
