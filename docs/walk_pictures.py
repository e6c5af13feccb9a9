"""Draws the pictures of docs/walk.md from docs/walk.json, which walk_run.py recorded.

They are 420 pixels wide and have no letter below 13, so that a phone shows them legibly.
pictures.py writes the files.
"""

from __future__ import annotations

import json
import re
import textwrap
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from drawing import Picture

Json = dict[str, Any]
RECORD = Path(__file__).with_name("walk.json")
WIDTH = 420
LEFT = 16
RIGHT = WIDTH - LEFT
FIRST = 104  # where the pages begin that are drawn one by one
SHOWN, BESIDE = 2, 1  # the attempt of the first picture, counted from 0, and one to compare
THINK = re.compile(r"<think>\n(.*)\n</think>\n\n(.*)<\|im_end\|>", re.DOTALL)
NAME = re.compile(r'"name": "(.*?)"')


def draw_walk() -> list[Picture]:
    """Returns the six pictures of the walk."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return [
        attempt(record),
        group(record),
        preferences(record),
        prefix_tree(record),
        choice(record),
        tokens(record),
        tiles(record),
    ]


def dollars(usd: float) -> str:
    """Returns an amount in thousandths of a dollar."""
    return f"{usd * 1e3:.2f} m$"


class Column:
    """A picture that grows downwards; `y` is where the next part begins."""

    def __init__(self, name: str, title: str):
        self.picture = Picture(name, WIDTH, 0, title)
        self.y = 30

    def heading(self, words: str) -> None:
        """Writes a bold line."""
        self.picture.text(LEFT, self.y, words, 15, bold=True)
        self.y += 22

    def note(self, words: str, width: int = 58) -> None:
        """Writes soft lines."""
        for line in textwrap.wrap(words, width):
            self.picture.text(LEFT, self.y, line, 13, kind="soft")
            self.y += 18

    def panel(self, title: str, right: str, lines: list[str], kind: str) -> None:
        """Draws a box with a bold title, words at its right, and lines of fixed width."""
        height = 28 + 19 * len(lines) + 4
        self.picture.box(LEFT, self.y, RIGHT - LEFT, height, kind)
        self.picture.text(LEFT + 10, self.y + 20, title, 13, bold=True)
        self.picture.text(RIGHT - 10, self.y + 20, right, 13, "end", "soft")
        for number, line in enumerate(lines):
            aligned = line.replace("  ", "\N{NO-BREAK SPACE}" * 2)  # SVG joins plain spaces
            self.picture.text(LEFT + 10, self.y + 41 + 19 * number, aligned, 13, mono=True)
        self.y += height + 8

    def end(self) -> Picture:
        """Returns the picture, as high as it has grown."""
        self.picture.height = self.y + 4
        return self.picture


def attempt(record: Json) -> Picture:
    """One attempt: what is read, what is sampled, what the tools say and charge, the reward."""
    column = Column("walk-attempt", "One attempt at a task, from the prompt to its reward")
    task, played = record["task"], record["attempts"][SHOWN]
    words = f"{played['ids']} tokens, {played['sampled']} of them sampled"
    column.heading(f"Attempt {SHOWN + 1}: {words}")
    _key(column, (("given to the model", "first"), ("sampled by it", "second")))
    wrap = 46
    lines = ["(seconds, cents, expert, name of the tool)"]
    for tool in task["tools"]:
        lines.append(f"{tool['latency']:02d}s {tool['price']:02d}c {tool['what']} {tool['name']}")
    for words in (task["question"], task["preference"]):
        lines += textwrap.wrap(words, wrap)
    column.panel("prompt", f"{played['prompt_ids']} tokens", lines, "first")
    for number, turn in enumerate(played["turns"]):
        thought, rest = THINK.match(turn["text"]).groups()
        lines = textwrap.wrap(thought, wrap)
        called = NAME.search(rest)
        what = f"turn {number + 1}: thought and {'call' if called else 'answer'}"
        lines.append(f"-> {called[1]}" if called else f"-> {rest}")
        column.panel(what, f"{turn['ids']} tokens", lines, "second")
        for name, result in zip(turn["calls"], turn["results"], strict=True):
            bill = f"{dollars(result['usd'])}, {result['s']:.1f} s"
            column.panel(f"result of {name}", bill, [result["content"]], "first")
    calls_usd = sum(r["usd"] for turn in played["turns"] for r in turn["results"])
    calls_s = sum(r["s"] for turn in played["turns"] for r in turn["results"])
    own_s = played["s"] - calls_s
    share = 1 - played["s"] / task["most_s"]
    column.panel(
        "reward",
        f"{played['reward']:.3f}",
        [
            f"cost   {calls_usd * 1e3:.2f} + {(played['usd'] - calls_usd) * 1e3:.2f} own tokens"
            f" = {dollars(played['usd'])}",
            f"time   {calls_s:.1f} + {own_s:.1f} own tokens = {played['s']:.1f} s",
            f"right  {played['answer']} is the answer: {played['outcome']:.0f}",
            f"R = {played['outcome']:.0f} * (1 - {played['s']:.1f} / {task['most_s']:.0f})"
            f" = {share:.3f}",
        ],
        "both",
    )
    return column.end()


def _key(column: Column, entries: tuple[tuple[str, str], ...]) -> None:
    """Draws what the colours mean, in one line."""
    x = LEFT
    for words, kind in entries:
        column.picture.box(x, column.y - 12, 14, 14, kind)
        column.picture.text(x + 20, column.y, words, 13, kind="soft")
        x += 38 + 7 * len(words)
    column.y += 12


def group(record: Json) -> Picture:
    """Eight attempts at one task: their calls, rewards and advantages."""
    column = Column("walk-group", "A group of eight attempts with their rewards and advantages")
    picture, attempts = column.picture, record["attempts"]
    rewards = [each["reward"] for each in attempts]
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    column.heading("Eight attempts at the same task")
    column.note(f"the user wants it fast; reward: mean {mean:.3f}, std {std:.3f}")
    column.y += 16
    zero, scale = 318, 20  # pixels of an advantage of 1; the largest of eight is 2.47
    for x, words, anchor in (
        (LEFT + 76, "asked", "start"),
        (220, "time", "end"),
        (280, "reward", "end"),
        (zero - 16, "advantage", "start"),
    ):
        picture.text(x, column.y, words, 13, anchor, "soft")
    column.y += 8
    for number, each in enumerate(attempts):
        top = column.y + number * 32
        picture.text(LEFT, top + 18, str(number + 1), 13, bold=True)
        picture.text(LEFT + 18, top + 18, "right" if each["outcome"] else "wrong", 13)
        x = LEFT + 66
        for turn in each["turns"]:
            for name in turn["calls"]:
                picture.label(x, top + 3, 28, 22, [name[0].upper()], "second", size=13)
                x += 32
        picture.text(220, top + 18, f"{each['s']:.0f} s", 13, "end", mono=True)
        picture.text(280, top + 18, f"{each['reward']:.3f}", 13, "end", mono=True)
        size = each["advantage"] * scale
        picture.box(zero + min(size, 0), top + 3, abs(size), 22, "both" if size > 0 else "alarm", 1)
        words = f"{each['advantage']:+.2f}"
        picture.text(zero + max(size, 0) + 5, top + 18, words, 13, mono=True)
    picture.line((zero, column.y), (zero, column.y + 32 * len(attempts) - 4), arrow=False)
    column.y += 32 * len(attempts) + 14
    column.note("S, M, L: small, medium, large, in the order of asking")
    column.note(f"advantage = (reward - {mean:.3f}) / {std:.3f}")
    column.y -= 6
    return column.end()


def preferences(record: Json) -> Picture:
    """The rewards that the same attempts earn under four preferences."""
    column = Column("walk-preferences", "The rewards of the same attempts under four preferences")
    picture, attempts = column.picture, record["attempts"]
    column.heading("The same eight attempts, four preferences")
    column.note("bar: the reward; framed: the highest of a column")
    column.y += 14
    names = list(record["preferences"])
    first, width = 124, 72
    for place, name in enumerate(names):
        picture.text(first + place * width, column.y, name, 13, bold=True)
        weights = "  ".join(f"{weight:g}" for weight in record["preferences"][name]["weights"])
        picture.text(first + place * width, column.y + 18, weights, 13, kind="soft")
    picture.text(LEFT, column.y + 18, "weights", 13, kind="soft")
    column.y += 30
    for number, each in enumerate(attempts):
        top = column.y + number * 34
        called = "".join(n[0].upper() for turn in each["turns"] for n in turn["calls"])
        words = f"{number + 1}  {'right' if each['outcome'] else 'wrong'} {called}"
        picture.text(LEFT, top + 18, words, 13)
        for place, name in enumerate(names):
            rewards = record["preferences"][name]["rewards"]
            x, cell = first + place * width, width - 8
            picture.text(x + 6, top + 17, f"{rewards[number]:.2f}", 13, mono=True)
            picture.box(x, top + 22, cell, 6, "free", 0)
            if rewards[number]:
                picture.box(x, top + 22, cell * rewards[number], 6, "both", 0)
            if rewards[number] == max(rewards):
                picture.frame(x - 1, top + 1, cell + 2, 28)
    column.y += 34 * len(attempts) + 16
    column.note("weights: of a right answer, of low cost, of little time")
    column.y -= 6
    return column.end()


def prefix_tree(record: Json) -> Picture:
    """The pages of eight attempts after four steps of the engine, as a tree of prefixes."""
    column = Column("walk-pages", "Pages of eight attempts as a tree, after four steps")
    size = record["page_size"]
    column.heading(f"Pages of {size} tokens, after four steps")
    _key(column, (("read by several", "both"), ("by one", "second")))
    column.y += 6
    final = record["steps"][-1]["tables"]
    order = sorted(range(len(final)), key=lambda i: final[i])
    names = [f"{i + 1} {each['turns'][0]['calls'][0][0].upper()}" for i, each in numbered(record)]
    shared = next(
        depth for depth, pages in enumerate(zip(*final, strict=False)) if len({*pages}) > 1
    )
    trunk = max(1, shared - 5)  # pages that are drawn as one box
    cell = min(36, (RIGHT - FIRST) / (max(map(len, final)) - trunk))
    for step in record["steps"]:
        _tree(column, step, order, names, trunk, cell)
    column.note("S, M, L: the expert that the attempt asks first")
    column.y -= 6
    return column.end()


def numbered(record: Json) -> Any:
    """Returns pairs of an attempt's number, from 0, and the attempt."""
    return enumerate(record["attempts"])


