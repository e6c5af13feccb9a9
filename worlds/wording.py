"""Translates between the weights of a preference and words, both ways.

The reward holds a preference as weights; the policy reads it as words. What a user types states one
of them, sometimes both. `understood` completes it: weights without words get the sentences that
policies were trained on, words without weights get the weights that they state, and a ban in words
becomes a ban that the loop enforces.
"""

import math
import re
from collections.abc import Collection
from dataclasses import replace

from nanorchestra.records import Preference
from nanorchestra.schemas import Json
from worlds import preferences
from worlds.bans import bans_in

Weights = tuple[float, float, float]  # of outcome, cost and latency
WEIGHED = {"outcome", "accuracy", "cost", "latency"}  # entries of a vector that are Weights

# What a clause is about, by its words: of what is wanted, and of what is not.
ABOUT = {
    "outcome": (
        r"right(?! away| now)|correct\w*|accura\w+|precis\w+|exact\w*|sure|certain\w*|carefully"
        r"|careful(?! with)|reliab\w+|quality|perfect\w*|thorough\w*|best|true|truth|flawless\w*"
        r"|verif\w+|check\w*|mistakes?|errors?|wrong|false|incorrect|guess\w*|flaws?|slips?"
    ),
    "cost": (
        r"cheap\w*|inexpensive\w*|economical\w*|frugal\w*|thrift\w*|affordable|budgets?|costs?"
        r"|afford(?! an?y? \w*(?:mistake|error|slip|flaw|wrong|false))|costing|prices?|spend\w*|pay"
        r"|paying|money|cash|cents?|dollars?|bills?|fees?|sav(?:e|ings?)|wallet|purse|penn(?:y|ies)"
        r"|expenses?|expensive|costly|dear|pric(?:e?y|ier)"
    ),
    "latency": (
        r"fast\w*|quick\w*|swift\w*|rapid\w*|speed\w*|prompt\w*|soon\w*|hurry|rush|urgent\w*|asap"
        r"|immediate\w*|instant\w*|at once|right away|now|time|seconds?|minutes?|moments?|latency"
        r"|duration|short\w*|slow\w*|late|long(?:er)?|wait\w*|delay\w*|deadline"
    ),
}
ABOUT = {name: re.compile(rf"\b(?:{words})\b") for name, words in ABOUT.items()}
# A clause that waives what it names: "time does not matter", "slow is fine", "spend what you like".
WAIVED = re.compile(
    r"\b(?:not|no|never|nothing|neither|none|\w+n't|dont)"
    r" (?:(?:a|an|the|my|your|in|is|be|to|of|on|really|very|any|great|need|have) )*"
    r"(?:matters?|mind|care|caring|worr\w+|important|counts?|object|problem|concern(?:s|ed)?"
    r"|consider|issue|limits?|rush\w*|hurry|bother\w*|priority|need(?:ed)?|necessary|factor|role)\b"
    r"|\bneither\b.* (?:matters?|counts?)\b"
    r"|\b(?:irrelevant|unimportant|secondary|unlimited|ignor\w+|forget|spare no|to burn)\b"
    r"|\b(?:take your|all the|plenty of|enough|lots of|as much) (?:time|money)\b|\bmoney is there\b"
    r"|\b(?:i|it|that|this|they|we)(?: (?:can|could|may|might|will)|'ll) (?:\w+ly )?"
    r"(?:be|cost|take|wait|pay)\b"
    r"|\b(?:spend|pay) (?:what|freely|any|whatever)|\bcomes? (?:later|last)\b"
    r"|\b(?:fine|ok|okay|all ?right|acceptable|willing|happy|ready|glad|patient|welcome)\b"
)
# What follows is waived: "even if it is slow", "accuracy over speed", "fast, not cheap".
CONCESSION = re.compile(
    r"\b(?:even (?:if|when|though|at)|although|though|despite|whatever|however|regardless|no matter"
    r"|irrespective|never mind|hang|damn|accept|at any|at all costs?|i (?:don't|do not) mind"
    r"|i (?:don't|do not) care|rather than|instead of|over|if (?!you|possible|need))"
    r"|^ ?(?:and )?not (?!too\b|more\b)"
)
# What follows is wanted: "rather slow than wrong", "trade time for money".
PREFERRED = re.compile(r".*\b(?:(?:rather|sooner|better) .*than|(?:sacrifice|trade) .*for) ")
CLAUSE = re.compile(
    r"[,;:!?()]|\.(?: |$)| - | (?:but|so|because|since|yet|only|just) "
    r"| and (?=(?:be|do|keep|make|get|give|answer|never|don't|please|there|i) )"
)
# A clause with one of these states a weight of a half.
HALF = re.compile(
    r"\b(?:not wait much|a little|somewhat|reasonable|try|eye on|if you can|too long|be nice"
    r"|careless|fairly)\b"
)
# By one of these a right answer counts a half.
LENIENT = re.compile(
    r"\b(?:guess (?:is|will)|need not be (?:perfect|right|exact)|not needed|live with|good enough"
    r"|do not mind an (?:error|mistake))\b"
)
# Cost and time count a half each, whatever else is named.
BALANCE = re.compile(
    r"(?<!bank )(?<!my )\bbalanc(?:e|ed|ing)\b|\b(?:compromise|trade-?offs?|moderat\w+|mind both"
    r"|equally|alike|up to you|as you like|no (?:special |particular )?(?:preferences?|wish)"
    r"|(?:middle|golden|happy) (?:way|ground|mean|medium|course))\b"
)


