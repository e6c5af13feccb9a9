"""Plans tasks: who calls, and what they want, with as many twists as the level says.

What a twist comes to is drawn before the records: whether the fact is so, whether a rule forbids
it, whether the first choice can be had. Records that do not make it so are drawn again.
"""

import copy
import random
import re
from contextlib import suppress
from dataclasses import dataclass

from worlds.toolscale.act import PHRASES, Act, UnfitError, people
from worlds.toolscale.domain import Domain
from worlds.toolscale.program import ToolError, evaluate
from worlds.toolscale.records import holds, key_of
from worlds.toolscale.wishes import TRIES, Wish
from worlds.toolscale.words import Words

LEVELS = {1: (1, 0), 2: (2, 1), 3: (2, 2), 4: (3, 3), 5: (4, 4)}  # wishes, and twists
TWISTS = {  # what a wish must have for a twist, and the twist's share
    "if": ("facts", 5),
    "rule": ("rules", 4),
    "prefer": ("prefers", 3),
    "all": ("all", 2),
    "mind": ("to", 1),
    "plain": ("say", 0),
}
NOTHING = 0.15  # the share of tasks all of whose wishes come to nothing
TRUE = 0.57  # the share of conditions that are true, in the other tasks
OPEN = 0.5  # the share of conditions of which one branch is left unsaid
SLIPS = 0.1  # the share of wishes with a slip of the pen
NAMED = 0.7  # the share of users who do not know their number
MOST_CALLS = 16
MOST_DRAWS = 400  # of callers and wishes, until all can be had


