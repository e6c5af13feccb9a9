"""The browser of trajectories: which groups it takes, and what its script draws of them."""

import json
import math
import re
import shutil
import subprocess

import pytest

from nanorchestra.report.page import SCRIPTS, browser, page
from nanorchestra.report.run import TITLES, Run


def row(step=1, task="t", ids=8, phase="grpo", question="q", **changes):
    drawn = [i % 2 == 1 for i in range(ids)]
    return {
        "phase": phase, "step": step, "task_id": task,
        "task": {"question": question, "preference": {"text": "p"}},
        "ids": list(range(ids)), "sampled": drawn, "turns": [], "reward": 0.25, "outcome": 1.0,
        "logprobs": [-0.5 if d else 0.0 for d in drawn],
        "weight_versions": [3 if d else -1 for d in drawn],
        "trainer_logprobs": [-0.5 + 0.1 * k for k in range(sum(drawn))],
        "cost_usd": 0.002, "latency_s": 1.5, "advantage": 1.5, "status": "answered",
        "answer": "</script>", "calls": {"a": 2},
    } | changes  # fmt: skip


def block_of(page):
    return re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL).group(1)


def data_of(page):
    assert "<" not in (block := block_of(page))
    return json.loads(block)


def test_the_page_has_the_recorded_numbers_and_no_tag_in_its_data(tmp_path):
    rows = [row(), row(trainer_logprobs=[], logprobs=[None] * 8)]  # and by an endpoint
    shown = browser(rows, lambda token: f"<{token}>")
    data = data_of(page(Run.create(tmp_path / "one", "a = 1"), "", {"browser": shown}))["browser"]
    assert data["pieces"]["7"] == "<7>" and data["count"] == 1
    texts = {"question": "q", "preference": "p"}
    assert data["groups"] == [
        [texts | {name: one[name] for name in TITLES["attempt"]} for one in rows]
    ]


DOM = """
class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], style: {}, textContent: "" }) }
  appendChild(node) { this.children.push(node); return node }
  replaceChildren() { this.children = [] } }
const nodes = {};
globalThis.document = {
  getElementById: name => nodes[name] ||= new Node("div"), createElement: tag => new Node(tag) };
document.getElementById("data").textContent = INPUT;
globalThis.location = { hash: "#1%7Ct%7C0%7Cmask" };
globalThis.history = { replaceState: (a, b, hash) => { location.hash = hash } };
"""
REPORT = """
const [, , bar, , wide, , text] = nodes.browser.children, [lines] = wide.children;
const ids = () => text.children.map(n => [n.textContent, n.className, n.title, n.style.background]);
const seen = { table: lines.children.map(l => l.children.map(c => c.textContent)), mask: ids() };
for (const way of ["ratio", "advantage"]) {
  bar.children[1].value = way; bar.children[1].onchange(); seen[way] = ids() }
lines.children[2].onclick(); seen.hash = location.hash; seen.other = ids();
console.log(JSON.stringify(seen));
"""
TEXTS = """
const texts = node => [node.textContent, ...node.children.flatMap(texts)].filter(Boolean);
delete nodes.data;
console.log(JSON.stringify(Object.values(nodes).flatMap(texts)));
"""
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node")


def drawn(page, code):
    """What `code` prints after the scripts of a page have drawn it."""
    code = "\n".join([DOM.replace("INPUT", json.dumps(block_of(page))), *SCRIPTS, code])
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_node
def test_the_script_draws_masks_ratios_and_advantages(tmp_path):
    rows = [row(), row(reward=0.75, trainer_logprobs=[], advantage=-6.0)]
    shown = {"browser": browser(rows, lambda token: f"<{token}>")}
    seen = drawn(page(Run.create(tmp_path / "one", "a = 1"), "", shown), REPORT)
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
