"""Programs for the desk, which a trained policy is measured against; `perfect` is its ceiling.

They are told which words are tables, and read the wish and the terms of the experts. A router
decides on the prompt: it asks about a matter that the question names, and answers with the number
in the first result otherwise. A program follows the results. Either is told the hidden skills of
the experts, or takes all experts for equally good. A call that a limit refuses ends it.
"""

from collections.abc import Callable
from functools import partial
from itertools import permutations

import numpy as np

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Task, ToolCall, Trajectory
from reward import task_rewards
from worlds.desk import (
    EXPERTS,
    SKILLS,
    STEP,
    SUBJECT,
    TABLES,
    UNSURE_IF_RIGHT,
    UNSURE_IF_WRONG,
    asked,
    named,
)
from worlds.programs import Play, Program

Skills = Callable[[str], dict[str, float]]  # the probability that an expert is right, by the word
ORDERS = [order for count in (1, 2, 3) for order in permutations(EXPERTS, count)]


def hidden(word: str) -> dict[str, float]:
    """Returns the skills of the experts at a matter, which no policy sees."""
    return {name: SKILLS[name][SUBJECT[word]] for name in EXPERTS}


def equal(word: str) -> dict[str, float]:
    """Returns the mean of the skills for all experts."""
    mean = np.mean([list(skills.values()) for skills in SKILLS.values()])
    return dict.fromkeys(EXPERTS, float(mean))


def route(env: Environment, skills: Skills) -> Program:
    """Plays a task as a router does: the prompt decides the call, the result is the answer."""
    words = asked(env.task.question)
    if words[0] in SUBJECT:
        return (yield from consult(env.task, words, skills, calls=0))
    result = yield step_for(words)
    return "" if result.error else named(result.content)[-1]


def follow(env: Environment, skills: Skills) -> Program:
    """Plays a task by what the results say."""
    words, calls = asked(env.task.question), 0
    while len(words) == 2 and (words[0] in TABLES or words[0].isdigit()):
        result = yield step_for(words)
        if result.error:
            return ""
        words, calls = named(result.content), calls + 1
    if words[0] in SUBJECT:
        return (yield from consult(env.task, words, skills, calls))
    return words[-1]


PROGRAMS: dict[str, Play] = {
    "router": partial(route, skills=equal),
    "oracle-router": partial(route, skills=hidden),
    "program": partial(follow, skills=equal),
    "perfect": partial(follow, skills=hidden),
}


def step_for(words: tuple[str, ...]) -> ToolCall:
    """Returns the call of a table and a row, or of two numbers to multiply."""
    first, second = words
    if first.isdigit():
        return ToolCall("python", {"code": f"{first} * {second}"})
    return ToolCall("records", {"table": first, "id": int(second)})


def consult(task: Task, words: tuple[str, ...], skills: Skills, calls: int) -> Program:
    """Asks experts in the order of the highest expected reward until one is sure.

    calls: how many look-ups were made before.
    """
    word, number = words
    rewards = expected_rewards(task, skills(word), calls)
    answer = ""
    for expert in ORDERS[int(np.argmax(rewards))]:
        result = yield ToolCall("ask", {"expert": expert, "question": f"{word} {number}"})
        if result.error:
            break
        confidence, answer = result.content.split(": ")
        if confidence == "sure":
            break
    return answer


def expected_rewards(task: Task, skills: dict[str, float], calls: int) -> np.ndarray:
    """Returns the expected reward of each of ORDERS, after a number of look-ups.

    Experts are asked in order until one is sure. A wrong answer earns 0.
    """
    attempts = []  # that end with the right answer: one for each expert of each order
    chances = []  # of each of them
    numbers = []  # of their orders
    for number, order in enumerate(ORDERS):
        reached, cents, seconds = 1.0, float(calls * STEP), float(calls * STEP)
        for expert in order:
            right, offer = skills[expert], task.data["offers"][expert]
            cents, seconds = cents + offer[0], seconds + offer[1]
            ends_right = right if expert is order[-1] else right * (1 - UNSURE_IF_RIGHT)
            attempts.append(
                Trajectory(task.id, 0, outcome=1.0, calls_usd=cents / 100, latency_s=seconds)
            )
            chances.append(reached * ends_right)
            numbers.append(number)
            reached *= right * UNSURE_IF_RIGHT + (1 - right) * UNSURE_IF_WRONG
    rewards = task_rewards(attempts, task.preference, task.bounds)
    return np.bincount(numbers, weights=chances * rewards)
