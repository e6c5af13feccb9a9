"""The report's browser of trajectories: recorded groups id by id, coloured by who wrote them, by the ratio, or by the advantage.

What it shows is JSON in the page; SCRIPT draws it in the reader's own browser, with text nodes only, so that nothing in it can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

SHOWN_IDS = 100_000  # in the page: a megabyte
FIELDS = ("reward", "outcome", "cost_usd", "latency_s", "advantage", "status", "answer", "seed")
Row = dict[str, Any]


def thin(rows: list[Row], most: int = SHOWN_IDS) -> tuple[list[list[Row]], int]:
    """The recorded groups of training, in their order, and how many there are; where they have more than `most` ids, as many as fit, evenly
    spaced, the last one always."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.get("phase") in ("grpo", "skipped"):
            groups.setdefault((row["step"], row["task_id"]), []).append(row)
    found = list(groups.values())
    ids = sum(len(row["ids"]) for row in rows if row.get("phase") in ("grpo", "skipped"))
    every = max(1, -(-ids // most))
    return found[::-1][::every][::-1], len(found)


def browser(rows: list[Row], piece: Callable[[int], str]) -> str:
    """Its HTML, for these rows of trajectories.jsonl; piece(id) is the text of an id."""
    groups, recorded = thin(rows)
    if not groups:
        return ""
    used = {token for group in groups for row in group for token in row["ids"]}
    data = {
        "pieces": {token: piece(token) for token in sorted(used)},
        "groups": [
            {
                "step": group[0]["step"],
                "task": group[0]["task_id"],
                "question": group[0].get("question"),
                "preference": group[0].get("preference_text"),
                "attempts": [_attempt(row) for row in group],
            }
            for group in groups
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<h2>Trajectories, id by id</h2><p class="note">{len(groups)} of the {recorded} groups last recorded in trajectories.jsonl, evenly spaced. '
        "Point at an id for what is known of it; click on an attempt to see it.</p>"
        f'<div id="browser"><noscript>The browser of trajectories needs JavaScript.</noscript></div><script type="application/json" id="attempts">{text}</script>'
        f"<script>{SCRIPT}</script>"
    )


def _attempt(row: Row) -> Row:
    """What the page has of one attempt; lists have an entry for each sampled id."""
    sampled = [i for i, drawn in enumerate(row["sampled"]) if drawn]
    trained = row.get("trainer_logprobs") or []
    turns = row.get("turns") or []
    return {name: row.get(name) for name in FIELDS} | {
        "ids": row["ids"],
        "mask": "".join("1" if drawn else "0" for drawn in row["sampled"]),
        "logprobs": [round(row["logprobs"][i], 4) for i in sampled],
        "versions": [row["weight_versions"][i] for i in sampled],
        "gaps": [
            None if new is None else round(new - row["logprobs"][i], 7)
            for new, i in zip(trained, sampled)
        ],
        "calls": sum((row.get("calls") or {}).values()),
        "turns": [[turn["start"], turn["end"], turn.get("advantage")] for turn in turns],
    }


SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("attempts").textContent), box = document.getElementById("browser");
const make = (tag, parent, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return parent.appendChild(node);
};
const shown = (value, digits) => value === null || value === undefined ? "-" : typeof value === "number" ? value.toFixed(digits) : String(value);
const tint = value => `rgba(${value > 0 ? "31,140,70" : "200,50,40"},${Math.min(1, Math.abs(value)) * 0.75})`;
let [step, task, attempt, colour] = decodeURIComponent(location.hash.slice(1)).split("|");        // survives the reload of a live page
const bar = make("p", box), steps = make("select", bar), colours = make("select", bar), about = make("div", box), table = make("table", box);
const legend = make("p", box, "", "note"), text = make("pre", box);
steps.ariaLabel = "group"; colours.ariaLabel = "colour";
data.groups.forEach((group, i) => { make("option", steps, `step ${group.step}: ${group.task}`).value = i; });
for (const [value, label] of [["mask", "colour: sampled or given"], ["ratio", "colour: ratio, trainer to sampler"], ["advantage", "colour: advantage"]])
  make("option", colours, label).value = value;
const start = data.groups.findIndex(group => String(group.step) === step && group.task === task);
steps.value = start < 0 ? data.groups.length - 1 : start;
colours.value = ["mask", "ratio", "advantage"].includes(colour) ? colour : "mask";
attempt = start < 0 ? 0 : Number(attempt) || 0;

function draw() {
  const group = data.groups[steps.value];
  attempt = Math.min(attempt, group.attempts.length - 1);
  history.replaceState(null, "", "#" + encodeURIComponent([group.step, group.task, attempt, colours.value].join("|")));
  about.textContent = `${group.question || ""} ${group.preference ? "(" + group.preference + ")" : ""}`;
  table.replaceChildren();
  const head = make("tr", table);
  for (const title of ["attempt", "reward", "outcome", "cost, m$", "latency, s", "calls", "advantage", "ended", "answer"]) make("th", head, title);
  group.attempts.forEach((one, i) => {
    const line = make("tr", table, undefined, i === attempt ? "chosen" : "");
    line.tabIndex = 0;
    for (const cell of [`${i + 1}`, shown(one.reward, 3), shown(one.outcome, 0), shown(1000 * one.cost_usd, 3), shown(one.latency_s, 2), shown(one.calls, 0),
                        shown(one.advantage, 3), one.status, (one.answer || "").slice(0, 40)]) make("td", line, cell);
    line.onclick = () => { attempt = i; draw(); };
    line.onkeydown = event => { if (event.key === "Enter") line.onclick(); };
  });
  tokens(group.attempts[attempt], colours.value);
}

function tokens(one, by) {
  const gaps = one.gaps.filter(gap => gap !== null), widest = Math.max(0.01, ...gaps.map(Math.abs)), ratios = gaps.map(Math.exp);
  legend.textContent = by === "mask" ? "Blue: sampled by the model. Grey: given to it."
    : by === "advantage" ? "Green: pushed up. Red: pushed down. Full colour at 3 and beyond; ids without colour are not in the loss, or have an advantage of 0."
    : !gaps.length ? "The trainer did not train on this attempt: there is no ratio."
    : `exp(log-probability of the trainer - of the sampler): ${Math.min(...ratios).toFixed(7)} to ${Math.max(...ratios).toFixed(7)}. ` +
      `Green: above 1. Red: below. Full colour at ${Math.exp(widest).toFixed(4)} and ${Math.exp(-widest).toFixed(4)}.`;
  text.replaceChildren();
  let n = 0;
  one.ids.forEach((id, i) => {
    const piece = data.pieces[id], node = make("span", text, piece.replaceAll("\\n", "\\u21b5\\n") || "\\u2205");
    if (one.mask[i] === "0") {
      if (by === "mask") node.className = "given";
      node.title = `id ${id}, given`;
      return;
    }
    const gap = one.gaps[n], turn = one.turns.find(([from, to]) => from <= i && i < to), share = turn && turn[2];
    const advantage = share === null || share === undefined ? one.advantage : share;
    node.title = `id ${id}, sampled by version ${one.versions[n]}\\nlog-probability ${one.logprobs[n]}\\nratio ${shown(gap === undefined || gap === null ? null : Math.exp(gap), 7)}\\nadvantage ${shown(advantage, 3)}`;
    if (by === "mask") node.className = "sampled";
    else if (by === "advantage") node.style.background = tint((advantage || 0) / 3);
    else if (gap) node.style.background = tint(gap / widest);
    n += 1;
  });
}
steps.onchange = colours.onchange = draw;
draw();
"""

RELOAD = "setTimeout(() => location.reload(), 30000);"  # of a page whose run goes on


def policy() -> str:
    """The page's content security policy: images of its own, styles, these two scripts and nothing else, from nowhere else."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in (SCRIPT, RELOAD)
    )
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
