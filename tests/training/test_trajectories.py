"""Recorded trajectories: which are imitated and why others are not, and what a bad file gets."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
from conftest import steps_of

from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.packing import pack
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.run import Progress, TrainingRun
from nanorchestra.training.trajectories import as_group, from_row, load_kept, take
from nanorchestra.training.warm_start import warm_start

CALL = ToolCall("echo", {"text": "hi"})


def made(tokenizer, task="t0", reward=0.5, answer="42", rebuilt=False, **changes):
    """An attempt of two turns: one growing session, or a prompt for each turn."""
    t = Trajectory(task, 0, 0, [], [], [], [], reward=reward, answer=answer, outcome=1.0)
    known = "What is it? It is 42." if rebuilt else "It is 42."
    for given, text in (("What is it?", "I look it up."), (known, answer)):
        context = len(t.ids) if rebuilt else 0
        t.ids += tokenizer.encode(given)
        t.prompt_length = t.prompt_length or len(t.ids)
        said = tokenizer.encode(text)
        t.turns.append(Turn(len(t.ids), len(t.ids) + len(said), "stop", context=context))
        t.sampled += [False] * (len(t.ids) - len(t.sampled)) + [True] * len(said)
        t.ids += said
    t.turns[0].calls, t.turns[0].results = [CALL], [ToolResult("It is 42.", 0.1)]
    t.logprobs = [-1.0 if sampled else 0.0 for sampled in t.sampled]
    return dataclasses.replace(t, **changes)


def write(path, tokenizer, *attempts):
    """Records pairs of phase and trajectory in a run's directory, as a run does; the rows."""
    path.mkdir(exist_ok=True)
    rows = []
    run = types.SimpleNamespace(
        ranks=Ranks(),
        tokenizer=tokenizer,
        progress=Progress(step=3),
        worlds=types.SimpleNamespace(tools=lambda task: []),
        folder=types.SimpleNamespace(append=lambda log, row: rows.append(row)),
    )
    for phase, trajectory in attempts:
        task = Task(trajectory.task_id, "question?", Preference(), {"kind": "lookup"})
        TrainingRun.record_trajectory(run, phase, task, trajectory)
    save(path, rows)
    return rows


def save(path, rows):
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(path, tokenizer, longest=9999):
    """What a warm start keeps, and what it says."""
    settings = {
        "warm_start.trajectories": str(path),
        "rollout.context_tokens": longest,
    }
    said = []
    return load_kept(Config().replace(settings), tokenizer, said.append), *said


