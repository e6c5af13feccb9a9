"""Probes what a policy reads in the miniature: held-out tasks changed in one thing.

    python benchmarks/probe.py assets/nano --tasks 320 [--seed 0] [--phrases FILE] [--json FILE]

Rewards on tasks with the aliases or the sentences of training, with sentences that have a word
never shown, with permuted aliases and with the tools in reverse order stand beside the reward on
the unchanged tasks. Shares follow: of first calls that name a tool on offer, of wishes that the
first thought reads right, of bans of the preferred tool that are kept, of difficulties that the
first thought names, of the value of prices and latencies that the first choice captures, and of
first choices that are the informed rule's where only the ratio of two prices changes. All have 95%
intervals over tasks, or over the phrases of another hand, for a phrase is mostly read alike in all
tasks; differences are paired by task.

--phrases has the wishes, bans and aliases of another hand: a JSON file {"wishes": {"cheap": [...],
...}, "bans": ["leave out {tool}", ...], "aliases": [...]}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nanorchestra.agent.attempts import play  # noqa: E402
from nanorchestra.agent.loop import Rollout  # noqa: E402
from nanorchestra.errors import ArgumentParser, command, require  # noqa: E402
from nanorchestra.files import read_json, write_whole  # noqa: E402
from nanorchestra.records import Preference, Task, Trajectory  # noqa: E402
from nanorchestra.schemas import Json  # noqa: E402
from nanorchestra.tools.sandbox import Sandbox  # noqa: E402
from nanorchestra.tools.spending import Spending  # noqa: E402
from worlds.metrics import Interval, interval, score, share_interval  # noqa: E402
from worlds.miniature.language import HELD_OUT, TRAIN, UNSEEN, draw_sentence  # noqa: E402
from worlds.miniature.offers import Offer, bounds, is_expert, title  # noqa: E402
from worlds.miniature.tables import PREFERENCES  # noqa: E402
from worlds.miniature.world import Miniature, forbid  # noqa: E402
from worlds.policies import parse  # noqa: E402
from worlds.routers import expected_rewards, informed_order, usable  # noqa: E402

STEPS = (1.1, 1.25, 1.5, 2, 3, 5, 9, 16)
RATIOS = (*(1 / step for step in reversed(STEPS)), *STEPS)  # of two prices
MIDDLE_CENTS = 20  # geometric mean of the two prices of a ratio
DEAREST_CENTS = 99  # price of the other experts on offer
PARALLEL = 128  # attempts at a time


@command("probe.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="probe.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("policy", help="as --policy of evaluate.py, but no router")
    parser.add_argument("--tasks", type=int, default=320, help="held-out tasks (default: 320)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling (default: 0)")
    parser.add_argument("--phrases", type=Path, help="file of wishes, bans and aliases")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    require(options.tasks > 0, f"--tasks must be at least 1, not {options.tasks}")
    rollout = parse(options.policy, routers=()).load(Spending(), PARALLEL)
    with Sandbox() as sandbox:
        results = probe(rollout, options.seed, options.tasks, sandbox)
        if options.phrases:
            phrases = read_json(options.phrases)
            results |= probe_phrases(rollout, options.seed, options.tasks, sandbox, phrases)
    for name, (mean, low, high) in results.items():
        print(f"{name}: {mean:.3g} [{low:.3g}, {high:.3g}]")
    if options.json:
        write_whole(options.json, json.dumps(results, indent=2) + "\n")
    return 0


def probe(rollout: Rollout, seed: int, count: int, sandbox: Sandbox) -> dict[str, Interval]:
    """Returns the probes of a policy on `count` held-out tasks each, by name."""
    tasks = held_out(Miniature(seed, sandbox), count)
    plain = attempts_at(tasks, rollout, seed, sandbox)
    results = {"reward": interval([attempt.reward for attempt in plain])}
    ids = [task.id for task in tasks]
    results |= _reading(rollout, tasks, plain, "", ids)

    changes = {
        "aliases of training": held_out(Miniature(seed, sandbox, names=TRAIN), count),
        "sentences of training": held_out(Miniature(seed, sandbox, words=TRAIN), count),
        "a word never shown": held_out(Miniature(seed, sandbox, words=UNSEEN), count),
        "aliases permuted": [permuted(task) for task in tasks],
        "tools in reverse order": [_with(task, task.data["tools"][::-1]) for task in tasks],
    }
    for name, changed in changes.items():
        attempts = attempts_at(changed, rollout, seed, sandbox)
        results |= _beside(name, attempts, plain, ids)
        results |= _reading(rollout, changed, attempts, f", {name}", ids)

    cases = [pair for pair in zip(tasks, plain, strict=True) if pair[0].kind == "knowledge"]
    banned = [with_ban(task) for task, _ in cases]
    kept = _kept(banned, attempts_at(banned, rollout, seed, sandbox))
    results["bans of the preferred tool kept"] = interval(kept)

    read = [float(_reads_difficulty(rollout, task, attempt)) for task, attempt in cases]
    results["difficulty read right"] = interval(read)
    results |= value_of_prices(tasks, plain)
    return results | _price_ratios([task for task, _ in cases], rollout, seed, sandbox)


def probe_phrases(
    rollout: Rollout, seed: int, count: int, sandbox: Sandbox, phrases: Json
) -> dict[str, Interval]:
    """Returns the probes of `count` held-out tasks in the phrases of another hand.

    The wishes, bans and aliases are changed one by one, each of a file in turn; what a wish weighs
    stays, and the preferred tool is banned: by kind and alias as in training, and by one of them
    alone. The tasks have no ban otherwise.
    """
    drawn = held_out(Miniature(seed, sandbox), count)
    tasks = [replace(task, preference=_wish_alone(task, HELD_OUT)) for task in drawn]
    trained = [replace(task, preference=_wish_alone(task, TRAIN)) for task in drawn]
    plain = attempts_at(trained, rollout, seed, sandbox)
    results, place = {}, Counter()

    said = []
    for task in trained:
        wishes = phrases["wishes"][task.preference.name]
        text = wishes[place[task.preference.name] % len(wishes)]
        place[task.preference.name] += 1
        said.append(replace(task, preference=replace(task.preference, text=text)))
    attempts = attempts_at(said, rollout, seed, sandbox)
    texts = [task.preference.text for task in said]
    results |= _beside("wishes of another hand", attempts, plain, texts)
    results |= _reading(rollout, said, attempts, ", wishes of another hand", texts)

    cases = [task for task in trained if task.kind == "knowledge"]
    bans = list(itertools.islice(itertools.cycle(phrases["bans"]), len(cases)))
    ways = {"": title, ", by kind alone": _kind, ", by alias alone": _alias}
    for way, in_words in ways.items():
        banned = [_banned(task, ban, in_words) for task, ban in zip(cases, bans, strict=True)]
        kept = _kept(banned, attempts_at(banned, rollout, seed, sandbox))
        results[f"bans of another hand kept{way}"] = over_groups(kept, bans)

    named, names = [], itertools.cycle(phrases["aliases"])
    for task in tasks:
        tools = [offer | {"name": next(names)} for offer in task.data["tools"]]
        named.append(_with(task, tools))
    attempts = attempts_at(named, rollout, seed, sandbox)
    meant = [nearest_name(first_call(a), t.offers) for a, t in zip(attempts, named, strict=True)]
    return results | _reading(rollout, named, attempts, ", aliases of another hand", meant)


def over_groups(values: Sequence[float], groups: Sequence[str]) -> Interval:
    """Returns the mean of the values and its 95% bootstrap interval over the groups they are of."""
    sums, counts = Counter(), Counter()
    for value, group in zip(values, groups, strict=True):
        sums[group] += value
        counts[group] += 1
    if len(counts) < 2:
        return Interval(fmean(values), -math.inf, math.inf)
    return share_interval([sums[group] for group in counts], list(counts.values()))


def nearest_name(called: str, offers: Collection[str]) -> str:
    """Returns the name on offer that is most like the called one."""
    return max(offers, key=lambda name: SequenceMatcher(None, called, name).ratio())


def _banned(task, ban, in_words) -> Task:
    """Returns the task with a ban of the preferred tool, whose name is in_words(offer)."""
    best = informed_order(task)[0]
    weight = -(task.preference.outcome + task.preference.cost + task.preference.latency)
    text = f"{task.preference.text} {ban.format(tool=in_words(best))}".strip()
    preference = replace(task.preference, text=text, tools={best["name"]: weight})
    return replace(task, preference=preference)


def _kind(offer: Offer) -> str:
    return f"the {offer['what']}"


def _alias(offer: Offer) -> str:
    return offer["name"]


def _wish_alone(task, split) -> Preference:
    """Returns a preference of the task's weights without a ban, in a sentence of the split."""
    name = task.preference.name
    text = draw_sentence(random.Random(f"wish/{task.id}"), f"wish_{name}", split)
    return Preference(text, *PREFERENCES[name][1])