@dataclass
class Planner:
    """Draws tasks for a domain."""

    domain: Domain
    words: Words
    rng: random.Random

    def __post_init__(self) -> None:
        self.data = self.words.data
        self.frames = PHRASES["frames"]["held_out" if self.data.get("held_out") else "train"]
        self.kinds = self.data["wishes"]
        has = {name for wish in self.kinds.values() for name in wish}
        self.twists = {twist: share for twist, (need, share) in TWISTS.items() if need in has}

    def generate(self, level: int, focus: int = 0, known: bool = False) -> Act:
        """Returns a task of the level (1 to 5), acted out. Raises UnfitError if none can be had.

        `focus` chooses the kind of a first wish that has no twist, if that can be done. With
        `known` the user knows every key, wishes nothing that comes to nothing, and has a wish per
        twist, at least one.
        """
        wishes, twists = LEVELS[level]
        if known:
            wishes = max(1, twists)
        callers = list(self.domain.tables[people(self.data)])
        self.known, self.quiet = known, not known and self.rng.random() < NOTHING
        for attempt in range(MOST_DRAWS):
            if attempt % 20 == 0:
                drawn = self.rng.choices(list(self.twists), self.twists.values(), k=twists)
                if self.quiet:
                    drawn = [self.rng.choice(("if", "rule")) for _ in range(max(1, twists))]
                plan = ["plain"] * (wishes - len(drawn)) + drawn
                self.rng.shuffle(plan)
                plan.sort(key=lambda twist: twist != "all")  # the hardest to have
                truths = [not self.quiet and self.rng.random() < TRUE for _ in plan]
                named = not known and self.rng.random() < NAMED
            act = Act(self.domain, self.words, self.rng.choice(callers), self.rng, named, known)
            for number, (twist, truth) in enumerate(zip(plan, truths, strict=True)):
                first = [*self.kinds][focus % len(self.kinds)] if not number else None
                last = number == len(plan) - 1
                act = act and self._added(act, twist, truth, first, last)
            if act and len(act.calls) <= MOST_CALLS:
                if act.story in act.used_texts:
                    self._begin_with_story(act)
                return act
        raise UnfitError("no wishes can be had")

    def _begin_with_story(self, act) -> None:
        """Puts what has happened to the user before its first wish."""
        story = self.rng.choice(self.data["stories"][act.story]["say"])
        story = act.render(story, {"there": act.there})
        act.reasons[0] = f"{story} {act.reasons[0]}"
        opening = act.wishes[0]
        field = "first" if "first" in opening else "say"
        act.wishes[0] = opening | {field: f"{story} {opening[field]}"}

    def _added(self, act, twist, truth, first, last) -> Act | None:
        """Returns the act with one wish more, or None if none can be had."""
        tag = f"[{act.story}] "
        kinds = {
            kind: wish.get("weight", 2) * (1 + 5 * (tag in str(wish["say"])))
            for kind, wish in self.kinds.items()
            if TWISTS[twist][0] in wish and (last or not wish.get("last")) and kind not in act.done
            if not (self.quiet and twist == "plain" and "do" in wish)
        }
        for attempt in range(TRIES if kinds else 0):
            kind = self.rng.choices(list(kinds), kinds.values())[0]
            kind = first if first in kinds and attempt < 3 else kind
            trial = act.clone()
            try:
                getattr(self, f"_{twist}")(trial, Wish(trial, kind), truth)
                trial.done.add(kind)
                trial.marks.append((len(trial.calls), len(trial.communicate)))
                return trial
            except (UnfitError, ToolError):
                pass
        return None

    # --- a wish, plainly or with a twist: each adds its sentences to the act

    def _plain(self, act, wish, truth):
        self._fit(wish)
        self._say(act, wish.phrase(wish.data["say"]), *self._done(act, wish))

    def _if(self, act, wish, truth):
        fact = self.rng.choice(wish.data["facts"])
        if "limit" in fact:
            wish.near(fact, truth)
        if holds(fact["test"], wish.scope) != truth or wish.broken():
            raise UnfitError("the fact is otherwise, or a rule forbids it")
        self._either(act, wish, truth, "if", *wish.phrase(fact["say"]).split(" | "))

    def _rule(self, act, wish, truth):
        broken = wish.broken()
        if len(broken) != (not truth) or not wish.can():
            raise UnfitError("the rules are otherwise")
        if broken and not wish.attempt(dict(act.tables)):
            raise UnfitError("a tool forbids it too")
        for rule in broken:
            wish.forbidden(rule)
        wanted = wish.phrase(wish.data["say"])
        end = self.rng.choice([*wish.data.get("no", ()), self.rng.choice(self.frames["no"])])
        self._either(act, wish, truth, "rule", wanted, wish.words(end))

    def _either(self, act, wish, truth, name, wanted, end):
        """The wish if it holds; else what `end` says, or another wish."""
        act.twists.append((name, truth))
        other = None
        if self.rng.random() < OPEN:
            end = ""
        if not self.quiet and self.rng.random() < 0.5:
            with suppress(UnfitError):
                other, clause = self._other(act, wish)
                end = self.rng.choice(self.frames[f"{name} else"]).format(clause)
        wish.look()
        if truth:
            self._fit(wish)
            wish.do()
        elif other:
            other.look()
            other.do()
        if not wish.attempt(act.naive) and other:
            other.attempt(act.naive)
        self._say(act, wanted, end)

    def _prefer(self, act, wish, truth):
        fact = self.rng.choice(wish.data["prefers"])
        if holds(fact["test"], wish.scope) != truth:
            raise UnfitError("the fact is otherwise")
        act.twists.append(("prefer", truth))
        name, second = fact["instead"], copy.copy(wish)
        second.scope = dict(wish.scope)
        second.draw(name, fact["test"])
        granted = wish if truth else second
        self._fit(granted)
        wanted, otherwise = wish.phrase(wish.data["say"]), second.phrase(fact["else"])
        heard = re.findall(rf"\{{({name}[\w.]*)", str(fact["else"]))
        if all(evaluate(path, wish.scope) == evaluate(path, second.scope) for path in heard):
            raise UnfitError("the same again")
        if not wish.attempt(act.naive):
            second.attempt(act.naive)
        granted.look()
        granted.do()
        self._say(act, wanted, otherwise, *granted.tell())

    def _all(self, act, wish, truth):
        every = wish.data["all"]
        if "limit" in every:
            wish.near(every, self.rng.random() < 0.5)
        rows = [r for r in wish.mine(True) if holds(every["test"], wish.scope | {"it": r})]
        allowed = []
        for row in rows:
            wish.scope["it"] = row
            allowed.append(not wish.broken())
            if not wish.can():
                raise UnfitError("the tools do not let it be done")
        if len(rows) < 2 or all(allowed) != truth or not any(allowed):
            raise UnfitError("too few, or the rules are otherwise")
        if act.used & {key_of(row) for row in rows}:
            raise UnfitError("another wish is about one of them")
        act.twists.append(("all", truth))
        table = wish.data["it"]
        act.by_id = act.by_id | {table: False}
        for call in act.data["refs"][table]["find"]:
            act.call(call, wish.scope)
        self._say(act, wish.phrase(every["say"]))
        act.unknown.append(act.data["refs"][table]["unknown"])
        for row, good in zip(rows, allowed, strict=True):
            wish.scope["it"] = row
            wish.look()
            wish.attempt(act.naive)
            if good:
                wish.do()
            else:
                wish.forbidden(wish.broken()[0])

    def _mind(self, act, wish, truth):
        before = wish.phrase(wish.data["to"])
        other, clause = self._other(act, wish)
        frames = self.frames["mind"]
        # One who knows every key changes its mind before the talk.
        frame = self.rng.choice(
            [each for each in frames if not self.known or isinstance(each, str)]
        )
        wish.attempt(act.naive)
        questions = self._done(act, other)
        if isinstance(frame, str):
            return self._say(act, frame.format(before, clause), *questions)
        reason, first, then = (text.format(before, clause) for text in frame)
        self._say(act, reason, *questions)
        act.wishes[-1] = {"first": first, "say": " ".join([then, *questions])}

    # --- parts

    def _other(self, act, wish):
        """What may take the wish's place, about the same record, and how that is said."""
        clauses = wish.data.get("or")
        if not clauses:
            raise UnfitError("no other wish")
        kind = self.rng.choice(list(clauses))
        other = Wish(act, kind, wish.scope["it"])
        if other.scope["it"] not in other.mine():
            raise UnfitError("not of this record")
        self._fit(other)
        return other, other.phrase(clauses[kind])

    @staticmethod
    def _fit(wish):
        if wish.broken() or not wish.can():
            raise UnfitError("it cannot be done")

    @staticmethod
    def _done(act, wish):
        """Does the wish; returns the user's questions."""
        wish.look()
        wish.attempt(act.naive)
        wish.do()
        return wish.tell()

    def _say(self, act, *texts):
        sentences = re.sub(
            r"(?:^|[.?] )[a-z]", lambda start: start[0].upper(), " ".join(filter(None, texts))
        )
        if act.reasons and self.rng.random() < 0.4:
            also = self.rng.choice((r"Y\1 also", r"Also, y\1", r"Then y\1"))
            sentences = re.sub(r"^Y(ou|ou'd)(?= want| need| like| hope)", also, sentences)
        if self.rng.random() < SLIPS:
            slips = [slip for slip in PHRASES["slips"] if slip[0] in sentences]
            sentences = sentences.replace(*self.rng.choice(slips or [("", "")]), 1)
        act.mentioned.clear()
        act.reasons.append(sentences)
        act.wishes.append({"say": sentences})
