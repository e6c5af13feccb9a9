"""The browser of attempts: which groups it takes, and what its script draws of them."""

import json
import math
import re

import pytest

from nanorchestra.report import page as report_page
from nanorchestra.report.page import browser, write_report
from nanorchestra.report.run import Run

CUT = """() => {
  const width = document.documentElement.clientWidth, cut = [];
  for (const one of document.querySelectorAll("body *")) {
    const { left, right } = one.getBoundingClientRect(), name = `${one.tagName} ${one.className}`;
    if (right > left && (right > width + 1 || left < -1)) cut.push(name);
    if (getComputedStyle(one).overflowX === "visible" || one.tagName === "SELECT") continue;
    if (one.scrollWidth > one.clientWidth + 1) cut.push(`scrolls: ${name}`);
  }
  return cut;
}"""  # what reaches beyond the window, or must be scrolled to be read


def row(step=1, task="t", ids=8, phase="grpo", question="q", **changes):
    drawn = [i % 2 == 1 for i in range(ids)]
    return {
        "phase": phase, "step": step, "task_id": task, "prompt_length": 1,
        "task": {"question": question, "preference": {"text": "p", "cost": 0.5}},
        "ids": list(range(ids)), "sampled": drawn, "turns": [], "reward": 0.25, "outcome": 1.0,
        "logprobs": [-0.5 if d else 0.0 for d in drawn],
        "weight_versions": [3 if d else -1 for d in drawn],
        "trainer_logprobs": [-0.5 + 0.1 * k for k in range(sum(drawn))],
        "cost_usd": 0.002, "latency_s": 1.5, "advantage": 1.5, "status": "answered",
        "answer": "</script>", "calls": {"a": 2}, "well_formed": True,
    } | changes  # fmt: skip


def block_of(page):
    return re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL).group(1)


def data_of(page):
    assert "<" not in (block := block_of(page))
    return json.loads(block)


def test_the_ids_of_a_group_can_be_put_together_again():
    rows = [row(), row(trainer_logprobs=[], logprobs=[None] * 8), row(ids=5)]
    shown = browser(rows, lambda token: f"<{token}>")
    (group,) = shown["groups"]
    assert shown["pieces"][7] == "<7>" and group["prompt"] == [0] and group["wish"] == "cheap"
    for one, given in zip(group["attempts"], rows, strict=True):
        assert group["prompt"] + one["ids"] == given["ids"]
        sampled = [n % 2 == 1 for n, length in enumerate(one["runs"]) for _ in range(length)]
        assert [False, *sampled] == given["sampled"]
        assert one["versions"] == [[3, sum(given["sampled"])]]
    first, by_endpoint, _ = group["attempts"]
    assert first["gaps"] == [0.0, 0.1, 0.2, 0.3] and first["logprobs"] == [-0.5] * 4
    assert by_endpoint["gaps"] == [] and by_endpoint["logprobs"] == [None] * 4


def test_a_task_before_and_after_training_is_one_group_and_many_are_thinned(monkeypatch):
    before, after = (
        [row(phase=side, task=f"t{n}") for n in range(9)] for side in ("before", "after")
    )
    rows = [
        *before,
        *(row(step, task=f"g{step}") for step in range(1, 9) for _ in range(2)),
        *after,
    ]
    every = browser(rows, str)
    assert every["count"] == len(every["groups"]) == 17
    assert [one["side"] for one in every["groups"][-1]["attempts"]] == ["before", "after"]
    monkeypatch.setattr(report_page, "SHOWN_BYTES", 2000)
    fewer = browser(rows, str)
    names = [group["task_id"] for group in fewer["groups"]]
    assert names == ["g4", "g8", "t0", "t4", "t8"] and fewer["count"] == 17


def test_what_went_wrong_is_named():
    result = {"error": True, "refused": True, "content": "", "cost_usd": 0.0, "latency_s": 0.0}
    call = {
        "name": "a",
        "arguments": {},
        "alias": "",
        "output_tokens": 0,
        "retries": 0,
        "parts": [],
    }
    turn = {"start": 1, "end": 2, "calls": [call], "results": [result]}
    rows = [row(), row(outcome=0.0), row(status="token_limit", turns=[turn], well_formed=False)]
    (group,) = browser(rows, str)["groups"]
    whole, wrong, worse = (one["failures"] for one in group["attempts"])
    assert (whole, wrong) == ([], ["wrong answer"])
    assert worse == ["token limit", "malformed call", "a call failed", "a call was refused"]


@pytest.fixture
def folder(tmp_path):
    """A run with a GRPO group of different advantages, one of equal ones, and held-out tasks."""
    run = Run.create(tmp_path / "one", "seed = 7")
    rows = [row(phase="before", step=0, task="h", reward=0.1, outcome=0.0)]
    rows += [row(task="g"), row(task="g", reward=0.75, trainer_logprobs=[], advantage=-6.0)]
    rows += [row(task="g", advantage=0.2)]
    rows += [row(step=2, task="same", advantage=0.0)] * 2
    rows += [row(phase="after", step=2, task="h", reward=0.9)]
    for one in rows:
        run.append("trajectories", one)
    write_report(run.path)
    return run.path


def test_the_page_opens_where_advantages_differ_and_colours_ids_by_them(folder, opened):
    page = opened(folder)
    spans = page.locator("#browser .pane").first.locator("pre:not(.tree) span")
    assert page.locator("#browser .pane h4").all_inner_texts() == [
        "attempt 1: reward 0.250, advantage 1.500", "attempt 2: reward 0.750, advantage -6.000"
    ]  # fmt: skip
    shades = spans.evaluate_all("all => all.map(one => one.style.background)")
    assert [shade[:21] for shade in shades] == ["rgba(31, 150, 80, 0.3", ""] * 3 + [shades[0][:21]]
    titles = spans.evaluate_all("all => all.map(one => one.title)")
    assert titles[1] == "id 2, given" and titles[6] == (
        "id 7, sampled by version 3\nlog-probability -0.5000\n"
        f"ratio {math.exp(0.3):.7f}\nadvantage 1.500"
    )
    page.locator("#browser select[aria-label=colour]").select_option("ratio")
    shades = spans.evaluate_all("all => all.map(one => one.style.background)")
    assert shades[2] == "rgba(31, 150, 80, 0.25)" and shades[6] == "rgba(31, 150, 80, 0.75)"
    page.locator("#browser table tr").nth(3).click()
    page.reload()  # as a live page does
    heads = page.locator("#browser .pane h4").all_inner_texts()
    assert [head[:9] for head in heads] == ["attempt 2", "attempt 3"]
    assert page.locator("#browser select[aria-label=colour]").input_value() == "ratio"


def test_filters_leave_the_groups_that_fit_and_a_task_stands_before_and_after(folder, opened):
    page = opened(folder)
    group = page.locator("#browser .group")
    assert group.locator("option").count() == 3
    page.locator("#browser select[aria-label=reward]").select_option("after earns more")
    assert group.inner_text() == "held out: h q"
    assert page.locator("#browser .pane h4").all_inner_texts() == [
        "before: reward 0.100", "after: reward 0.900"
    ]  # fmt: skip
    page.locator("#browser select[aria-label='failure']").select_option("nothing went wrong")
    assert group.inner_text() == "no group fits the filters"
    assert page.locator("#browser .pane").count() == 0
