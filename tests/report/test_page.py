"""The report can be written at every stage of a run, and runs nothing that a model wrote."""

import math
import re

import pytest
from matplotlib import style
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from test_browser import CUT, data_of, row

from nanorchestra.report import plots
from nanorchestra.report.page import HERE, RUN_SCRIPTS, write_report
from nanorchestra.report.run import Run

SCORES = {"reward": 0.5, "accuracy": 0.7, "cost_usd": 0.002, "latency_s": 2.0}
SIDE = SCORES | {"by_preference": {"cheap": SCORES}, "by_kind": {"chain": SCORES}}
HELD_OUT = {"tasks": 480, "before": SIDE, "after": SIDE, "routers": {"strongest": SCORES}}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", 'seed = 7\npreset = "nano"\n')


def record(run, stage):
    for step in range(1, 31) if stage != "empty" else ():
        metrics = {"loss": 4 * math.exp(-step / 9), "seconds": 1.1, "tokens_per_s": 21000.0}
        run.append("metrics", {"phase": "warm_start", "step": step} | metrics)
    for step in range(1, 31 if stage == "whole" else 2) if stage in ("one", "whole") else ():
        nested = {"calls": {"search": 0.3, "small": step / 60}, "filtered": {"homogeneous": 0.1}}
        nested |= {"group_quartiles": {"accuracy": [0.6, 0.8]}, "turns": 1 + 1 / step}
        run.append("metrics", SCORES | nested | {"phase": "grpo", "step": step, "kl": None})
        run.append("trajectories", row())
    if stage == "whole":
        for _ in range(12):
            run.append("trajectories", row(phase="after"))
        run.write_json("summary.json", {"seconds": 431.0, "held_out": HELD_OUT})


def report(run):
    """The page that is written of a run."""
    write_report(run.path)
    return (run.path / "report.html").read_text()


@pytest.mark.parametrize("stage", ["empty", "warm", "one", "whole"])
def test_the_report_can_be_written_at_every_stage(run, stage):
    record(run, stage)
    page = report(run)
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    data = data_of(page)
    assert "simulated" in page and bool(data["browser"]["count"]) == (stage in ("one", "whole"))
    assert [*data["run"]["held_out"]] == ["before", "after", "strongest"] * (stage == "whole")
    assert data["run"]["live"] == (stage != "whole"), "a page of a run looks again"


@pytest.mark.parametrize("width, scheme", [(1280, "dark"), (390, "light")])
def test_everything_is_drawn_and_nothing_is_cut(run, opened, width, scheme):
    record(run, "whole")
    report(run)
    page = opened(run.path, width, scheme)
    text = page.inner_text("body")
    for part in (
        "after GRPO",
        "strongest (the expert that seems",
        "431 s (7.2 min)",
        "0.500\u00a0\u2192\u00a00.500",
    ):
        assert part in text
    assert "NaN" not in text and "undefined" not in text
    titles = page.locator("figure .title").all_inner_texts()
    assert "Turns per trajectory" in titles and "Loss, nats per token" in titles
    assert "Gradient norm" not in titles, "a panel without data is left out"
    assert "The same at every step: Reward that is trained on: 0.500" in text
    legends = page.locator(".learning .u-legend, .tools .u-legend").all_inner_texts()
    assert any("0.300" in legend and "small" in legend for legend in legends), "the last step's"
    assert page.evaluate(CUT) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert dark == (scheme == "dark")


def test_another_run_is_laid_over_the_curves_and_stays_when_the_page_reloads(run, opened, tmp_path):
    record(run, "whole")
    report(run)
    other = Run.create(tmp_path / "two", "")
    for step in range(1, 61):
        other.append("metrics", {"phase": "grpo", "step": step, "turns": 3.0})
    page = opened(run.path)
    for name, shown in (("two/metrics.jsonl", "metrics.jsonl"), ("one/report.html", "one")):
        page.set_input_files("input[type=file]", tmp_path / name)
        page.wait_for_selector(f"strong >> text='dashed: {shown}'")
        page.reload()
        legend = page.locator("figure", has_text="Turns per trajectory").locator("tr.other")
        assert shown in legend.inner_text()
    page.get_by_text("remove").click()
    assert page.locator("tr.other").count() == 0
    page.set_input_files("input[type=file]", run.path / "config.toml")
    page.wait_for_selector("strong >> text=config.toml has no rows of metrics")


def test_a_model_of_a_server_keeps_its_name_and_a_directory_its_end(run, opened):
    record(run, "whole")
    report(run)
    page = opened(run.path, 390)
    for name, label in (
        ("m@http://127.0.0.1:80/v1", "m@127.0.0.1:80"),
        ("other@https://api.example.com/v1:turns=3", "other@api.example.com:turns=3"),
        ("runs/longer/model", "longer/model"),
    ):
        assert page.evaluate(f"label({name!r})") == label