def test_what_is_kept_and_why_the_rest_is_not(nano_tokenizer, tmp_path):
    changes = {
        "grpo": [
            {"reward": 0.3},
            {"reward": 0.3},
            *({"reward": i / 10, "answer": f"{i}"} for i in range(5, 10)),
            {"outcome": 0.0},
            {"task": "t1", "reward": 0.1},
            {"task": "t1", "reward": 0.9, "well_formed": False, "status": "token_limit"},
        ],
        "before": [{"task": "t2"}],
        "skipped": [{"task": "t2"}],
        "rollouts": [{"task": "t3", "logprobs": [None] * 20}],
    }
    attempts = [(p, made(nano_tokenizer, **c)) for p, entries in changes.items() for c in entries]
    rows = write(tmp_path, nano_tokenizer, *attempts)
    kept, said = load(tmp_path, nano_tokenizer)
    assert [[t.reward for t in group] for group in kept] == [[0.9, 0.8, 0.7, 0.6], [0.1], [0.5]]
    assert said == (
        "warm start on 6 recorded trajectories of 3 tasks; not kept: 2 of an evaluation or a "
        "skipped step, 2 not of the best of their task, 1 the same again, 1 wrong, "
        "1 cut or badly formed"
    )
    assert len(rows) == 6 + 2 + 2 + 1 + 1 + 1
    longest = max(len(trajectory.ids) for _, trajectory in attempts)
    assert load(tmp_path, nano_tokenizer, longest) == (kept, said)
    with pytest.raises(UserError, match=r"no trajectory is kept \(.* too long.*\)"):
        load(tmp_path / "trajectories.jsonl", nano_tokenizer, 5)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_row_brings_the_trajectory_back_and_only_sampled_ids_are_learnt(
    nano_tokenizer, tmp_path, rebuilt
):
    trajectory = made(nano_tokenizer, rebuilt=rebuilt)
    (row,) = write(tmp_path, nano_tokenizer, ("grpo", trajectory))
    assert from_row(json.loads(json.dumps(row)))[1] == trajectory
    assert [part["role"] for part in row["text"]] == ["assistant", "tool", "assistant"]
    (members,), _ = load(tmp_path, nano_tokenizer)
    group = as_group(members)
    assert len(group.samples) == 1 + rebuilt
    packed, places = pack([group]), [i for i, s in enumerate(trajectory.sampled) if s]
    assert packed.targets.tolist() == [trajectory.ids[i] for i in places]
    assert packed.tokens[packed.source].tolist() == [trajectory.ids[i - 1] for i in places]


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda row: row.pop("ids"), "not a trajectory of train.py"),
        (lambda row: row.pop("phase"), "not a trajectory of train.py"),
        (lambda row: row.update(turns=[{"start": 0}]), "not a trajectory of train.py"),
        (lambda row: row.update(ids=["a"]), "not a trajectory of train.py"),
        (lambda row: row["ids"].__setitem__(0, 10**6), "another tokenizer has written it"),
        (lambda row: row["text"][0].update(text="else"), "another tokenizer has written it"),
        (lambda row: row["text"].clear(), "another tokenizer has written it"),
    ],
)
def test_a_bad_row_gets_one_line_with_its_number(nano_tokenizer, tmp_path, spoil, says):
    attempts = [("grpo", made(nano_tokenizer, task=f"t{i}")) for i in range(3)]
    rows = write(tmp_path, nano_tokenizer, *attempts)
    spoil(rows[1])
    save(tmp_path, rows)
    with pytest.raises(UserError, match=f"trajectories.jsonl, line 2: .*{says}") as error:
        load(tmp_path, nano_tokenizer)
    assert "\n" not in str(error.value)


def test_bad_files(nano_tokenizer, tmp_path):
    write(tmp_path, nano_tokenizer, ("grpo", made(nano_tokenizer)))
    path = tmp_path / "trajectories.jsonl"
    row = path.read_text()
    path.write_text(row + row[:99])  # its writer was killed, or is at work
    assert len(load(tmp_path, nano_tokenizer)[0]) == 1
    for text, says in ((row + "{\n", "line 2: not a traj"), ("", "no trajectory is kept")):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            load(tmp_path, nano_tokenizer)
    with pytest.raises(UserError, match="no such file; warm_start.trajectories takes runs"):
        load(tmp_path / "nowhere", nano_tokenizer)
    path.write_text(row)
    other = train_bpe(["a different text of other words; " * 9], nano_tokenizer.vocab_size)
    with pytest.raises(UserError, match="another tokenizer"):
        load(tmp_path, other)


def test_epochs_are_shuffled_and_a_step_can_be_taken_again():
    items = list("abcdefg")
    row = [x for step in range(7) for x in take(items, step * 3, 3, seed=1)]
    assert all(sorted(row[i : i + 7]) == items for i in (0, 7, 14)) and row[:7] != row[7:14]
    assert take(items, 5, 20, 1) == take(items, 0, 25, 1)[5:] != take(items, 0, 25, 2)[5:]


def test_a_warm_start_learns_from_several_files(nano_tokenizer, tmp_path, make_training, capsys):
    for name in "ab":
        right, wrong = made(nano_tokenizer, task=name), made(nano_tokenizer, outcome=0.0)
        write(tmp_path / name, nano_tokenizer, ("rollouts", right), ("rollouts", wrong))
    settings = {
        "warm_start.trajectories": f"{tmp_path / 'a'}, {tmp_path / 'b'}",
        "warm_start.steps": 8,
        "warm_start.prompts": 2,
    }
    run = make_training("student", settings)
    assert "warm start on 2 recorded trajectories of 2 tasks; not kept: 2 wrong" in (
        capsys.readouterr().out
    )
    run.progress.phase = "warm_start"
    assert warm_start(run)
    losses = [row["loss"] for row in steps_of(run)]
    assert losses[-1] < 0.9 * losses[0]
