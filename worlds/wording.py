"""Translates between the weights of a preference and words, both ways.

The reward holds a preference as weights; the policy reads it as words. What a user types states one
of them, sometimes both. `understood` completes it: weights without words get the sentences that
policies were trained on, words without weights get the weights that they state, and a ban in words
becomes a ban that the loop enforces.
"""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from nanorchestra.records import Preference
from nanorchestra.schemas import Json
from worlds import preferences

Weights = tuple[float, float, float]  # of outcome, cost and latency
WEIGHED = {"outcome", "accuracy", "cost", "latency"}  # entries of a vector that are Weights

# What a clause is about, by its words.
ABOUT = {
    "outcome": r"right|correct\w*|accura\w+|mistakes?|errors?|wrong|perfect\w*|precise\w*|guess",
    "cost": (
        r"cheap\w*|inexpensive\w*|expensive|frugal\w*|econom\w+|thrift\w*|budget|money|costs?|costly"
        r"|spend\w*|price\w*|(?:the|my|our) bill(?! of)|cents?|dollars?|sav(?:e|es|ing)"
    ),
    "latency": (
        r"fast\w*|quick\w*|hurry|rush|soon\w*|speed\w*|prompt\w*|urgent\w*|asap|right away|at once"
        r"|immediately|time|wait\w*|slow\w*|delay|seconds?|minutes?|(?:take|too) long"
    ),
}
# "Whatever the cost", "time does not matter", "take your time": the clause waives what it names.
WAIVED = (
    r"\bwhatever\b|\bat any\b|\bregardless\b|\bignore\b|\bun(?:important|limited)\b"
    r"|\bno (?:matter|rush|hurry|problem|object|issue|limit)\b|\btake (?:your|all the)\b"
    r"|\bslow is\b|\bspend what\b|\bnot (?:the|in a|cheap\w*|fast\w*|quick\w*)\b"
    r"|(?:\bnot|\bdont|n't) (?:matter|mind|care|worry|important|rush|hurry|count)"
)
# Clauses that a weight of a half is worded by.
HALF = (
    r"\ba little\b|\bsomewhat\b|\breasonable\b|\brather\b|\btry\b|\beye on\b|\bif you can\b"
    r"|\btoo long\b|\bbe nice\b|\bcareless\b|\bfairly\b|\bwould suit\b"
)
# Clauses by which a right answer counts a half.
LENIENT = (
    r"\bguess\b|\bneed not\b|\bnot needed\b|\blive with\b|\bgood enough\b"
    r"|\bdo not mind an (?:error|mistake)"
)
BALANCE = r"\bbalanc\w*|\bweigh\b|\bmind both\b"
# What stands before the name of something that must not be used: "never use", "stay away from".
BAN = re.compile(
    r"(?:\b(?:never|not|dont|cannot)|n't)(?:,? ever)?"
    r" (?:use|call|ask|query|invoke|run|touch|contact|trust|want|rely on):? "
    r"|\b(?:avoid|without) (?:using|asking|calling) "
    r"|\b(?:stay|keep) away from |\bhands off |\bnothing may go through |\b(?:use no|forbid|ban) "
)
# The same before a name that is no everyday word, or has a noun after it: "no gpt-5", "avoid the
# search tool"; "avoid code duplication" is no ban.
WEAK_BAN = re.compile(r"\b(?:no|not|avoid|without|leave) ")
# Names of tools, kinds and models that are everyday words as well.
EVERYDAY = {
    "answer",
    "code",
    "docs",
    "expert",
    "function",
    "notes",
    "open",
    "records",
    "search",
    "web",
}
EVERYDAY |= {"large", "medium", "small"}
ARTICLE = re.compile(r"(?:the|any|an?|all) ")
NOUN = re.compile(r" (?:models?|tools?|experts?)\b| (?:out|alone)\b")
END = re.compile(
    r"\s*(?:$|[.,;:!?)]|(?:and|or|nor|but|please|here|at all|(?:for|of) (?:this|that|it)|to be)\b)"
)
MORE = re.compile(r",? (?:and|or|nor) (?:no |not )?|, (?:no |not )?")  # goes on with another name
AFTER = r"(?: (?:models?|tools?))? (?:must|may|should|can) ?(?:not|n't) be (?:used|called|asked)"