def _beside(name, attempts, plain, groups) -> dict[str, Interval]:
    """Returns the reward and its paired difference, with intervals over `groups`."""
    rewards = [attempt.reward for attempt in attempts]
    gains = [ours - base.reward for ours, base in zip(rewards, plain, strict=True)]
    return {
        f"reward, {name}": over_groups(rewards, groups),
        f"reward, {name}, difference": over_groups(gains, groups),
    }


def _reading(rollout, tasks, attempts, suffix, groups) -> dict[str, Interval]:
    """Returns the shares of first calls to a tool on offer, and of wishes read right.

    The intervals are over `groups`, one for each attempt.
    """
    on_offer, read = [], defaultdict(list)
    for task, attempt, group in zip(tasks, attempts, groups, strict=True):
        on_offer.append(float(first_call(attempt) in task.offers))
        thought = _first_turn(rollout, attempt).partition("<think>")[2].strip()
        for wish in ("all", task.preference.name):
            read[wish].append((float(thought.startswith(f"{task.preference.name}.")), group))
    results = {f"first call is on offer{suffix}": over_groups(on_offer, groups)}
    for wish, hits in read.items():
        results[f"wish read right, {wish}{suffix}"] = over_groups(*zip(*hits, strict=True))
    return results


def _kept(tasks, attempts) -> list[float]:
    kept = []
    for task, attempt in zip(tasks, attempts, strict=True):
        used = any(attempt.calls.get(name) for name in task.preference.avoided)
        kept.append(float(bool(attempt.calls) and not used))
    return kept


