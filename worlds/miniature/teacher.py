"""Demonstrations for the warm start, by a careless teacher that reasons before it chooses.

The teacher acts in a task's environment, so it reads the observations that the policy will read.
Its choices are mediocre on purpose: the warm start teaches the form of thoughts and calls, and GRPO
the choice.
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
    fits,
    is_expert,
    objections,
    plain_choice,
    read_result,
    title,
)
from worlds.miniature.tables import TRAIN
from worlds.miniature.world import World, environment

MAX_CALLS = 5
# Probabilities: of `plain_choice` instead of a random tool, of obeying a ban, of giving up at once.
SENSIBLE, OBEYS, QUITS = 0.7, 0.2, 0.15


def teach(env: ToolEnvironment, seed: int) -> list[Lesson]:
    """Returns the turns of one attempt, a function of the task of `env` and the seed.

    A ban is obeyed in a whole attempt or ignored, though always noted. The teacher accepts an
    unsure answer half of the time, and checks a sure one with another tool three times in ten.
    """
    task = env.task
    rng = random.Random(f"teacher/{task.id}/{seed}")
    usable = [o for o in task.data["tools"] if is_expert(o) or fits(o, task) or rng.random() < 0.2]
    obeys = rng.random() < OBEYS
    if obeys:
        usable = [o for o in usable if o["name"] not in task.preference.avoided] or usable
    if rng.random() < QUITS:
        return [Lesson(f"{consider(task)}. Quit", "unknown")]
    lessons, said, row, value, left = [], [], None, "0", list(usable)
    for _ in range(MAX_CALLS):
        if row is None:
            said.append(consider(task, [o["name"] for o in usable if o not in left]))
            sensible = rng.random() < SENSIBLE
            offer = plain_choice(task, left, rng, obeys) if sensible else rng.choice(left)
            left.remove(offer)
        call = call_for(task, offer, row)
        result = env.by_name[offer["name"]].call(call.arguments)
        lessons.append(Lesson(". ".join([*said, find(task, offer)]), call=call, result=result))
        reading = read_result(task, offer, result)
        said, value, row = [reading.thought], reading.answer or value, reading.next_row
        if row is None and (
            not left or reading.answer is not None and rng.random() < (0.7 if reading.sure else 0.5)
        ):
            break
    return [*lessons, Lesson(said[0], value)]


def consider(task: Task, asked: Sequence[str] = ()) -> str:
    """Returns the thought before a choice.

    It states the question, the preference, the ban, the objections to each tool, and the tools
    left: the tools without objections, or else those that are expensive or slow at worst.
    """
    data, avoided = task.data, task.preference.avoided
    topic = data["kind"]
    if topic == "knowledge":
        topic = f"{data['difficulty']} {data['subject']}"
    bans = "".join(f", avoid {o['what']}" for o in data["tools"] if o["name"] in avoided)
    against = {offer["what"]: objections(task, offer, asked) for offer in data["tools"]}
    listed = ", ".join(" ".join([what, *reasons]) for what, reasons in against.items())
    left = [what for what, reasons in against.items() if not reasons]
    left = left or [what for what, reasons in against.items() if set(reasons) <= {"dear", "slow"}]
    return f"{topic}. {data['wish']}{bans}. {listed}. left {' '.join(left) or 'none'}"


def find(task: Task, offer: Offer) -> str:
    """Returns the thought that finds the chosen tool's name: "Small: large, medium, small io".

    It walks the kinds in the order of the prompt up to the choice, which an induction head can
    follow.
    """
    tools = task.data["tools"]
    passed = [other["what"] for other in tools[: tools.index(offer)]]
    return f"{offer['what'].capitalize()}: {', '.join([*passed, title(offer)])}"


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