def weights_in(text: str) -> Weights | None:
    """Returns the weights of outcome, cost and latency that words state; None if they state none.

    What is not mentioned has its usual weight: 1 for the outcome, 0 for cost and latency. It looks
    at words, clause by clause, and so misses or misreads a part of what people say; `/prefer` shows
    what it has read, and a vector says more exactly what is meant.
    """
    plain = " ".join(_plain(text).split())
    if BALANCE.search(plain):
        return 1.0, 0.5, 0.5
    stated: dict[str, float] = {}
    for clause in CLAUSE.split(plain):
        if LENIENT.search(clause):
            stated["outcome"] = 0.5
            continue
        wanted = CONCESSION.split(PREFERRED.sub("", clause))[0]
        if WAIVED.search(wanted):
            continue
        weight = 0.5 if HALF.search(wanted) else 1.0
        for name, words in ABOUT.items():
            if words.search(wanted):
                stated[name] = 1.0 if name == "outcome" else weight
    if not stated:
        return None
    return stated.get("outcome", 1.0), stated.get("cost", 0.0), stated.get("latency", 0.0)


def words_for(weights: Weights) -> str:
    """Returns sentences for weights, those that policies were trained on.

    Weights count by their ratio to the largest, rounded to 0, 1/2 or 1.
    """
    largest = max(*weights, 1e-9)
    sentences = []
    for (name, default), weight in zip(preferences.DEFAULTS, weights, strict=True):
        rounded = math.floor(2 * weight / largest + 0.5) / 2
        if name == "outcome" and rounded == 0.0:
            rounded = 0.5  # the least that has words
        if rounded != default:
            sentences.append(preferences.PHRASES[name][str(rounded)]["train"][0])
    return " ".join(sentences)


def tool_words(tools: dict[str, float]) -> str:
    """Returns a sentence for the weight of each tool, one that policies were trained on."""
    sentences = []
    for tool, weight in tools.items():
        sign = str(math.copysign(1.0, weight))
        phrase = preferences.PHRASES["tool"][sign]["train"][0]
        sentences.append(phrase.format(tool=tool))
    return " ".join(sentences)


def understood(
    text: str, vector: Json, where: str, names: Collection[str], ban_names: Collection[str]
) -> Preference:
    """Returns the preference of a text and a vector, with words and weights that say the same.

    A weight may have one of `names`, a ban one of `ban_names`. UserError, which begins with
    `where`, for any other.
    """
    preference = Preference.of(text, vector, where, names, ban_names)
    stated = weights_in(text)
    if WEIGHED & {*vector}:
        if stated is None:
            weights = preference.outcome, preference.cost, preference.latency
            preference = replace(preference, text=_joined(text, words_for(weights)))
    elif stated is not None:
        outcome, cost, latency = stated
        preference = replace(preference, outcome=outcome, cost=cost, latency=latency)
    unsaid = {}
    for name, weight in preference.tools.items():
        if weight and name not in text:
            unsaid[name] = weight
    bans = [name for name in bans_in(text, ban_names) if name not in preference.never]
    return replace(
        preference,
        text=_joined(preference.text, tool_words(unsaid)),
        never=[*preference.never, *bans],
    )


def described(preference: Preference) -> str:
    """Returns what a preference weighs and forbids, in a line."""
    weights = {
        "right answer": preference.outcome,
        "low cost": preference.cost,
        "short time": preference.latency,
    }
    weights |= preference.tools
    parts = [f"{name} {weight:g}" for name, weight in weights.items() if weight]
    lines = [f"weights: {', '.join(parts)}"]
    if preference.never:
        lines.append(f"never: {', '.join(preference.never)}")
    if preference.usd is not None:
        lines.append(f"at most ${preference.usd:g}")
    if preference.seconds is not None:
        lines.append(f"at most {preference.seconds:g} s")
    return "; ".join(lines)


def _plain(text: str) -> str:
    return text.casefold().replace("’", "'")


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)