def weights_in(text: str) -> Weights | None:
    """Returns the weights of outcome, cost and latency that words state; None if they state none.

    What is not mentioned has its usual weight: 1 for the outcome, 0 for cost and latency.
    """
    stated: dict[str, float] = {}
    for sentence in re.split(r"[.;!?]", _plain(text)):
        if re.search(BALANCE, sentence):
            stated |= {"cost": 0.5, "latency": 0.5}
            continue
        for clause in re.split(r"[,:]| but ", sentence):
            preferred = re.split(r" (?:over|rather than|instead of) ", clause)[0]
            stated |= _clause_weights(preferred)
    if not stated:
        return None
    return stated.get("outcome", 1.0), stated.get("cost", 0.0), stated.get("latency", 0.0)


def _clause_weights(clause: str) -> dict[str, float]:
    """Returns the weights that one clause states, by the name of what they weigh."""
    if re.search(LENIENT, clause):
        return {"outcome": 0.5}
    waived = re.search(WAIVED, clause)
    weight = 0.5 if re.search(HALF, clause) else 1.0
    weights = {}
    for name, words in ABOUT.items():
        if not re.search(rf"\b(?:{words})\b", clause):
            continue
        if name != "outcome":
            if not waived:
                weights[name] = weight
        elif "right away" not in clause:  # which is about time
            weights["outcome"] = 1.0
    return weights


def bans_in(text: str, names: Iterable[str]) -> list[str]:
    """Returns those of the names that a text forbids: "never use gpt-5", "no web search".

    Words that only contain a name are no ban: "do not use large numbers", "there is no answer".
    """
    plain, patterns = _unquoted(text), _patterns(names)
    bans = []
    for start in BAN.finditer(plain):
        bans += _listed(plain, start.end(), patterns, weak=False)
    for start in WEAK_BAN.finditer(plain):
        bans += _listed(plain, start.end(), patterns, weak=True)
    for name, pattern in patterns.items():
        if re.search(rf"(?<![\w-])(?:{pattern.pattern}){AFTER}", plain):
            bans.append(name)
    return list(dict.fromkeys(bans))


def unknown_ban(text: str, names: Iterable[str]) -> str:
    """Returns what a text forbids that is none of the names, "" if there is nothing.

    "never use gpt-55" is an example; so is "do not use large numbers".
    """
    plain, patterns = _unquoted(text), _patterns(names)
    for start in BAN.finditer(plain):
        if not _listed(plain, start.end(), patterns, weak=False):
            return re.split(r"[.,;:!?)]", plain[start.end() :])[0].strip()
    return ""


def _unquoted(text: str) -> str:
    return re.sub(r"[`\"“”*]|(?<!\w)'|'(?!\w)", "", _plain(text))


def _patterns(names: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Returns the pattern of each name, the longest name first."""
    return {name: _pattern(name) for name in sorted(names, key=len, reverse=True)}


def _pattern(name: str) -> re.Pattern[str]:
    """Returns how a text may write a name: in any case, with spaces, hyphens or underscores."""
    parts = [re.escape(part) for part in re.split(r"[\s_-]+", name.casefold())]
    return re.compile(r"[\s_-]+".join(parts) + r"(?![\w-])")


def _listed(text: str, at: int, patterns: dict[str, re.Pattern[str]], weak: bool) -> list[str]:
    """Returns the names that stand in a row at a place of a text: "A, B or the C tool".

    weak: after words like "no", which forbid an everyday word only where a noun follows it.
    """
    listed: list[str] = []
    while True:
        if article := ARTICLE.match(text, at):
            at = article.end()
        name, end = _name_at(text, at, patterns)
        if name is None:
            return listed
        noun = NOUN.match(text, end)
        at = noun.end() if noun else end
        everyday = weak and not noun and not listed and name.casefold() in EVERYDAY
        if everyday or not END.match(text, at):
            return listed
        listed.append(name)
        more = MORE.match(text, at)
        if not more:
            return listed
        at = more.end()


def _name_at(text: str, at: int, patterns: dict[str, re.Pattern[str]]) -> tuple[str | None, int]:
    """Returns the first of the names that stands at a place of a text, and where it ends."""
    for name, pattern in patterns.items():
        if match := pattern.match(text, at):
            return name, match.end()
    return None, at


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
