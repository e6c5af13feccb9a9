"""The browser of trajectories: which groups it takes, and what its script draws of them."""

import json
import math
import re
import shutil
import subprocess

import pytest

from nanorchestra.report.browser import SCRIPT, browser


def row(step=1, task="t", ids=8, phase="grpo", **changes):
    drawn = [i % 2 == 1 for i in range(ids)]
    return {
        "phase": phase, "step": step, "task_id": task, "question": "q", "preference_text": "p",
        "ids": list(range(ids)), "sampled": drawn, "turns": [], "reward": 0.25, "outcome": 1.0,
        "logprobs": [-0.5 if d else 0.0 for d in drawn],
        "weight_versions": [3 if d else -1 for d in drawn],
        "trainer_logprobs": [-0.5 + 0.1 * k for k in range(sum(drawn))],
        "cost_usd": 0.002, "latency_s": 1.5, "advantage": 1.5, "status": "answered",
        "answer": "</script>", "calls": {"a": 2},
    } | changes  # fmt: skip


def data_of(page):
    return re.search(r'id="attempts">(.*?)</script>', page, flags=re.DOTALL).group(1)


def test_the_page_has_the_recorded_numbers_and_no_tag_in_its_data():
    by_endpoint = row(trainer_logprobs=[], logprobs=[None] * 8)
    block = data_of(browser([row(), by_endpoint], lambda token: f"<{token}>"))
    assert "<" not in block
    data = json.loads(block)
    first, second = data["groups"][0]["attempts"]
    assert data["pieces"]["7"] == "<7>" and first["mask"] == "01010101" and first["calls"] == 2
    assert first["logprobs"] == [-0.5] * 4 and first["versions"] == [3] * 4
    assert first["gaps"] == pytest.approx([0.0, 0.1, 0.2, 0.3]) and second["gaps"] == []
    assert first["answer"] == "</script>" and second["logprobs"] == [None] * 4


DOM = """
class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], style: {}, textContent: "" }) }
  appendChild(node) { this.children.push(node); return node }
  replaceChildren() { this.children = [] } }
const nodes = { attempts: new Node("script"), browser: new Node("div") };
nodes.attempts.textContent = INPUT;
globalThis.document = { getElementById: n => nodes[n], createElement: tag => new Node(tag) };
globalThis.location = { hash: "#1%7Ct%7C0%7Cmask" };
globalThis.history = { replaceState: (a, b, hash) => { location.hash = hash } };
"""
REPORT = """
const ids = () => text.children.map(n => [n.textContent, n.className, n.title, n.style.background]);
const seen = { table: table.children.map(l => l.children.map(c => c.textContent)), mask: ids() };
for (const way of ["ratio", "advantage"]) {
  bar.children[1].value = way; bar.children[1].onchange(); seen[way] = ids() }
table.children[2].onclick(); seen.hash = location.hash; seen.other = ids();
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_the_script_draws_masks_ratios_and_advantages():
    rows = [row(), row(reward=0.75, trainer_logprobs=[], advantage=-6.0)]
    block = json.dumps(data_of(browser(rows, lambda token: f"<{token}>")))
    code = DOM.replace("INPUT", block) + SCRIPT + REPORT
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["table"][1][:6] == ["1", "0.250", "1", "2.000", "1.50", "2"]
    assert seen["table"][2][1] == "0.750"
    assert [entry[0] for entry in seen["mask"]] == [f"<{i}>" for i in range(8)]
    assert [entry[1] for entry in seen["mask"]] == ["given", "sampled"] * 4
    title = f"id 7, sampled by version 3\nlog-probability -0.5000\nratio {math.exp(0.3):.7f}"
    assert seen["mask"][7][2] == f"{title}\nadvantage 1.500"
    assert seen["mask"][0][2] == "id 0, given"
    backgrounds = [entry[3] for entry in seen["ratio"]]
    assert backgrounds[3] == "rgba(31,140,70,0.25)" and backgrounds[7] == "rgba(31,140,70,0.75)"
    assert [entry[3] for entry in seen["advantage"]][1::2] == ["rgba(31,140,70,0.375)"] * 4
    assert seen["hash"] == "#1%7Ct%7C1%7Cadvantage"
    assert "ratio -" in seen["other"][1][2] and seen["other"][1][3] == "rgba(200,50,40,0.75)"