def test_fingers_show_some_steps_larger_and_two_taps_all_again(run, opened):
    """In all charts of the phase, as the mouse does; a page cannot be scrolled sideways by it."""
    record(run, "whole")
    report(run)
    page = opened(run.path, 390, has_touch=True, is_mobile=True)
    over = page.locator("figure", has_text="Turns per trajectory").locator(".u-over")
    over.scroll_into_view_if_needed()
    box, touch = over.bounding_box(), page.context.new_cdp_session(page)

    def fingers(*paths):
        """Moves fingers along their paths, from and to shares of the chart's width."""
        for kind, part in (
            ("touchStart", 0),
            ("touchMove", 0.4),
            ("touchMove", 1),
            ("touchEnd", 1),
        ):
            places = [box["x"] + box["width"] * (a + (b - a) * part) for a, b in paths]
            points = [{"x": x, "y": box["y"] + 50, "id": i} for i, x in enumerate(places)]
            sent = {"type": kind, "touchPoints": points if kind != "touchEnd" else []}
            touch.send("Input.dispatchTouchEvent", sent)
        shown = "charts.filter(([f]) => f.closest('.tools, .health')).map(([, c]) => c.scales.x)"
        ends = page.evaluate(f"{shown}.map(({{ min, max }}) => [min, max])")
        assert len(ends) > 1 and all(each == ends[0] for each in ends), "all charts alike"
        return ends[0]

    assert fingers((0.5, 0.5)) == [1, 30]
    assert fingers((0.25, 0.75)) == pytest.approx([8.25, 22.75], abs=0.5)
    assert fingers((0.5, 0.5)) != [1, 30] and fingers((0.5, 0.5)) == [1, 30]
    assert fingers((0.4, 0.2), (0.6, 0.8)) == pytest.approx([10.7, 20.3], abs=0.5)
    assert fingers((0.2, 0.4), (0.8, 0.6)) == [1, 30], "never more than there is"
    assert page.evaluate("scrollX") == 0
    warm = page.evaluate(
        "charts.filter(([f]) => f.closest('.warm_start')).map(([, c]) => c.scales.x)"
    )
    assert warm[0]["max"] == 30


def test_every_line_of_a_chart_has_a_colour_or_dash_of_its_own(run, opened):
    names = [f"tool{number:02}" for number in range(15)]
    rows = [
        SCORES
        | {"phase": "grpo", "step": step}
        | {"calls": {name: step + i for i, name in enumerate(names)}}
        for step in (1, 2, 3)
    ]
    panel = plots.curves(rows, "tools")[0]
    with style.context(plots.STYLE):
        axis = Figure().subplots()
        panel(axis)
        drawn = {(to_rgb(line.get_color()), line.get_linestyle()) for line in axis.lines[1::2]}
        assert len(drawn) == len(names)
        axis = Figure().subplots()
        plots.frontier({name: SCORES for name in names[:12]})(axis)
        points = [bar.lines[0] for bar in axis.containers]
        assert len({to_rgb(point.get_color()) for point in points}) == 12
    for each in rows:
        run.append("metrics", each)
    report(run)
    page = opened(run.path)
    series = "charts.find(([f]) => f.innerText.startsWith('Calls per'))[1].series.slice(1)"
    lines = page.evaluate(f"{series}.map(one => one.stroke() + '/' + (one.dash || []))")
    assert len({*lines}) == len(names), lines
    fills = page.evaluate(f"{series}.map(one => one.points.fill() === one.stroke())")
    assert all(fills), "points are in the colour of their line, in the dark too"
    marks = page.locator(".tools .u-legend").first.locator(".u-marker")
    looks = marks.evaluate_all("all => all.slice(1).map(one => one.getAttribute('style'))")
    assert len({*looks}) == len(names), looks


def test_the_report_loads_nothing_and_runs_nothing(run, opened):
    """What a model or a tool wrote is text, whatever it looks like."""
    evil = '<script>alert(1)</script><img src="http://evil.example/x.png" onerror="alert(2)">'
    names = dict.fromkeys(("answer", "task_id", "status"), evil)
    for step in (1, 2):
        tool = "<img src=x onerror=alert(3)>"  # without a slash, so it is a label as it is
        run.append("trajectories", row(question=evil, **names, calls={evil: 1}))
        calls = {evil: step, tool: 1}
        run.append("metrics", SCORES | {"phase": "grpo", "step": step, "calls": calls})
    html = report(run)
    assert evil not in html and "default-src 'none'" in html
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, flags=re.DOTALL)
    known = [(HERE / name).read_text() for name in RUN_SCRIPTS]
    assert [body for attributes, body in scripts if not attributes] == known
    assert data_of(html)["browser"]["groups"][0]["question"] == evil
    page = opened(run.path)
    assert page.locator("img, link, iframe, a").count() == 0 and evil in page.inner_text("body")
    assert tool in page.locator(".tools .u-legend").first.inner_text()


def test_the_mismatch_of_sampler_and_trainer_and_the_reward_trained_on_are_curves():
    """The panels name keys of a metrics row; a key that is not there gives an empty panel."""
    shown = {
        "mismatch_kl": 2e-4,
        "mismatch_ratio": 1.0,
        "mismatch_ratio_max": 1.3,
    }
    rows = [SCORES | shown | {"step": step, "reward_parts": {"cost": 0.1}} for step in (1, 2, 3)]
    last = {}
    for panel in plots.curves(rows, "health") + plots.curves(rows, "learning"):
        axis = Figure().subplots()
        panel(axis)
        last[axis.get_title()] = [float(line.get_ydata()[-1]) for line in axis.lines[::2]]
    assert last["KL(sampler || trainer), nats per token"] == [2e-4]
    assert last["Probability, trainer / sampler"] == [1.0, 1.3]
    assert last["Reward that is trained on"] == [SCORES["reward"]]
    assert last["Parts of the reward by the price list"] == [0.1]
