"""Files of the user's own: the pages show those of examples/, which run; a reward pays a run."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import evaluate
import train
from examples.make24 import Make24
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Preference, Task, Trajectory
from nanorchestra.tools.spending import Spending
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.rollout import Attempts
from tools import load_tools
from worlds.load import note_on_tools
from worlds.user_reward import load_reward

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
REWARD = str(EXAMPLES / "my_reward.py")
TASK = Task("t", "question?", Preference("be cheap", cost=1.0), offers={"small": "small"})


def attempts():
    right = Trajectory("t", 0, outcome=1.0, calls_usd=0.03, latency_s=2.0, calls={"a": 2, "b": 1})
    return [right, Trajectory("t", 1, answer="no", calls={"a": 1})]


@pytest.mark.parametrize(
    "page, file",
    [("worlds.md", "make24.py"), ("worlds.md", "my_reward.py"), ("tools.md", "my_tools.py")],
)
def test_a_page_shows_the_whole_example(page, file):
    text = (ROOT / "docs" / page).read_text()
    assert f"```python\n{(EXAMPLES / file).read_text()}```" in text


def test_the_tools_of_the_example_are_called():
    (tool,) = load_tools(str(EXAMPLES / "my_tools.py"), None)
    result = tool.call({"amount": 100, "to": "USD"})
    assert (result.content, result.cost_usd, tool.name) == ("124.00 USD", 0.001, "convert")


def test_the_world_of_the_example_pays_a_true_solution_alone_in_full():
    """Nothing that is said whatever is asked, the target least of all, pays much."""
    tasks = [Make24() for _ in range(300)]
    for seed, task in enumerate(tasks):
        task.reset(seed)
        chosen = [c for k in (2, 3, 4) for c in combinations(task.numbers, k)]
        assert any(task.reward(" + ".join(map(str, each))) == 1 for each in chosen)
        for each in chosen:
            paid = task.reward(f"{' + '.join(map(str, each))} = {sum(each)}")
            assert (paid == 1) == (sum(each) == task.target)
        for answer in ("", "none", f"{task.target} + 0", "9" * 5000, "1 + 1 + 1 + 1 + 1"):
            assert task.reward(answer) == 0, answer
    same = [" + ".join(map(str, each)) for k in (1, 2, 3) for each in combinations(range(1, 10), k)]
    for answer in same:
        assert fmean(task.reward(answer) for task in tasks) < 0.2, answer
    assert fmean(task.reward(str(task.target)) for task in tasks) < 0.1


def test_a_reward_is_given_the_group_and_what_the_project_pays(tmp_path):
    frugal, one_call = (load_reward(f"{REWARD}:{name}", TASK) for name in ("frugal", "one_call"))
    paid = np.array([0.5, 0.0])
    assert frugal(TASK, attempts(), paid) == pytest.approx([0.7, 0.0])
    assert one_call(TASK, attempts(), paid) == pytest.approx([0.3, 0.0])
    assert paid.tolist() == [0.5, 0.0] and frugal(TASK, [], paid[:0]).shape == (0,)
    (tmp_path / "sees.py").write_text(
        "def sees(group):\n"
        "    assert group.preference.cost == 1.0 and group.question == 'question?'\n"
        "    assert [type(calls) for calls in group.calls] == [dict] * len(group.answers)\n"
        "    group.rewards[:] = 9\n"
        "    return [len(answer) for answer in group.answers]\n"
    )
    assert load_reward(f"{tmp_path}/sees.py:sees", TASK)(TASK, attempts(), paid).tolist() == [0, 2]
    assert paid.tolist() == [0.5, 0.0] and load_reward("", TASK) is None


def test_a_run_is_paid_by_the_function_and_goes_on_only_with_it(make_training, tmp_path, capsys):
    file = tmp_path / "pays.py"
    file.write_text("def pay(group):\n    return 7.0 + group.latencies_s\n")
    run = make_training("paid", {"grpo.steps": 2, "task.reward": f"{file}:pay"}, steps=1)
    run.train()
    assert (run.folder.path / "reward.py").read_text() == file.read_text()
    out = capsys.readouterr().out
    assert f"reward: {file}:pay, kept as" in out and "not the tools of" not in out
    rows = (run.folder.path / "trajectories.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert {row["phase"] for row in rows} >= {"before", "grpo"}
    assert all(row["reward"] == pytest.approx(7.0 + row["latency_s"]) for row in rows)
    metrics = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["reward"] > 7.0
    before = file.read_text()
    file.write_text(before.replace("7.0", "8.0"))
    with pytest.raises(UserError, match="not the file that the run began with"):
        make_training("paid", resume=True).train()
    file.write_text(before)
    assert make_training("paid", resume=True).train()
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["held_out"]["after"]["reward"] > 7.0


def test_an_evaluation_is_paid_by_the_function(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "RUNS", tmp_path)
    monkeypatch.setattr(evaluate, "write_comparison", lambda path: None)  # it takes seconds
    words = ["--policy", "program", "--tasks", "6", "--reward", f"{REWARD}:frugal"]
    assert evaluate.main(words) == 0
    (file,) = (tmp_path / "evaluation").glob("00-*.jsonl")
    for row in map(json.loads, file.read_text().splitlines()):
        assert row["reward"] == pytest.approx(row["outcome"] - 10 * row["cost_usd"])
    assert "my_reward.py" in (tmp_path / "evaluation" / "config.toml").read_text()


def test_a_policy_that_cannot_know_its_tools_is_told(tmp_path):
    model, base = tmp_path / "model", NANO.with_name("base")
    model.mkdir()
    for world, strangers in (
        ("questions:x.jsonl", (str(NANO), str(base), "")),
        ("data/=0.5,domains", (str(NANO), str(base), "")),
        ("desk", ()),
        ("desk=0.9, data/=0.1", ()),
    ):
        for path in (str(NANO), str(base), "", str(model), "Qwen/Qwen3-0.6B"):
            note = note_on_tools(path, world, "--policy")
            assert bool(note) == (path in strangers), (path, world)
    (tmp_path / "config.toml").write_text('[task]\nworld = "desk"\n')
    note = note_on_tools(str(model), "domains", "--policy")
    assert note.startswith(f"{model} knows the desk at most") and "by --policy" in note


def test_the_first_rank_pays_held_out_attempts_and_the_others_take_what_it_paid(monkeypatch):
    """A reward that asks a judge is asked once, and no two ranks have other scores."""
    paid = []

    class Rank(Ranks):
        def broadcast(self, value):
            paid.append(value if self.first else paid[-1])
            return paid[-1]

    def pay(task, members, rewards):
        return [0.25] * len(members)

    def pay_on_another_rank(task, members, rewards):
        raise AssertionError("the reward was called on a second rank")

    for rank, reward in enumerate((pay, pay_on_another_rank)):
        played = attempts()
        of_a_rank = Attempts([TASK] * len(played), played, repeated=0, seconds=1.0)
        monkeypatch.setattr(train, "play_on_ranks", lambda *_, each=of_a_rank, **__: each)
        ranks = Rank(rank, world_size=2)
        scored = train.play_held_out(Config(), None, None, ranks, Spending(), reward)
        assert [attempt.reward for attempt in scored.trajectories] == [0.25] * len(played)
