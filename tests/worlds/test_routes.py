"""Other ways to solve a task than the author's, and ways that must not be counted as solutions.

The agent here shares no code with the simulated experts: it leaves reads out and makes others,
tries what fails, asks and tells in words of its own, and gives numbers in other forms.
"""

from __future__ import annotations

import random

import pytest

from nanorchestra.records import Task, ToolCall
from worlds.toolscale.blueprint import BUILT_IN, build
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.pipeline import make_batch
from worlds.toolscale.user import wishes

WHO = (
    "Before we go on, who am I talking to? Please give me all the details that identify you.",
    "I have to verify who you are. Could you tell me your name and your other details?",
    "Could you identify yourself, please?",
)
SURE = (
    "I can do that for you: {}. Is that all right?",
    "So, to be sure: {}. Correct?",
    "Before I change anything, this is what I am going to do: {}. Shall I go ahead?",
    "May I make this change: {}? Please answer yes or no.",
    "You want this, do I understand correctly: {}?",
)
TOLD = ("You asked about that: the answer is {}.", "It comes to {}, as far as I see.", "Here: {}.")
MADE = ("I have done that for you.", "The change has been made.", "All set, that is done.")
SORRY = ("I am afraid our rules do not allow that.", "I'm sorry, I can't do that for you.")
MORE = ("Anything else?", "Is there something more that you need?")


class Agent:
    """Goes a way of its own through a task, which `rng` chooses."""

    def __init__(self, domain, task, rng):
        opening = wishes(task)[0].opening
        data = {"task": task, "experts": []}
        self.env = DomainEnvironment(domain, Task(task["id"], opening, data=data), 0)
        self.domain, self.task, self.rng = domain, task, rng
        self.needed = {
            name for rule in task.get("rules", ()) for name in rule["args"].get("first", ())
        }

    def say(self, texts, *words):
        if not self.env.over:
            return self.env.hear(self.rng.choice(texts).format(*words))

    def call(self, name, arguments):
        return self.env.do(ToolCall(name, arguments))

    def wander(self):
        """Makes calls that change nothing: reads again, reads that fail, a write that fails."""
        reads = [tool for tool in self.domain.tools if tool["kind"] == "read"]
        for tool in self.rng.sample(reads, 2):
            shapes = tool["function"]["parameters"]["properties"]
            self.call(tool["function"]["name"], {name: "nothing" for name in shapes})
        self.call("calculate", {"expression": "(2 + 3) * 7"})
        self.call(self.rng.choice(self.domain.tools)["function"]["name"], {"nothing": 1})

    def act(self, name, arguments):
        kind = self.domain.by_name[name]["kind"]
        if kind == "read" and name not in self.needed and self.rng.random() < 0.7:
            return
        if kind == "write":
            given = ", ".join(
                f"{key.replace('_', ' ')} {value}" for key, value in arguments.items()
            )
            self.say(SURE, f"{name.replace('_', ' ')} ({given})")
        self.call(name, arguments)

    def tell(self, info):
        if info.replace(".", "").isdigit():
            forms = (info, f"{float(info):,.2f}", f"${float(info):,.2f}", f"{float(info)} in all")
            info = self.rng.choice(forms)
        self.say(TOLD, info)

    def run(self, alter=lambda name, arguments: arguments, wording=lambda info: info):
        """Returns the score."""
        golden, planned = self.env.scorer.golden, wishes(self.task)
        effects = set(self.env.scorer.effects)
        in_wishes = {place for wish in planned for place in wish.actions}
        self.say(WHO)
        for place in sorted(set(range(len(golden))) - in_wishes):
            self.act(*golden[place])
        for at, wish in enumerate(planned):
            self.wander()
            if wish.first and wish.say not in str(self.env.history):
                self.say(SURE, wish.first)
            later = [other for other in planned[at + 1 :] if other.actions == wish.actions]
            for place in wish.actions if not later else ():  # a wish that says what it wants
                name, arguments = golden[place]
                self.act(name, alter(name, arguments) if place in effects else arguments)
            for info in wish.communicate_info if not later else ():
                self.tell(wording(info))
            if self.env.user.at == at:
                otherwise = MORE if wish.communicate_info else SORRY
                self.say(MADE if effects & {*wish.actions} else otherwise)
            while self.env.user.at == at and not self.env.over:
                self.say(MORE)
        return self.env.score("") if self.env.over else 0.0


@pytest.fixture(scope="module", params=BUILT_IN)
def batch(request):
    tasks = make_batch(3, (1, 2, 3, 4, 5), request.param, 1)["tasks"]
    return build(request.param, 3)[0], tasks


def test_other_routes_to_the_same_end_are_solutions(batch):
    domain, tasks = batch
    scores = [Agent(domain, task, random.Random(task["id"])).run() for task in tasks]
    wrong = [task["id"] for task, score in zip(tasks, scores, strict=True) if not score]
    assert len(wrong) <= 0.02 * len(tasks), wrong


def test_what_is_altered_left_out_or_untold_is_no_solution(batch):
    domain, tasks = batch
    for task in tasks[::2]:

        def run(**how):
            return Agent(domain, task, random.Random(task["id"])).run(**how)  # noqa: B023

        if task["evaluation_criteria"]["communicate_info"]:
            assert not run(wording=lambda info: " ".join(map(str, range(300))))
        agent = Agent(domain, task, random.Random(0))
        if agent.env.scorer.effects:
            assert not run(alter=lambda name, arguments: {})
        if agent.env.scorer.effects or agent.env.scorer.communicate_info:
            while not agent.env.over:
                agent.say(SORRY)
            assert not agent.env.score("")
