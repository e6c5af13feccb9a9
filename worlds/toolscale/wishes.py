"""What a domain's file says of its users: rules of the policy, and wishes.

A wish is a function of a scene, and of a record of the user's, that says what the wish comes to:

    @wish(held, every="give up all your tables")
    def give_up(scene: Scene, table: Reservation) -> Wish:
        return Wish(
            f"give up {scene.name(table)}",
            do=[("give_up_table", table.reservation_id)],
            rules=[ahead.of(scene.kit, table)],
            facts=[scene.near(table.deposit, "the deposit is less than ${}")],
            ask="How much comes back?",
            instead=[terrace, chair],
        )
"""

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

from nanorchestra.schemas import Json
from worlds.toolscale.toolkit import ToolError, Toolkit, as_json, key_of

Call = tuple[Any, ...]  # the name of a tool, and its arguments in order
Fact = tuple[bool, str]  # whether it is so, and how it is said after "only if"


class UnfitError(Exception):
    """A wish that cannot be had as it was drawn; the planner draws again."""


@dataclass(frozen=True)
class Rule:
    """A rule of the policy that no tool enforces, and whether a wish keeps it."""

    text: str
    kept: Callable[..., bool]

    def of(self, *given: Any) -> Fact:
        """Returns whether these keep it, and its text."""
        return self.kept(*given), self.text


def rule(text: str) -> Callable[[Callable[..., bool]], Rule]:
    """Returns a decorator that makes a rule of a predicate."""
    return lambda predicate: Rule(text, predicate)


@dataclass(frozen=True, kw_only=True)
class Mine:
    """The records of the user that a wish may be about.

    The tool `find` lists those of a user, `look` reads one by its key. A record's `names()` are
    words for it: by its key first, then as a user says them who does not know the key.
    """

    find: str
    look: str
    where: Callable[[Any], Any] = lambda record: True

    def that(self, where: Callable[[Any], Any]) -> Self:
        """Returns those of the records for which `where` holds."""
        return replace(self, where=where)

    def records(self, scene: "Scene") -> list[Any]:
        """Returns the records of the user for which `where` holds, without those of this talk."""
        known = {key_of(record) for record in self.all(scene.start, scene.key)}
        records = self.all(scene.kit, scene.key)
        return [each for each in records if key_of(each) in known and self.where(each)]

    def all(self, kit: Toolkit, key: str) -> list[Any]:
        """Returns all records of a user."""
        return getattr(kit, self.find)(key)


@dataclass(eq=False)
class Wish:
    """What a user wants, and what it comes to.

    want: words after "You want to". do: the golden writes. reads: calls that the agent needs
    beside the record: for arguments, rules, facts and what is told. rules: those of the policy.
    facts: what the user may make it depend on. told: what the user wants to know. ask: a question
    that the result of the last write answers. instead: wishes about the same record that may take
    its place. can: whether the tools let it be done, which its kind finds out.
    """

    want: str
    do: Sequence[Call] = ()
    reads: Sequence[Call] = ()
    rules: Sequence[Fact] = ()
    facts: Sequence[Fact] = ()
    told: Any = None
    ask: str = ""
    instead: Sequence["WishKind"] = ()
    can: bool = True

    @property
    def broken(self) -> list[str]:
        """The rules that forbid it."""
        return [text for kept, text in self.rules if not kept]

    @property
    def allowed(self) -> bool:
        """Whether tools and rules let it be done."""
        return self.can and not self.broken


@dataclass(frozen=True)
class WishKind:
    """A kind of wish. `every` are words for it about all records, `last` ends a talk."""

    make: Callable[..., Wish]
    mine: Mine | None = None
    every: str = ""
    last: bool = False

    def __call__(self, scene: "Scene", record: Any) -> Wish:
        """Returns the wish about a record, with whether the tools let it be done."""
        made = self.make(scene, record) if self.mine else self.make(scene)
        try:
            scene.copy().act(made)
        except ToolError:
            return replace(made, can=False)
        return made


def hand_over(want: str, **matters: str) -> WishKind:
    """Returns a kind of wish to speak with a person, about one of the matters.

    Each is a reason of the tool `transfer_to_human_agents`, with the words for it.
    """

    def make(scene: Scene) -> Wish:
        reason = scene.rng.choice(list(matters))
        return Wish(f"{want} {matters[reason]}", do=[("transfer_to_human_agents", reason)])

    return WishKind(make, last=True)


