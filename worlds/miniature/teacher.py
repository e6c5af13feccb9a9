"""Demonstrations for the warm start, by a teacher that reads the prompt and chooses at random.

The teacher acts in a task's environment, so it reads the observations that the policy will read.
The warm start teaches the form of thoughts and calls and how to read; GRPO teaches the choice.
"""

import random
from collections.abc import Sequence

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.world import Lesson
from nanorchestra.records import Task
from worlds.miniature.offers import (
    Offer,
    call_for,
    describe,
    fits,
    is_expert,
    read_result,
    title,
)

MAX_CALLS = 5
LOWEST = {"cheap": "price", "fast": "latency"}  # what a thought compares, by preference
NO_TOOL = "no tool"  # the answer of the teacher where none is on offer
ACCEPTS_SURE, ACCEPTS_UNSURE = 0.85, 0.5  # probability of answering with what an expert said


def teach(env: ToolEnvironment, seed: int) -> list[Lesson]:
    """Returns the turns of one attempt, a function of the task of `env` and the seed.

    Every choice among the allowed tools is drawn evenly, whatever the user wants; a tool that does
    not fit the question is among them one time in five.
    """
    task = env.task
    rng = random.Random(f"teacher/{task.id}/{seed}")
    options = [o for o in allowed(task) if is_expert(o) or fits(o, task) or rng.random() < 0.2]
    lessons, thoughts, row, value, asked = [], [], None, "0", []
    for _ in range(MAX_CALLS):
        if row is None:
            offer = options.pop(rng.randrange(len(options)))
            thoughts.append(f"{consider(task, asked)} {title(offer)}")
            asked.append(offer["name"])
        call = call_for(task, offer, row)
        result = env.by_name[offer["name"]].call(call.arguments)
        lessons.append(Lesson(". ".join(thoughts), call=call, result=result))
        reading = read_result(task, offer, result)
        thoughts, value, row = [reading.thought], reading.answer or value, reading.next_row
        if row is None:  # whether the user wants another call depends on the preference
            thoughts = [f"{task.preference.name} {reading.thought}"]
        accepts = ACCEPTS_SURE if reading.sure else ACCEPTS_UNSURE
        if row is None and (not options or reading.answer is not None and rng.random() < accepts):
            break
    return [*lessons, Lesson(thoughts[0], value)]


def consider(task: Task, asked: Sequence[str] = ()) -> str:
    """Returns the thought before a choice: what the prompt says about it.

    These are the preference; the forbidden tool; the tools that are allowed and not asked yet, each
    with its price or latency if the user minds it; the expert with the lowest, for a user who minds
    one of the two alone; and the kind of question, after its difficulty or the table where a chain
    begins. The choice follows it without a word between.
    """
    preference, left = task.preference.name, allowed(task, asked)
    parts = [*_wish(task), ", ".join(_entry(offer, preference) for offer in left)]
    experts = [offer for offer in left if is_expert(offer)]
    if preference in LOWEST and experts:
        lowest = min(experts, key=lambda offer: offer[LOWEST[preference]])
        parts.append("lowest " + lowest["what"])
    return ". ".join([*parts, f"use for {_about(task)}"])


def read(task: Task) -> Lesson:
    """Returns the turn of a teacher that has no tool: it says what the user wants and asks."""
    return Lesson(". ".join([*_wish(task), f"use for {_about(task)}"]), NO_TOOL)


def _wish(task) -> list[str]:
    """The preference and the kinds of the forbidden tools: "fast", "not code"."""
    avoided = task.preference.avoided
    bans = [f"not {offer['what']}" for offer in task.data["tools"] if offer["name"] in avoided]
    return [task.preference.name, *bans]


def _about(task) -> str:
    """The kind of question, after its difficulty or the table where a chain begins."""
    about = task.data["subject"]
    if task.kind == "knowledge":
        return f"{task.data['difficulty']} {about}"
    if task.kind == "chain":
        return f"{task.data['solution'][0]} {about}"
    return about


def allowed(task: Task, asked: Sequence[str] = ()) -> list[Offer]:
    """Returns the tools on offer that the user did not forbid, but for those already asked."""
    out = {*asked, *task.preference.avoided}
    return [offer for offer in task.data["tools"] if offer["name"] not in out]


def _entry(offer: Offer, preference: str) -> str:
    """Kind and what matters of an offer to the user: "22c small" if cheap, "small" if right."""
    latency, price, kind, _ = describe(offer).split()
    minded = {"right": [], "cheap": [price], "fast": [latency]}.get(preference, [latency, price])
    return " ".join([*minded, kind])