def _tree(
    column: Column, step: Json, order: list[int], names: list[str], trunk: int, cell: float
) -> None:
    """Draws the block tables of a step: one row an attempt, a shared page as one box.

    The first `trunk` pages are one box, the others are `cell` pixels wide.
    """
    picture, tables = column.picture, step["tables"]
    alone = sum(len(table) for table in tables)
    picture.text(LEFT, column.y + 14, f"step {step['step']}", 13, bold=True)
    words = f"{step['tokens']} tokens computed, {step['held']} pages"
    if alone > step["held"]:
        words += f" ({alone} unshared)"
    picture.text(LEFT + 62, column.y + 14, words, 13, kind="soft")
    row = 20
    top = column.y + 26
    order = [i for i in order if tables[i]]  # at first one attempt alone has pages
    rows = [tables[i] for i in order]
    height = row * len(rows)
    kind = "both" if len(rows) > 1 else "second"
    for place, i in enumerate(order):
        picture.text(LEFT, top + place * row + 15, names[i], 13, kind="soft")
    picture.box(LEFT + 30, top, FIRST - LEFT - 30, height, kind, 2)
    picture.text((LEFT + 30 + FIRST) / 2, top + height / 2 + 5, f"0 to {trunk - 1}", 13, "middle")
    longest = max(len(table) for table in rows)
    for depth in range(trunk, longest):
        bounds = [0]
        for place, (above, below) in enumerate(pairwise(rows)):
            if above[depth : depth + 1] != below[depth : depth + 1]:
                bounds.append(place + 1)
        bounds.append(len(rows))
        x = FIRST + (depth - trunk) * cell
        for start, end in pairwise(bounds):
            page = rows[start][depth : depth + 1]
            if page:
                kind = "both" if end - start > 1 else "second"
                picture.box(x, top + start * row, cell, (end - start) * row, kind, 2)
                middle = top + (start + end) * row / 2 + 5
                picture.text(x + cell / 2, middle, str(page[0]), 13, "middle", mono=True)
    column.y = top + height + 16