def wish(mine: Mine | None = None, *, every: str = "") -> Callable:
    """Returns a decorator that makes a kind of wish of a function; see the top of this file."""
    return lambda make: WishKind(make, mine, every)


@dataclass
class Scene:
    """What one user has wished so far, on a database `kit` of its own, which was `start` before.

    `key` is the key of the user's record in the first table, and `me` is that record. With `keys`
    the user knows the key of every record. `calls` are the golden calls, `told` is what must be
    told, `said` what the user says. `offered` are the tools of the wishes that the user speaks of,
    `rules` their rules, `writes` the most writes of one; `looks` are the golden look-ups, `used`
    keys of records that a wish is about.
    """

    start: Toolkit
    kit: Toolkit
    key: str
    rng: random.Random
    keys: bool = False
    calls: list[tuple[str, Json]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    offered: set[str] = field(default_factory=set)
    rules: list[str] = field(default_factory=list)
    writes: int = 0
    looks: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Self:
        """Returns a scene that can go on without changing this one."""
        own = {n: type(v)(v) for n, v in vars(self).items() if isinstance(v, list | set | dict)}
        return replace(self, kit=self.kit.copy(), **own)

    # --- for the wishes of a domain

    @property
    def me(self) -> Any:
        """The user's record."""
        return self.kit.tables[0][self.key]

    def choose(self, values: Sequence[Any]) -> Any:
        """Returns one of the values. Raises UnfitError if there is none."""
        if not values:
            raise UnfitError("nothing to choose from")
        return self.rng.choice(values)

    def choose_unused(self, records: Sequence[Any]) -> Any:
        """Returns a record that no other wish is about. Raises UnfitError if there is none."""
        record = self.choose([each for each in records if key_of(each) not in self.used])
        self.used.add(key_of(record))
        return record

    def name(self, record: Any) -> str:
        """Returns the words for the record that the wish is about."""
        return self.names[key_of(record)]

    def near(self, value: float, text: str) -> Fact:
        """Returns the fact that a number is below a limit near it, which stands in the text."""
        limit = max(1, round(value * self.rng.uniform(0.6, 1.5)))
        return value < limit, text.format(limit)

    # --- for the planner

    def draw(self, kind: WishKind) -> tuple[Wish, Any]:
        """Returns a wish of the kind and the record that it is about, with words for it."""
        if kind.mine is None:
            if kind.make.__name__ in self.used:
                raise UnfitError("it was wished already")
            self.used.add(kind.make.__name__)
            return kind(self, None), None
        record = self.choose_unused(kind.mine.records(self))
        by_key, *words = record.names()
        taken = set()  # words for others, before or after what has been wished
        for kit in (self.start, self.kit):
            for each in kind.mine.all(kit, self.key):
                taken.update(each.names() if key_of(each) != key_of(record) else ())
        fitting = [text for text in words if text not in taken]
        self.names[key_of(record)] = by_key if self.keys else self.choose(fitting)
        return kind(self, record), record

    def call(self, call: Call) -> Any:
        """Makes a golden call; returns its result."""
        name, *given = call
        named = dict(zip(_parameters(getattr(type(self.kit), name)), given, strict=True))
        made = name, as_json(named)
        result = self.kit.call(*made)
        if made not in self.calls:
            self.calls.append(made)
        return result

    def look(self, call: Call) -> None:
        """Makes a golden look-up."""
        self.call(call)
        self.looks.append(call[0])

    def act(self, wish: Wish) -> list[Any]:
        """Does a wish; returns what its writes returned."""
        results = [self.call(call) for call in wish.do]
        if wish.told is not None:
            self.told.append(str(wish.told))
        return results

    def speak_of(self, wish: Wish) -> None:
        """Takes note of a wish that the user speaks of, with its tools and rules."""
        self.offered.update(name for name, *_ in (*wish.do, *wish.reads))
        self.writes = max(self.writes, len(wish.do))
        self.rules += [text for _, text in wish.rules if text not in self.rules]


@cache
def _parameters(method: Callable) -> list[str]:
    """The names of a tool's arguments."""
    return [*inspect.signature(method).parameters][1:]
