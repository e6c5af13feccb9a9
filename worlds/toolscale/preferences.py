"""What users prefer, in words and as a vector; and what a task offers: experts under permuted aliases, with rewritten descriptions and prices.

A preference weighs the outcome, the cost, the latency and single tools. `write` puts it in words, `read` gets the vector back from the words.
Phrasings, experts and price schedules of the split "held_out" never occur in "train".
"""

from __future__ import annotations

import random
import re
from typing import Any, Sequence

from nanorchestra.records import Preference
from reward import PRICES

SPLITS = ("train", "held_out")
# (what, weight) -> phrasings of each split. What is not said weighs 1 for the outcome and 0 for the rest.
PHRASES: dict[tuple[str, float], dict[str, tuple[str, ...]]] = {
    ("outcome", 1.0): {
        "train": (
            "It must be right.",
            "Getting it right matters most.",
            "I cannot afford a mistake.",
            "Correctness comes first.",
            "Please make no errors.",
        ),
        "held_out": ("Above all, be correct.", "A wrong result is useless to me."),
    },
    ("outcome", 0.5): {
        "train": (
            "A good guess is fine.",
            "It need not be perfect.",
            "I can live with a small mistake.",
            "Good enough will do.",
        ),
        "held_out": ("Perfection is not needed here.", "I do not mind an error now and then."),
    },
    ("cost", 1.0): {
        "train": (
            "Spend as little as you can.",
            "Keep it as cheap as possible.",
            "My budget is very tight.",
            "Every cent counts.",
            "Use the least money you can.",
        ),
        "held_out": ("I have next to no money for this.", "Make this cost almost nothing."),
    },
    ("cost", 0.5): {
        "train": (
            "Mind the cost a little.",
            "Try not to waste money.",
            "Keep an eye on the price.",
            "Be reasonable about spending.",
        ),
        "held_out": ("Do not be careless with money.", "Watch the bill somewhat."),
    },
    ("latency", 1.0): {
        "train": (
            "I need it right away.",
            "Be as quick as you can.",
            "Every second counts.",
            "I am in a great hurry.",
        ),
        "held_out": ("There is no time to lose.", "Answer me without any delay."),
    },
    ("latency", 0.5): {
        "train": (
            "Do not take too long.",
            "I would rather not wait much.",
            "Keep the waiting short if you can.",
            "Some speed would be nice.",
        ),
        "held_out": ("A fairly prompt answer would suit me.", "Try not to keep me waiting."),
    },
    ("tool", -1.0): {
        "train": (
            "Do not use {tool}.",
            "Stay away from {tool}.",
            "Leave {tool} out of this.",
            "I do not trust {tool}.",
            "Please avoid {tool}.",
        ),
        "held_out": ("Keep your hands off {tool}.", "Nothing may go through {tool}."),
    },
    ("tool", 1.0): {
        "train": (
            "Use {tool} when you can.",
            "I would like {tool} to be used.",
            "Prefer {tool}.",
            "I have good experience with {tool}.",
        ),
        "held_out": ("Make good use of {tool}.", "Rely on {tool} where it helps."),
    },
}
DEFAULTS = {"outcome": 1.0, "cost": 0.0, "latency": 0.0}
# model -> (skill: the share of turns that its simulation does right, mean seconds, words for what it can do). Held-out models are never met in training.
EXPERTS: dict[str, dict[str, tuple[float, float, tuple[str, ...]]]] = {
    "train": {
        "gpt-5": (
            0.97,
            96,
            (
                "strong in nearly everything",
                "the most able one, for hard cases",
                "rarely wrong, even on long requests",
            ),
        ),
        "gpt-5-mini": (
            0.90,
            27,
            (
                "able, but it can stumble over long requests",
                "good at usual cases",
                "reliable for requests of a few steps",
            ),
        ),
        "Qwen/Qwen3-32B": (
            0.82,
            11,
            ("fine for easy cases", "quick, and right on simple requests", "decent at short tasks"),
        ),
        "meta-llama/Llama-3.3-70B-Instruct": (
            0.80,
            15,
            (
                "a solid generalist for plain requests",
                "gets simple things done",
                "fair at following rules",
            ),
        ),
        "Qwen/Qwen3-235B-A22B": (
            0.93,
            40,
            (
                "strong at rules and numbers",
                "good at long chains of steps",
                "careful with conditions",
            ),
        ),
        "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (
            0.84,
            14,
            ("able at medium requests", "good value for usual cases", "mostly right on rules"),
        ),
    },
    "held_out": {
        "claude-opus": (
            0.97,
            60,
            ("thorough, for the hardest cases", "seldom mistaken, whatever the request"),
        ),
        "claude-sonnet": (0.94, 30, ("dependable on most requests", "good with long policies")),
        "o3-mini": (0.88, 20, ("sound at step by step work", "right on most usual cases")),
    },
}
SCHEDULES = {
    "train": range(8),
    "held_out": range(8, 11),
}  # price lists; each multiplies every model's list price by its own factor
_DESCRIPTIONS = (
    "{alias}: {skill}. Price: ${input} per million input tokens, ${output} per million output tokens; about {seconds} s an answer.",
    "{alias} ({skill}; takes some {seconds} seconds; ${input}/M in, ${output}/M out)",
    "{alias} is {skill}. It charges ${input} (input) and ${output} (output) a million tokens and needs around {seconds} s.",
)