def held_out(world: Miniature, count: int) -> list[Task]:
    """Returns the first held-out tasks of a world."""
    return [world.task(HELD_OUT, index) for index in range(count)]


def attempts_at(
    tasks: Sequence[Task], rollout: Rollout, seed: int, sandbox: Sandbox
) -> list[Trajectory]:
    """Returns one scored attempt at each task, with the seeds of evaluate.py's."""

    def open_environment(i):
        return Miniature(seed, sandbox).environment(tasks[i], seed)

    seeds = [seed * 1_000_003 + i for i in range(len(tasks))]
    attempts, _ = play(rollout, open_environment, seeds)
    return [score(task, attempt) for task, attempt in zip(tasks, attempts, strict=True)]


def permuted(task: Task) -> Task:
    """Returns the task with each alias moved to the next tool, in the preference's words too."""
    tools = task.data["tools"]
    names = [offer["name"] for offer in tools]
    moved = []
    for offer, name in zip(tools, names[1:] + names[:1], strict=True):
        moved.append(offer | {"name": name})
    text, weights = task.preference.text, {}
    for old, new in zip(tools, moved, strict=True):
        if old["name"] in task.preference.tools:
            weights[new["name"]] = task.preference.tools[old["name"]]
            text = text.replace(old["name"], new["name"])
    preference = replace(task.preference, text=text, tools=weights)
    return _with(replace(task, preference=preference), moved)


def with_ban(task: Task) -> Task:
    """Returns the task with a ban, of the tool that is best by the hidden skills, and no other."""
    rng = random.Random(f"ban/{task.id}")
    plain = _wish_alone(task, HELD_OUT)
    best = informed_order(replace(task, preference=plain))[0]
    return replace(task, preference=forbid(plain, best, rng, HELD_OUT))


def with_ratio(task: Task, ratio: float) -> Task:
    """Returns the task for a user who minds cost alone, with its experts alone on offer.

    The prices of two of them, drawn at random, have the given ratio; the others are dear.
    """
    rng = random.Random(f"ratio/{task.id}")
    text = draw_sentence(rng, "wish_cheap", HELD_OUT)
    preference = Preference(text, *PREFERENCES["cheap"][1])
    tools = [offer | {"price": DEAREST_CENTS} for offer in _experts(task)]
    first, second = rng.sample(range(len(tools)), 2)
    tools[first]["price"] = round(MIDDLE_CENTS * ratio**0.5)
    tools[second]["price"] = round(MIDDLE_CENTS / ratio**0.5)
    return _with(replace(task, preference=preference), tools)


