"""Plans tasks: who calls, and what they want, with as many twists as the level says.

A twist is how a wish is put:

    plain   "You want to W."
    if      "You want to W, but only if F."        all     "You want to W all your tables."
    rule    "You want to W.", which a rule may forbid
    mind    "You were about to W, but now you want to V."

In `if` and `rule` the user may say what it wants otherwise.
"""

import random
from collections.abc import Sequence

from nanorchestra.schemas import Json
from worlds.toolscale.domain import CONFIRM, IDENTIFY, LOOK, Domain
from worlds.toolscale.toolkit import ToolError, key_of
from worlds.toolscale.wishes import Scene, UnfitError, Wish, WishKind

LEVELS = {1: (1, 0), 2: (2, 1), 3: (2, 2), 4: (3, 3), 5: (4, 4)}  # wishes, and twists
TWISTS = ("if", "if", "rule", "rule", "all", "mind")
ASKED = 0.5  # the share of wishes whose question is asked
OTHERWISE = 0.5  # the share of conditions and rules with a wish that may take the place
KEPT = 0.5  # the share of the twist `rule` that no rule forbids
TRIES = 20  # draws of a wish, and of a user


def plan(domain: Domain, level: int, rng: random.Random) -> Scene:
    """Returns what a user wishes, acted out, at a level from 1 to 5. Raises UnfitError."""
    wishes, twists = LEVELS[level]
    drawn = ["plain"] * (wishes - twists) + rng.sample(TWISTS, twists)
    rng.shuffle(drawn)
    drawn.sort(key=lambda twist: twist != "all")  # the hardest to have
    return draw(domain, drawn, rng)


def draw(
    domain: Domain,
    twists: Sequence[str],
    rng: random.Random,
    keys: bool = False,
    among: Sequence[WishKind] = (),
) -> Scene:
    """Returns a scene with a wish for each twist, of all wishes or `among` some.

    With `keys` the user knows all keys. Raises UnfitError.
    """
    wishes = among or [*domain.wishes.values()]
    for _ in range(TRIES):
        scene = Scene(domain.start, domain.start.copy(), rng.choice(domain.people), rng, keys)
        if not keys:
            scene.call(domain.identify(scene.me)[1])
        try:
            for place, twist in enumerate(twists):
                is_last = place == len(twists) - 1
                kinds = [kind for kind in wishes if is_last or not kind.last]
                scene = _with_wish(scene, twist, kinds)
            return scene
        except UnfitError as error:
            problem = error
    raise problem


def _with_wish(scene: Scene, twist: str, kinds: Sequence[WishKind]) -> Scene:
    """Returns the scene with one wish more. Raises UnfitError."""
    for _ in range(TRIES):
        trial = scene.copy()
        try:
            if twist == "all":
                _add_all(trial, trial.choose([kind for kind in kinds if kind.every]))
            else:
                _add(trial, twist, trial.choose(kinds))
            return trial
        except (UnfitError, ToolError) as error:
            problem = error
    raise UnfitError(f"no wish with the twist {twist} ({problem})")


def _add(scene: Scene, twist: str, kind: WishKind) -> None:
    """Adds a wish. Raises UnfitError if it cannot be put so."""
    wish, record = scene.draw(kind)
    other = _instead(scene, wish, record)
    spoken, said = [wish], f"You want to {wish.want}."
    done, otherwise = wish, ""
    if twist == "if":
        holds, fact = scene.choose(wish.facts)
        said = f"You want to {wish.want}, but only if {fact}."
        done, otherwise = wish if holds else None, "Otherwise"
    elif twist == "rule":
        _require(wish.rules and wish.can)
        _require(bool(wish.broken) != (scene.rng.random() < KEPT))
        done, otherwise = None if wish.broken else wish, "If that is not possible,"
    elif twist == "mind":
        _require(other)
        said = f"You were about to {wish.want}, but now you want to {other.want}."
        done, spoken = other, [wish, other]
    if otherwise and other and scene.rng.random() < OTHERWISE:
        said += f" {otherwise} you want to {other.want}."
        done, spoken = done or other, [wish, other]
    _require(done is None or done.allowed)
    if kind.mine:
        scene.look((kind.mine.look, key_of(record)) if scene.keys else (kind.mine.find, scene.key))
    for each in spoken:
        scene.speak_of(each)
    for each in dict.fromkeys((wish, done)):
        for call in each.reads if each else ():
            scene.look(call)
    results = scene.act(done) if done else []
    if wish.ask and twist != "mind" and scene.rng.random() < ASKED:
        said += f" {wish.ask}"
        scene.told += [str(results[-1])] if done is wish else []
    scene.said.append(said)


def _instead(scene: Scene, wish: Wish, record) -> Wish | None:
    """A wish about the same record that may take the place and can be done."""
    if not wish.instead:
        return None
    kind = scene.rng.choice(wish.instead)
    if record not in kind.mine.records(scene):
        return None
    other = kind(scene, record)
    return other if other.allowed else None


def _add_all(scene: Scene, kind: WishKind) -> None:
    """Adds a wish about all records of the user, which is done for those that the rules allow."""
    records = kind.mine.records(scene)
    _require(len(records) > 1 and not scene.used & {key_of(each) for each in records})
    scene.names |= {key_of(each): "it" for each in records}
    wishes = [kind(scene, each) for each in records]
    allowed = [wish for wish in wishes if not wish.broken]
    _require(allowed and all(wish.can for wish in wishes))
    scene.look((kind.mine.find, scene.key))
    for wish in wishes:
        for call in wish.reads:
            scene.look(call)
    for wish in allowed:
        scene.act(wish)
    scene.used |= {key_of(each) for each in records}
    scene.said.append(f"You want to {kind.every}.")


def _require(condition) -> None:
    if not condition:
        raise UnfitError("it cannot be put so")


def to_task(domain: Domain, scene: Scene, name: str, level: int) -> Json:
    """Returns the tau2 task of a scene.

    Beside tau2's fields it has `domain`, `split`, `level`, `tools` (all of the domain's: what is
    missing would tell what is not needed) and `rules`, those of the policy that are checked on the
    trace (score.py).
    """
    known, identify = domain.identify(domain.start.tables[0][scene.key])
    writes = domain.of_kind("write")
    first = {"first": [identify[0]], "then": writes}
    rules = [
        {"text": IDENTIFY.format(identify[0]), "check": "before", "args": first},
        {"text": CONFIRM, "check": "confirmed", "args": {"tools": writes}},
    ]
    if scene.looks:
        looks = {"tools": list(dict.fromkeys(scene.looks))}
        rules.append({"text": LOOK, "check": "made", "args": looks})
    told = list(dict.fromkeys(scene.told))
    return {
        "id": name,
        "domain": domain.name,
        "split": "held_out" if domain.held_out else "train",
        "level": level,
        "user_scenario": {
            "persona": None,
            "instructions": {
                "domain": domain.name,
                "reason_for_call": " ".join(scene.said),
                "known_info": known,
                "unknown_info": None,
                "task_instructions": "",
            },
        },
        "evaluation_criteria": {
            "actions": [
                {"action_id": f"{name}_{number}", "name": tool, "arguments": arguments}
                for number, (tool, arguments) in enumerate(scene.calls)
            ],
            "communicate_info": told,
            "reward_basis": ["DB", "ACTION", "COMMUNICATE"] if told else ["DB", "ACTION"],
        },
        "tools": list(domain.kinds),
        "rules": rules,
    }