def choice(record: Json) -> Picture:
    """What the group says about the word at which its attempts part, and what the step does."""
    column = Column("walk-choice", "The probabilities of a choice before and after one GRPO step")
    picture, found = column.picture, record["choice"]
    column.heading("One word, eight draws, one step")
    column.note(f'after "{found["before"].strip()}" the model names an expert')
    column.y += 10
    scale = 220  # pixels of a probability of 1
    for word, old, new in zip(found["words"], found["old"], found["new"], strict=True):
        draws = [each["advantage"] for each in found["group"] if each["word"] == word]
        top = column.y
        picture.text(LEFT, top + 16, word.strip(), 15, bold=True)
        picture.text(RIGHT, top + 16, f"push {sum(draws):+.2f}", 13, "end", mono=True)
        terms = " ".join(f"{value:+.2f}" for value in draws)
        picture.text(LEFT + 76, top + 16, terms, 13, kind="soft", mono=True)
        for line, (name, value, kind) in enumerate(
            (("before", old, "free"), ("after", new, "both" if new > old else "alarm"))
        ):
            y = top + 26 + line * 24
            picture.text(LEFT, y + 15, name, 13, kind="soft")
            picture.box(LEFT + 76, y, value * scale, 20, kind, 1)
            picture.text(LEFT + 84 + value * scale, y + 15, f"{value:.3f}", 13, mono=True)
        column.y += 92
    column.note("grey: the advantages of the attempts that drew the word")
    column.note("push: their sum; those of all eight add up to 0")
    column.y -= 6
    return column.end()


