"""Fixed routers for any world: strongest, cheapest, cascade, random, and one that is trained.

They call experts and pay for no tokens of their own. The strongest expert is the most expensive.
The cascade goes from the cheapest up until two answers agree. In a conversation the first expert
does every turn, and after an error the next. The miniature's are those of worlds/routers.py.
"""

from __future__ import annotations

import importlib.util
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from nanorchestra.errors import require
from nanorchestra.records import Task
from worlds.miniature.offers import Offer, is_expert
from worlds.mixture import Worlds
from worlds.routers import orders, play
from worlds.toolscale.environment import EXPERT

TRAINED = "regression"
LESSONS = 2000  # training tasks at most that the trained router learns from, one expert each
AT_ONCE = 16


class Routers:
    """The routers of a world, by `names`. `seed` is that of random choices.

    The trained one is among them if scikit-learn is installed.
    """

    def __init__(self, worlds: Worlds, seed: int):
        self.worlds, self.seed, self._orders = worlds, seed, {}
        first = worlds.held_out(1)[0]
        trained = [TRAINED] if importlib.util.find_spec("sklearn") else []
        self.names = [*self.orders(first), *trained] if offers(first) else []

    def orders(self, task: Task) -> dict[str, Any]:
        """Returns the offers that each router uses."""
        if task.id not in self._orders:
            rng = random.Random(f"router/{task.id}/{self.seed}")
            found = sorted(offers(task), key=lambda offer: offer["price"])
            require(found, f"task {task.id} offers no expert, which a router needs")
            ends = {"strongest": found[-1:], "cheapest": found[:1], "random": [rng.choice(found)]}
            ends["cascade"] = found
            self._orders[task.id] = ends if self.worlds.domains else orders(task, rng)
        return self._orders[task.id]

    def load(self, name: str) -> Any:
        """Returns the player of a router: `run(environments, seeds)`."""
        if name == TRAINED:
            return _player(self._learn())
        return _player(lambda task: self.orders(task)[name])

    def _learn(self):
        """Returns the choice of the expert that is right most probably, by a logistic regression.

        Each training task shows one random expert. The features are the expert, and its pairs with
        the words of the question.
        """
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        most = [len(world.splits["train"]) for world in self.worlds.domains.values()]
        tasks = self.worlds.tasks(min([LESSONS, *most]), 0)
        drawn = {task.id: [random.Random(task.id).choice(offers(task))] for task in tasks}
        environments = [self.worlds.environment(task, self.seed) for task in tasks]
        tried = _player(lambda task: drawn[task.id]).run(environments, range(len(tasks)))
        texts = [_words(task, *drawn[task.id]) for task in tasks]
        model = make_pipeline(
            CountVectorizer(token_pattern=r"\S+"), LogisticRegression(max_iter=1000)
        )
        model.fit(["", "", *texts], [False, True, *(attempt.outcome == 1 for attempt in tried)])

        def best(task):
            found = offers(task)
            chances = model.predict_proba([_words(task, offer) for offer in found])[:, 1]
            return [found[chances.argmax()]]

        return best


def _player(order):
    def run(environments, seeds, *_):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(play, (order(e.task) for e in environments), environments, seeds))

    return SimpleNamespace(run=run)


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
