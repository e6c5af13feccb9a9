"""Files of the user's own: the pages show those of examples/, which run; a reward pays a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import train
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Task, Trajectory
from nanorchestra.tools.spending import Spending
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.rollout import Attempts
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


def test_a_run_is_paid_by_the_function_and_goes_on_only_with_it(make_training, tmp_path):
    file = tmp_path / "pays.py"
    file.write_text("def pay(group):\n    return 7.0 + group.latencies_s\n")
    run = make_training("paid", {"grpo.steps": 2, "task.reward": f"{file}:pay"}, steps=1)
    run.train()
    assert (run.folder.path / "reward.py").read_text() == file.read_text()
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


def test_a_run_goes_on_only_with_its_world_once_a_step_is_taken(make_training, tmp_path):
    file, example = tmp_path / "sums.py", (EXAMPLES / "make24.py").read_text()
    file.write_text(example)
    begun = {"grpo.steps": 2, "task.world": f"desk=0.1, {file}=0.9"}
    assert not make_training("own", begun, steps=0).train()
    file.write_text(example.replace("add up to", "sum to"))  # nothing is learnt yet
    assert not make_training("own", resume=True, steps=1).train()
    assert (tmp_path / "own" / "world.py").read_text() == file.read_text()
    file.write_text(example)
    with pytest.raises(UserError, match=f"{file}: it is not the file .*world.py; put that back"):
        make_training("own", resume=True).train()


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