def tokens(record: Json) -> Picture:
    """The sampled tokens of two attempts, and how one step moves their log-probabilities."""
    column = Column("walk-tokens", "Tokens of two attempts that one step makes likelier or not")
    column.heading("Which tokens one step moves")
    _key(column, (("likelier", "both"), ("less likely", "alarm"), ("by under 0.02", "free")))
    for index in (SHOWN, BESIDE):
        played = record["attempts"][index]
        column.y += 28
        words = f"attempt {index + 1}: advantage {played['advantage']:+.2f}"
        column.picture.text(LEFT, column.y, words, 13, bold=True)
        column.y += 10
        _flow(column, record["tokens"][index])
    column.y += 24
    column.note("number: the change of the log-probability, from 0.1 on")
    column.note("framed: the model chooses (entropy from 0.3 nats on)")
    column.note("_ is a space, \\n a line break")
    column.y -= 6
    return column.end()


def _flow(column: Column, rows: list[Json]) -> None:
    """Writes tokens one after another, each in a box of the colour of its change."""
    picture, x, high = column.picture, LEFT, 24
    for row in rows:
        change = row["after"] - row["before"]
        text = row["text"].replace("\n", "\\n").replace("<|im_end|>", "<end>").strip(" ") or "_"
        if abs(change) >= 0.1:
            text += f" {change:+.2f}"
        width = 8 * len(text) + 6
        if x + width > RIGHT:
            x, column.y = LEFT, column.y + high + 4
        kind = "free" if abs(change) < 0.02 else "both" if change > 0 else "alarm"
        picture.box(x, column.y, width, high, kind, 2)
        if row["entropy"] >= 0.3:
            picture.frame(x, column.y, width, high)
        picture.text(x + 3, column.y + 17, text, 13, mono=True)
        x += width + 3
    column.y += high


def tiles(record: Json) -> Picture:
    """The tiles of the log-probability kernel: one token's row, and the merge of its tiles."""
    column = Column("walk-tiles", "How a kernel computes a log-probability tile by tile")
    picture, found = column.picture, record["kernel"]
    width, count = found["width"], len(found["top"])
    tall = -(-found["in_loss"] // found["rows"])
    column.heading(
        f"{found['in_loss']} tokens times {found['vocab']} logits: {tall} x {count} tiles"
    )
    column.note(f"a program owns a tile: {found['rows']} sampled tokens, {width} logits")
    chosen = found["target"] // width
    cell = (RIGHT - LEFT) / count
    for row in range(tall):
        for number in range(count):
            kind = "device" if row == found["row"] // found["rows"] else "free"
            kind = "second" if kind == "device" and number == chosen else kind
            picture.box(LEFT + number * cell, column.y + row * 10, cell, 10, kind, 0)
    column.y += tall * 10 + 26
    column.note(
        f'what these {count} programs write for one token, "{found["word"]}" (id '
        f"{found['target']}) in attempt {found['attempt']}:"
    )
    column.y += 14
    whole = max(found["top"])
    masses = [s * exp(m - whole) for m, s in zip(found["top"], found["sum"], strict=True)]
    total = sum(masses)
    for x, words, anchor in (
        (LEFT, "logits", "start"),
        (160, "max m", "end"),
        (228, "sum s", "end"),
        (246, "share of the softmax", "start"),
    ):
        picture.text(x, column.y, words, 13, anchor, "soft")
    column.y += 8
    for number in range(count):
        top = column.y + number * 24
        ids = f"{number * width}-{min((number + 1) * width, found['vocab']) - 1}"
        picture.text(LEFT, top + 16, ids, 13, mono=True)
        picture.text(160, top + 16, f"{found['top'][number]:.2f}", 13, "end", mono=True)
        picture.text(228, top + 16, f"{found['sum'][number]:.2f}", 13, "end", mono=True)
        share = masses[number] / total
        picture.box(
            246, top + 3, max(1, share * 88), 18, "second" if number == chosen else "device", 1
        )
        picture.text(342, top + 16, f"{share:.4f}", 13, mono=True)
        if number == chosen:
            picture.frame(LEFT - 6, top, RIGHT - LEFT + 12, 24)
    column.y += count * 24 + 24
    logsumexp = whole + log(total)
    logit = found["logit"][chosen]
    column.panel(
        "merge",
        "one program a row",
        [
            f"M = the largest m = {whole:.3f}",
            f"lse = M + log(sum of s exp(m - M)) = {logsumexp:.3f}",
            f"log p = z - lse = {logit:.3f} - {logsumexp:.3f} = {logit - logsumexp:.3f}",
        ],
        "device",
    )
    column.y += 12
    column.note(f"the plain formula, all {found['vocab']} logits at once: {found['logprob']:.3f}")
    column.y -= 6
    return column.end()
