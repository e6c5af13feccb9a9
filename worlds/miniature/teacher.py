"""Demonstrations for the warm start, by a teacher that reads the prompt and chooses at random.

The teacher acts in a task's environment, so it reads the observations that the policy will read.
The warm start teaches the form of thoughts and calls and how to read; GRPO teaches the choice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.model import chat
from nanorchestra.records import Task
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.lessons import Lesson
from worlds.miniature.offers import (
    Offer,
    call_for,
    corpus,
    describe,
    fits,
    is_expert,
    read_result,
    title,
)
from worlds.miniature.tables import TRAIN
from worlds.miniature.world import World, environment

MAX_CALLS = 5
LOWEST = {"cheap": "price", "fast": "latency"}  # what a thought compares, by preference
KEEPS_BAN = 0.7  # probability of not even considering a forbidden tool
ACCEPTS_SURE, ACCEPTS_UNSURE = 0.85, 0.5  # probability of answering with what an expert said


def teach(env: ToolEnvironment, seed: int) -> list[Lesson]:
    """Returns the turns of one attempt, a function of the task of `env` and the seed.

    Every choice among the tools is drawn evenly, whatever the user wants; a tool that does not fit
    the question is among them one time in five, a forbidden one three times in ten.
    """
    task = env.task
    rng = random.Random(f"teacher/{task.id}/{seed}")
    left = [o for o in task.data["tools"] if is_expert(o) or fits(o, task) or rng.random() < 0.2]
    lessons, said, row, value, asked = [], [], None, "0", []
    for _ in range(MAX_CALLS):
        if row is None:
            allowed = [o for o in left if o["name"] not in task.preference.avoided]
            obeys = allowed and rng.random() < KEEPS_BAN
            offer = rng.choice(allowed if obeys else left)
            left.remove(offer)
            lowest = "lowest " if offer is lowest_expert(task, asked) else ""
            said += [consider(task, asked), f"use {lowest}{title(offer)}"]
            asked.append(offer["name"])
        call = call_for(task, offer, row)
        result = env.by_name[offer["name"]].call(call.arguments)
        lessons.append(Lesson(". ".join(said), call=call, result=result))
        reading = read_result(task, offer, result)
        said, value, row = [reading.thought], reading.answer or value, reading.next_row
        accepts = ACCEPTS_SURE if reading.sure else ACCEPTS_UNSURE
        if row is None and (not left or reading.answer is not None and rng.random() < accepts):
            break
    return [*lessons, Lesson(said[0], value)]


def consider(task: Task, asked: Sequence[str] = ()) -> str:
    """Returns the thought before a choice: what the prompt says about it.

    These are the preference; the tools not asked yet, each with the part of its description that
    matters to the user; for a user who minds cost or latency alone, the expert with the lowest that
    is not forbidden; a forbidden tool; and at the end, next to the choice, the kind of question.
    """
    data, avoided = task.data, task.preference.avoided
    lowest = lowest_expert(task, asked)
    stated = f"{data['difficulty']} " if data["kind"] == "knowledge" else ""
    left = [offer for offer in data["tools"] if offer["name"] not in asked]
    parts = [wish := data["wish"], ", ".join(_entry(offer, wish) for offer in left)]
    if lowest:
        parts.append(f"lowest {_entry(lowest, wish)}")
    parts += [f"not {title(offer)}" for offer in data["tools"] if offer["name"] in avoided]
    return ". ".join([*parts, f"a {stated}{data['subject']}"])


def lowest_expert(task: Task, asked: Sequence[str] = ()) -> Offer | None:
    """Returns the expert with the lowest price or latency of those neither asked nor forbidden.

    None for a user who does not mind one of the two alone.
    """
    key = LOWEST.get(task.data["wish"])
    out = {*asked, *task.preference.avoided}
    allowed = [o for o in task.data["tools"] if is_expert(o) and o["name"] not in out]
    return min(allowed, key=lambda offer: offer[key]) if key and allowed else None


def _entry(offer: Offer, wish: str) -> str:
    """The part of the description that matters to the user: "22c small tool-ka-fe" if cheap."""
    first = {"right": 2, "cheap": 1}.get(wish, 0)
    return " ".join(describe(offer).split()[first:])


def texts(world: World, count: int, sandbox: Sandbox) -> Iterator[str]:
    """Yields the corpus and `count` demonstrations as text, to train a tokenizer on."""
    yield from (fact["text"] for fact in corpus()[0])
    for task in world.tasks(TRAIN, count):
        env = environment(task, 0, sandbox)
        messages = list(env.messages)
        for lesson in teach(env, 0):
            message = {"role": "assistant", "content": lesson.content}
            message["reasoning_content"] = lesson.thought
            message["tool_calls"] = [vars(lesson.call)] if lesson.call else []
            messages.append(message)
            if lesson.result:
                messages.append({"role": "tool", "content": lesson.result.content})
        yield chat.render(messages, env.tools, add_generation_prompt=False)
