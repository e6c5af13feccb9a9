"""Refines proved tasks by language models: says them in other words, and tries how hard they are.

A text in other words is kept if its task is still proved, if it has the numbers and names of the
plain text, and if a second call finds the same wishes in it, among others. So no task is wrong
whatever a model writes.
"""

import copy
import json
import random
import re
import sys
from collections import Counter, defaultdict
from contextlib import suppress

from tqdm import tqdm

from nanorchestra.agent.attempts import play
from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.threads import in_daemons
from nanorchestra.files import merge
from nanorchestra.schemas import Json
from nanorchestra.tools.models import Expert
from nanorchestra.tools.spending import Spending
from worlds.policies import Policy, parse
from worlds.toolscale.dataset import DomainWorld
from worlds.toolscale.domain import Domain
from worlds.toolscale.verify import verify
from worlds.toolscale.words import communicated

REPLY_TOKENS = 8192  # of a language model, its reasoning included
TEXTS = 16  # that are asked for at a time
TASKS = 4  # that a solver tries at a time
ATTEMPTS = 8  # of a solver at a task
DECOYS = 3  # tasks whose wishes stand beside those of a text
KEPT = "said in other words"
NUMBER = re.compile(r"\w*\d(?:[\w:.,-]*\w)?")
NAME = re.compile(r"(?<=[\w,] )[A-Z]\w+")
MANNERS = (
    "in a few dry words",
    "politely and at length",
    "in a hurry",
    "chattily",
    "hesitantly",
    "in an annoyed tone",
    "in plain, friendly words",
)
REWORD = """What a customer of a service desk wants, as it is told to an actor who plays the \
customer:

{text}

Tell the actor the same in other words, {manner}. Begin with "You". Keep each wish, each condition \
and what is wanted otherwise, each question, and their order. Keep every number, day, time, name \
and code as it is written. Add no wish, no fact and no number. Answer with the text alone."""
FIND = """What a customer of a service desk wants:

{text}

Which of these sentences say what the customer wants? A sentence does if all that it says is \
wanted, under the same condition if it has one, and if it leaves out no condition, no question and \
nothing that is wanted otherwise.

{sentences}

Answer with a JSON list of the numbers of these sentences, and nothing else."""


def endpoint(text: str, option: str) -> Policy:
    """Returns the policy MODEL@URL that an option names. UserError."""
    policy = parse(text, (), option)
    if not policy.priced:
        known = "no price of it is known, and --max-usd does not bound it"
        right = "add :input=X:output=X, $ per million tokens"
        print(f"{option} {text}: {known}; {right}", file=sys.stderr)
    return policy


def language_model(text: str, option: str, payee: str, spending: Spending) -> Expert:
    """Returns the language model MODEL@URL that an option names; the bill has it as `payee`."""
    policy = endpoint(text, option)
    rollout, name = policy.load(spending, 1), policy.base.partition("@")[0]
    settings = {"reasoning": True, "max_tokens": REPLY_TOKENS, "listed_as": payee}
    return Expert("the model", rollout.server, name, rollout.endpoint_price, spending, **settings)


# Other words.


def reword(domains: dict[str, Domain], tasks: list[Json], expert: Expert) -> Counter[str]:
    """Puts texts in other words into the tasks; returns what came of how many.

    Raises EndpointError.
    """
    texts = defaultdict(list)
    for task in tasks:
        texts[task["domain"]].append(_text(task))

    def work(task):
        return _reworded(domains[task["domain"]], task, texts[task["domain"]], expert)

    outcomes = Counter()
    done = in_daemons(work, tasks, TEXTS)
    shown = tqdm(done, "other words", len(tasks), unit="task", disable=None)
    for place, (task, outcome) in enumerate(shown):
        tasks[place] = task
        outcomes[outcome] += 1
    return outcomes


def _reworded(domain, task, texts, expert) -> tuple[Json, str]:
    """Returns the task in other words and KEPT, or as it is and why.

    `texts` are those of the domain's tasks. Raises EndpointError.
    """
    plain, rng = _text(task), random.Random(f"{task['id']}/words")
    asked = REWORD.format(text=plain, manner=rng.choice(MANNERS))
    text = " ".join(_answer(expert, asked).split())
    other = merge(task, {"user_scenario": {"instructions": {"reason_for_call": text}}})
    told = NUMBER.findall(plain)
    if not all(communicated(each, [text]) for each in told + NAME.findall(plain)):
        return task, "a number or a name is missing"
    if not {*NUMBER.findall(text)} <= {*told}:
        return task, "a number is added"
    if problem := verify(domain, other):
        return task, problem
    wanted = _wishes(plain)
    sentences = {*wanted, *map(_bare, wanted)}
    for decoy in rng.sample(texts, min(DECOYS, len(texts))):
        sentences.update(_wishes(decoy))
    sentences = rng.sample(sorted(sentences), len(sentences))
    listed = "\n".join(f"{number}. {each}" for number, each in enumerate(sentences, 1))
    found = _numbers(_answer(expert, FIND.format(text=text, sentences=listed)))
    if found != {number for number, each in enumerate(sentences, 1) if each in wanted}:
        return task, "other wishes are found in the text"
    return other, KEPT


def _text(task) -> str:
    return task["user_scenario"]["instructions"]["reason_for_call"]


def _answer(expert, text) -> str:
    """Returns what a language model answers, "" if nothing. Raises EndpointError."""
    result = expert.ask(text, "the model")
    if result.infrastructure:
        raise EndpointError(result.content.removeprefix("Error: "))
    return "" if result.error else result.content


def _wishes(text) -> list[str]:
    """Returns the wishes of a plain text, with their conditions and questions."""
    return re.split(r" (?=You (?:want|were about) to )", text)


def _bare(wish) -> str:
    """Returns a wish without its conditions and questions."""
    return re.split(r", but |[.?](?: |$)", wish)[0] + "."


def _numbers(answer) -> set[int]:
    """Returns the numbers of the last JSON list in an answer; none if it has no such list."""
    with suppress(LookupError, ValueError, TypeError):
        return {*json.loads(re.findall(r"\[[^\[\]]*\]", answer)[-1])}
    return set()


# How hard.


def solved(
    domains: dict[str, Domain],
    tasks: list[Json],
    solver: Policy,
    spending: Spending,
) -> list[float]:
    """Returns the share of ATTEMPTS at each task that succeed.

    A solver has the tools of the domain and no expert, and the script plays the users. Raises
    EndpointError.
    """
    alone = {"experts": [], "preference": {}}
    splits = {"train": [task | alone for task in tasks]}
    world, player = DomainWorld(splits, domains), solver.load(spending, ATTEMPTS)

    def work(place):
        task, own = world.task("train", place), copy.copy(player)  # one plays a group at a time

        def environment(attempt):
            return solver.environment(world, task, attempt)

        attempts, _ = play(own, environment, range(ATTEMPTS), lambda: spending.problem)
        played = [each.outcome > 0 for each in attempts if not each.failure]
        if not played:
            raise EndpointError(attempts[0].failure)
        return sum(played) / len(played)

    done = in_daemons(work, range(len(tasks)), TASKS)
    return list(tqdm(done, "solver", len(tasks), unit="task", disable=None))
