"""Shows recorded attempts: a tree of the calls with what each cost, and all that was written."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nanorchestra.records import Preference
from nanorchestra.schemas import Json
from nanorchestra.units import bill, dollars, seconds

SHOWN_CHARS = 100  # of arguments and of a result


class Attempt(NamedTuple):
    """What a page shows of a row that training.trajectories.to_row made."""

    question: str
    preference: str
    wish: str  # the name of the preference
    reward: float
    summary: str
    tree: str
    text: list[Json]  # parts with their role, "assistant" or "tool"; of a training run alone

    @classmethod
    def of(cls, row: Json) -> "Attempt":
        """Returns the attempt of a row."""
        task, reward = row["task"], row["reward"]
        summary = f"reward {reward:.3f}"
        if row.get("advantage"):
            summary += f", advantage {row['advantage']:+.2f}"
        summary += f", {bill(row['cost_usd'], row['latency_s'])}"
        summary += f", {row['status']}: {_short(row['answer'])}"
        return cls(
            question=_short(task["question"]),
            preference=task["preference"]["text"],
            wish=Preference(**task["preference"]).name,
            reward=reward,
            summary=summary,
            tree=tree(row),
            text=row.get("text", []),
        )


Pair = tuple[Attempt, Attempt]  # of two policies at the same task


def instructive(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns for each wish the task that the first side wins by most, and the one it loses so."""
    pairs_of = defaultdict(list)  # by wish
    for first, second in pairs:
        pairs_of[first.wish].append((first, second))
    chosen = []
    for _, found in sorted(pairs_of.items()):
        found.sort(key=_lead)
        if _lead(found[-1]) > 0:
            chosen.append(found[-1])
        if _lead(found[0]) < 0:
            chosen.append(found[0])
    return chosen


def _lead(pair: Pair) -> float:
    first, second = pair
    return first.reward - second.reward


def tree(row: Json) -> str:
    """Returns the tree of a row that training.trajectories.to_row made.

    A branch has name, arguments, result, US dollars, seconds, those of them that it waited for an
    endpoint or a worker, an expert's tokens and its retries.
    Calls that a call made are its branches; their cost is part of its own.
    """
    lines = [_short(row["task"]["question"])]
    for count, turn in enumerate(row["turns"], 1):
        lines.append(f"turn {count}: {turn['end'] - turn['start']} tokens")
        for call, result in zip(turn["calls"], turn["results"], strict=False):
            lines += _branches(call | result, "  ")
    own, whole = row.get("policy_usd", 0.0), row["cost_usd"]
    calls_usd = row.get("calls_usd", whole)
    spent = f"policy {dollars(own)} + calls {dollars(calls_usd)} = {dollars(whole)}"
    if not row.get("priced", True):  # by evaluate.py
        spent = f"policy without a price + calls {dollars(calls_usd)}"
    lines.append(spent)
    return "\n".join([*lines, f"{row['status']}: {_short(row['answer'])}"])


def _branches(call: Json, indent: str) -> Iterator[str]:
    """Yields the lines of a call and of those that it made."""
    name = f"{call['name']}/{call['alias']}" if call["alias"] else call["name"]
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    spent = [bill(call["cost_usd"], call["latency_s"])]
    if call.get("waited_s", 0.0) >= 0.05:
        spent.append(f"{seconds(call['waited_s'])} waited")
    if call["output_tokens"]:
        spent.append(f"{call['input_tokens']} + {call['output_tokens']} tokens")
    if call["retries"]:
        spent.append(f"{call['retries']} retries")
    yield f"{indent}{name} {_short(arguments)}: {_short(call['content'])} ({', '.join(spent)})"
    for inner in call["parts"]:
        yield from _branches(inner, indent + "  ")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[:SHOWN_CHARS] + "..."
