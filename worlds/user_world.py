"""Environments of a user's own: a Python file with one class, whose methods are the tools.

    class Countdown:
        def reset(self, seed: int) -> str:            # the question, drawn from the seed alone
        def add(self, a: int, b: int) -> int:         # a public method is a tool
            '''Adds two numbers.'''
        def reward(self, answer: str) -> float:       # optional: the outcome, 0 to 1

docs/worlds.md has a complete one. An attempt has an instance of its own. `reset` may return a
dictionary with "question", and "preference" (a line such as "Be cheap. cost=1"), "bounds" (the most
US dollars and seconds of an attempt) and "kind". Without `reward` the answer is compared with the
attribute `answer`.
"""

import inspect
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.world import Split
from nanorchestra.errors import UserError, WorldError, require
from nanorchestra.files import import_file, own_code, read_text
from nanorchestra.records import Bounds, Preference, Task
from nanorchestra.tools.functions import FunctionTool, tool
from nanorchestra.validation import Number, Text, validated
from worlds.judge import grade
from worlds.preferences import worded

RESERVED = ("reset", "reward")  # methods that are no tools
Most = Annotated[Number, Field(ge=0)]


class Stated(TypedDict, total=False):
    """What reset returns; `bounds` are the most US dollars and seconds of an attempt."""

    question: Required[Text]
    preference: str
    kind: str
    bounds: tuple[Most, Most]


@dataclass(frozen=True)
class UserWorld:
    """The tasks of a user's class, without end. `name` is its file's path, `source` its text."""

    name: str
    source: str
    kind: type
    seed: int

    def size(self, split: Split) -> None:
        """Returns None: every seed is another task."""

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of one seed; "all" is "held_out"."""
        part = "train" if split == "train" else "held_out"
        seed = random.Random(f"{self.seed}/{part}/{index}").getrandbits(32)
        instance, stated = self._begun(seed)
        tools = self._tools(instance)
        names = [each.name for each in tools]
        where = f"{self.name}: {self.kind.__name__}.reset: preference"
        preference = worded(Preference.parse(stated.get("preference", ""), where))
        preference.check_names(where, names)
        usd, seconds = stated.get("bounds", (0.0, 0.0))
        bounds = Bounds((0.0, usd), (0.0, seconds))
        require(
            usd or not preference.cost,
            f"{where} weighs cost; state the most that an attempt may cost: bounds: (usd, seconds)",
        )
        require(
            seconds or not preference.latency,
            f"{where} weighs latency; state the most that an attempt may last: bounds: (usd, "
            "seconds)",
        )
        return Task(
            f"{Path(self.name).stem}-{part}-{self.seed}-{index}",
            stated["question"],
            preference,
            bounds=bounds,
            world=self.name,
            kind=stated.get("kind", self.kind.__name__),
            offers={name: name for name in names},
            data={"seed": seed, "split": part},
        )

    def environment(self, task: Task, seed: int) -> "UserEnvironment":
        """Returns one attempt at a task; its instance has no use for `seed`."""
        instance, _ = self._begun(task.data["seed"])
        return UserEnvironment(task, self._tools(instance), instance, self.name)

    def _begun(self, seed) -> tuple[Any, Stated]:
        """Returns a new instance at a seed, and what its reset says. UserError."""
        where = f"{self.name}: {self.kind.__name__}.reset"

        def begin():
            instance = self.kind()
            return instance, instance.reset(seed)

        instance, stated = own_code(begin, where, self.name)
        if isinstance(stated, str):
            stated = {"question": stated}
        return instance, validated(Stated, stated, where)

    def _tools(self, instance) -> list[FunctionTool]:
        """Returns the methods of an instance that are tools. UserError.

        These are public and of the class itself; static, class and inherited ones are none.
        """
        tools = []
        for name, value in vars(self.kind).items():
            if name.startswith("_") or name in RESERVED or not inspect.isfunction(value):
                continue
            try:
                tools.append(tool(getattr(instance, name)))
            except UserError as error:
                raise UserError(f"{self.name}: {self.kind.__name__}: {error}") from None
        return tools


class UserEnvironment(ToolEnvironment):
    """One attempt at a task of a user's class; `instance` is its state."""

    blocking = True

    def __init__(self, task: Task, tools: list[FunctionTool], instance: Any, file: str):
        super().__init__(task, tools)
        self.instance, self.file = instance, file

    def score(self, answer: str) -> float:
        """Returns what `reward` says of the answer. UserError for what is no outcome."""
        instance, where = self.instance, f"{self.file}: {type(self.instance).__name__}"
        if not hasattr(instance, "reward"):
            right = "give the class a method reward(answer), or an attribute answer in reset"
            if not hasattr(instance, "answer"):
                raise WorldError(f"{where}: no reward and no answer; {right}")
            return grade(self.task.question, str(instance.answer), answer)[0]
        outcome = own_code(lambda: float(instance.reward(answer)), f"{where}.reward", self.file)
        if not 0 <= outcome <= 1:
            raise WorldError(f"{where}.reward: it returned {outcome}; it must be from 0 to 1")
        return outcome


def load_user_world(name: str, seed: int) -> UserWorld:
    """Returns the world of a Python file. UserError that names file, class and method."""
    source = read_text(name)
    module = own_code(lambda: import_file(Path(name), "user_world"), name, name)
    kinds = []
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and callable(getattr(value, "reset", None)):
            kinds.append(value)
    names = [kind.__name__ for kind in kinds]
    require(kinds, f"{name}: it has no class with a method reset(self, seed)")
    require(len(kinds) == 1, f"{name}: {', '.join(names)} have a method reset; leave it to one")
    world = UserWorld(name, source, kinds[0], seed)
    begun = world._begun(0), world._begun(0)
    first, second = ((stated, vars(own).get("answer")) for own, stated in begun)
    require(
        first == second,
        f"{name}: {names[0]}.reset: two calls with seed 0 gave different tasks; draw from "
        "random.Random(seed)",
    )
    world.task("train", 0)  # says now what is wrong with it
    return world