def draw(rng: random.Random, tools: Sequence[str]) -> Preference:
    """A preference over the tools named; `text` is empty (see `write`)."""
    outcome, cost, latency = rng.choice(
        (
            (1.0, 0.0, 0.0),
            (1.0, 0.5, 0.0),
            (1.0, 0.0, 0.5),
            (1.0, 0.5, 0.5),
            (0.5, 1.0, 0.0),
            (0.5, 0.0, 1.0),
            (1.0, 1.0, 0.0),
            (0.5, 0.5, 1.0),
        )
    )
    weights = {
        tool: rng.choice((-1.0, 1.0))
        for tool in rng.sample(list(tools), min(len(tools), rng.choice((0, 0, 1, 1, 2))))
    }
    return Preference("", outcome, cost, latency, weights)


def write(preference: Preference, rng: random.Random, split: str) -> str:
    """The preference in words of the split: a sentence for each weight, in any order."""
    said = [
        (what, getattr(preference, what), "")
        for what, usual in DEFAULTS.items()
        if getattr(preference, what) != usual or what == "outcome" and rng.random() < 0.5
    ]
    said += [("tool", weight, tool) for tool, weight in preference.tools.items()]
    rng.shuffle(said)
    return " ".join(
        rng.choice(PHRASES[what, weight][split]).format(tool=tool) for what, weight, tool in said
    )


def read(text: str) -> Preference:
    """The vector that the words stand for, of either split. Raises ValueError for a sentence that is none of the phrasings."""
    values, tools = dict(DEFAULTS), {}
    for sentence in re.findall(r"[^.]+\.", text):
        for (what, weight), phrasings in PHRASES.items():
            match = next(
                (
                    m
                    for split in SPLITS
                    for phrase in phrasings[split]
                    if (
                        m := re.fullmatch(
                            re.escape(phrase).replace(r"\{tool\}", r"(\S+)"), sentence.strip()
                        )
                    )
                ),
                None,
            )
            if match:
                if what == "tool":
                    tools[match[1]] = weight
                else:
                    values[what] = weight
                break
        else:
            raise ValueError(f"no known phrasing: {sentence.strip()!r}")
    return Preference(text, **values, tools=tools)


def catalogue(rng: random.Random, split: str, count: int = 3) -> list[dict[str, Any]]:
    """`count` experts of the split as a task offers them: alias, model (not shown to the policy), description, prices in dollars a million tokens, seconds, skill."""
    number = rng.choice(SCHEDULES[split])
    offered = []
    for position, model in enumerate(
        rng.sample(sorted(EXPERTS[split]), min(count, len(EXPERTS[split]))), 1
    ):
        skill, seconds, words = EXPERTS[split][model]
        factor = random.Random(f"schedule/{number}/{model}").uniform(0.4, 2.5)
        prices = [
            float(f"{price * factor:.2g}")
            for price in (PRICES[model].input_per_million, PRICES[model].output_per_million)
        ]
        latency = float(round(seconds * rng.uniform(0.7, 1.4)))
        text = rng.choice(_DESCRIPTIONS).format(
            alias=f"expert-{position}",
            skill=rng.choice(words),
            input=prices[0],
            output=prices[1],
            seconds=round(latency),
        )
        offered.append(
            {
                "alias": f"expert-{position}",
                "model": model,
                "description": text,
                "input_per_million": prices[0],
                "output_per_million": prices[1],
                "latency_s": latency,
                "skill": skill,
                "schedule": number,
            }
        )
    return offered
