"""The browser of trajectories: what it has of an attempt, which groups it takes, and what its script draws of them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest

from nanorchestra.report.browser import SCRIPT, browser, thin


def row(step=1, task="t", ids=8, phase="grpo", **changes):
    drawn = [i % 2 == 1 for i in range(ids)]
    return {
        "phase": phase,
        "step": step,
        "task_id": task,
        "question": "q",
        "preference_text": "p",
        "ids": list(range(ids)),
        "sampled": drawn,
        "logprobs": [-0.5 if d else 0.0 for d in drawn],
        "weight_versions": [3 if d else -1 for d in drawn],
        "trainer_logprobs": [-0.5 + 0.1 * k for k in range(sum(drawn))],
        "turns": [
            {"start": 1, "end": 4, "advantage": None},
            {"start": 5, "end": 8, "advantage": -3.0},
        ],
        "reward": 0.25,
        "outcome": 1.0,
        "cost_usd": 0.002,
        "latency_s": 1.5,
        "advantage": 1.5,
        "status": "answered",
        "answer": "</script>",
        "seed": 4,
        "calls": {"a": 2},
    } | changes


def test_groups_are_thinned_evenly_and_the_last_one_stays():
    rows = [row(step, task, ids=10) for step in range(1, 11) for task in "ab" for _ in range(2)] + [
        row(11, phase="after")
    ]
    groups, recorded = thin(rows, most=10**9)
    assert len(groups) == recorded == 20 and all(len(group) == 2 for group in groups)
    groups, recorded = thin(rows, most=100)
    assert recorded == 20 and [(group[0]["step"], group[0]["task_id"]) for group in groups] == [
        (2, "b"),
        (4, "b"),
        (6, "b"),
        (8, "b"),
        (10, "b"),
    ]
    assert thin([], 100) == ([], 0) and browser([row(phase="after")], str) == ""


def test_the_page_has_the_recorded_numbers_and_no_way_out_of_the_data():
    page = browser([row(), row(trainer_logprobs=[])], lambda token: f"<{token}>")
    block = re.search(r'id="attempts">(.*?)</script>', page, flags=re.DOTALL).group(1)
    assert "<" not in block
    data = json.loads(block)
    first, second = data["groups"][0]["attempts"]
    assert (
        data["pieces"]["7"] == "<7>"
        and first["mask"] == "01010101"
        and first["logprobs"] == [-0.5] * 4
        and first["versions"] == [3] * 4
    )
    assert (
        first["gaps"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
        and second["gaps"] == []
        and first["answer"] == "</script>"
        and first["calls"] == 2
    )
    assert "1 of the 1 groups" in page


DOM = """
class Node { constructor(tag) { this.tag = tag; this.children = []; this.style = {}; this.textContent = ""; this.className = ""; this.title = ""; this.value = undefined }
  appendChild(node) { this.children.push(node); return node } replaceChildren() { this.children = [] } }
const nodes = { attempts: new Node("script"), browser: new Node("div") };
nodes.attempts.textContent = INPUT;
globalThis.document = { getElementById: name => nodes[name], createElement: tag => new Node(tag) };
globalThis.location = { hash: HASH }; globalThis.history = { replaceState: (a, b, hash) => { location.hash = hash } };
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_the_script_draws_masks_ratios_and_advantages():
    """In node, on a page of a few lines: colours and tooltips of each id, the group's table, a click on another attempt."""
    block = re.search(
        r'id="attempts">(.*?)</script>',
        browser([row(), row(reward=0.75, trainer_logprobs=[])], lambda token: f"<{token}>"),
        flags=re.DOTALL,
    ).group(1)
    report = """
const ids = () => text.children.map(n => [n.textContent, n.className, n.title, n.style.background || ""]);
const seen = { table: table.children.map(line => line.children.map(cell => cell.textContent)), mask: ids() };
for (const way of ["ratio", "advantage"]) { bar.children[1].value = way; bar.children[1].onchange(); seen[way] = ids(); seen[way + " legend"] = legend.textContent }
table.children[2].onclick(); seen.hash = location.hash; seen.chosen = table.children.map(line => line.className); seen.other = ids();
console.log(JSON.stringify(seen));
"""
    code = (
        DOM.replace("INPUT", json.dumps(block)).replace("HASH", '"#1%7Ct%7C0%7Cmask"')
        + SCRIPT
        + report
    )
    seen = json.loads(
        subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout
    )
    assert (
        seen["table"][1][:6] == ["1", "0.250", "1", "2.000", "1.50", "2"]
        and seen["table"][2][1] == "0.750"
    )
    assert [entry[0] for entry in seen["mask"]] == [f"<{i}>" for i in range(8)] and [
        entry[1] for entry in seen["mask"]
    ] == ["given", "sampled"] * 4
    assert (
        seen["mask"][7][2]
        == f"id 7, sampled by version 3\nlog-probability -0.5\nratio {math.exp(0.3):.7f}\nadvantage -3.000"
        and seen["mask"][0][2] == "id 0, given"
    )
    assert [entry[3] for entry in seen["ratio"]][:4] == [
        "",
        "",
        "",
        "rgba(31,140,70,0.25)",
    ] and seen["ratio"][7][3] == "rgba(31,140,70,0.75)"
    assert f"{math.exp(0.3):.7f}" in seen["ratio legend"]
    assert [entry[3] for entry in seen["advantage"]][1::2] == ["rgba(31,140,70,0.375)"] * 2 + [
        "rgba(200,50,40,0.75)"
    ] * 2  # a turn's own share counts
    assert (
        seen["hash"] == "#1%7Ct%7C1%7Cadvantage"
        and seen["chosen"] == ["", "", "chosen"]
        and "ratio -" in seen["other"][1][2]
    )