def value_of_prices(tasks: Sequence[Task], attempts: Sequence[Trajectory]) -> dict[str, Interval]:
    """Returns what first choices make of prices and latencies, over all tasks and for each wish.

    By the expected reward of a single call, with the hidden skills known: the value is what the
    informed rule has more than the same rule that takes each tool for as dear and as slow as the
    mean of those on offer. `captured` is the part of it that the first choices have, 1 for the
    informed rule and 0 for the other; `regret` what they have less than the informed rule.
    """
    values, gains, regrets = defaultdict(list), defaultdict(list), defaultdict(list)
    for task, attempt in zip(tasks, attempts, strict=True):
        offers = [offer for offer in task.data["tools"] if usable(task, offer)]
        expected = expected_rewards(task, [[offer] for offer in offers])
        rewards = {o["name"]: float(r) for o, r in zip(offers, expected, strict=True)}
        best = rewards[informed_order(task)[0]["name"]]
        plain = rewards[informed_order(_without_prices(task))[0]["name"]]
        ours = rewards.get(first_call(attempt), 0.0)  # of a tool that cannot answer
        for wish in ("all", task.preference.name):
            values[wish].append(best - plain)
            gains[wish].append(ours - plain)
            regrets[wish].append(best - ours)
    results = {}
    for wish in values:
        results[f"value of prices captured, {wish}"] = share_interval(gains[wish], values[wish])
        results[f"value of prices, {wish}"] = interval(values[wish])
        results[f"regret of the first choice, {wish}"] = interval(regrets[wish])
    return results


def _without_prices(task: Task) -> Task:
    """Returns the task with the mean of the prices on offer for each tool, and of the latencies."""
    means = {name: fmean(o[name] for o in task.data["tools"]) for name in ("price", "latency")}
    return replace(task, data=task.data | {"tools": [o | means for o in task.data["tools"]]})


def _price_ratios(
    cases: Sequence[Task], rollout: Rollout, seed: int, sandbox: Sandbox
) -> dict[str, Interval]:
    """Returns the share of first choices that are the informed rule's, for each ratio and in all.

    Beside it stands the share of a rule that always takes the cheapest.
    """
    cases = [task for task in cases if len(_experts(task)) > 2]
    by_ratio, all_hits, hits_of_cheapest = {}, [], []
    for number, ratio in enumerate(RATIOS):
        tasks = [with_ratio(task, ratio) for task in cases[number :: len(RATIOS)]]
        hits = []
        for task, attempt in zip(tasks, attempts_at(tasks, rollout, seed, sandbox), strict=True):
            best = informed_order(task)[0]["name"]
            cheapest = min(task.data["tools"], key=_price)["name"]
            hits.append(float(first_call(attempt) == best))
            hits_of_cheapest.append(float(cheapest == best))
        by_ratio[f"first choice at a price ratio of {ratio:.3g}"] = interval(hits)
        all_hits += hits
    return {
        "first choice as the informed rule's": interval(all_hits),
        "the same, of always the cheapest": interval(hits_of_cheapest),
        **by_ratio,
    }


def first_call(attempt: Trajectory) -> str:
    """Returns the name that the first call of an attempt asks for, "" if it calls nothing."""
    for turn in attempt.turns:
        for call in turn.calls:
            return call.name
    return ""


def _price(offer: Offer) -> int:
    return offer["price"]


def _experts(task: Task) -> list[Offer]:
    return [offer for offer in task.data["tools"] if is_expert(offer)]


def _reads_difficulty(rollout: Rollout, task: Task, attempt: Trajectory) -> bool:
    """Whether the first thought names the difficulty and the subject."""
    about = f"use for {task.data['difficulty']} {task.data['subject']} "
    return about in _first_turn(rollout, attempt)


def _first_turn(rollout, attempt) -> str:
    turn = attempt.turns[0]
    return rollout.tokenizer.decode(attempt.ids[turn.start : turn.end])


def _with(task: Task, tools: list[Offer]) -> Task:
    """Returns the task with other tools, and the bounds that follow from them."""
    return replace(
        task,
        bounds=bounds(tools, task.data["difficulty"]),
        offers={offer["name"]: offer["what"] for offer in tools},
        data=task.data | {"tools": tools},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
