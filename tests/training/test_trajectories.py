"""Recorded attempts: which are imitated and why others are not, and what a bad file gets."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
from run_rows import steps_of

from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.packing import pack
from nanorchestra.training.run import Progress, TrainingRun
from nanorchestra.training.samples import as_group, record_logprobs
from nanorchestra.training.trajectories import from_row
from nanorchestra.training.warm_start import load_kept

CALL = ToolCall("echo", {"text": "hi"})


def made(tokenizer, task="t0", reward=0.5, answer="42", rebuilt=False, **changes):
    """An attempt of two turns: one growing session, or a prompt for each turn."""
    t = Trajectory(task, 0, reward=reward, answer=answer, outcome=1.0)
    known = "What is it? It is 42." if rebuilt else "It is 42."
    for given, text in (("What is it?", "I look it up."), (known, answer)):
        context = len(t.ids) if rebuilt else 0
        t.ids += tokenizer.encode(given)
        t.prompt_length = t.prompt_length or len(t.ids)
        turn = tokenizer.encode(text)
        t.turns.append(Turn(len(t.ids), len(t.ids) + len(turn), "stop", context=context))
        t.sampled += [False] * (len(t.ids) - len(t.sampled)) + [True] * len(turn)
        t.ids += turn
    t.turns[0].calls, t.turns[0].results = [CALL], [ToolResult("It is 42.", 0.1)]
    t.logprobs = [-1.0 if sampled else 0.0 for sampled in t.sampled]
    return dataclasses.replace(t, **changes)


def write(path, tokenizer, *attempts):
    """Records pairs of phase and trajectory in a run's directory, as a run does; the rows."""
    path.mkdir(exist_ok=True)
    (path / "config.toml").touch()
    rows = []
    run = types.SimpleNamespace(
        ranks=Ranks(),
        engine=types.SimpleNamespace(tokenizer=tokenizer),
        progress=Progress(step=3),
        folder=types.SimpleNamespace(append=lambda log, row: rows.append(row)),
    )
    for phase, trajectory in attempts:
        task = Task(trajectory.task_id, "question?", Preference(), kind="lookup")
        TrainingRun.record_attempts(run, phase, [task], [trajectory])
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
    lines = []
    return load_kept(Config().replace(settings), tokenizer, lines.append), *lines


def test_what_is_kept_and_why_the_rest_is_not(nano_tokenizer, tmp_path):
    changes = {
        "grpo": [
            {"reward": 0.3},
            {"reward": 0.3},
            *({"reward": i / 10, "answer": f"{i}"} for i in range(5, 10)),
            {"outcome": 0.0},
            {"task": "t1", "reward": 0.1},
            {"task": "t1", "reward": 0.9, "well_formed": False, "status": "token_limit"},
            {"task": "t3"},
        ],
        "before": [{"task": "t2"}],
        "skipped": [{"task": "t2"}],
    }
    attempts = [(p, made(nano_tokenizer, **c)) for p, entries in changes.items() for c in entries]
    rows = write(tmp_path, nano_tokenizer, *attempts)
    kept, line = load(tmp_path, nano_tokenizer)
    rewards = sorted([t.reward for t in group] for group in kept)
    assert rewards == [[0.1], [0.5], [0.9, 0.8, 0.7, 0.6]]
    assert line == (
        "warm start on 6 recorded trajectories of 3 tasks; not kept: 2 of an evaluation or a "
        "skipped step, 2 not of the best of their task, 1 the same again, 1 wrong, "
        "1 cut or badly formed"
    )
    assert len(rows) == 6 + 2 + 2 + 1 + 1 + 1
    longest = max(len(trajectory.ids) for _, trajectory in attempts)
    assert load(tmp_path, nano_tokenizer, longest) == (kept, line)
    with pytest.raises(UserError, match=r"no trajectory is kept \(.* too long.*\)"):
        load(tmp_path, nano_tokenizer, 5)


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
    assert len(group.samples) == 1 + rebuilt and group.shared == trajectory.prompt_length
    assert group.tokens == len(trajectory.ids) - rebuilt * group.shared
    packed, places = pack([group]), [i for i, s in enumerate(trajectory.sampled) if s]
    assert packed.targets.tolist() == [trajectory.ids[i] for i in places]
    assert packed.tokens[packed.source].tolist() == [trajectory.ids[i - 1] for i in places]


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_badly_formed_turn_leaves_the_loss_alone_the_others_stay(nano_tokenizer, rebuilt):
    t = made(nano_tokenizer, rebuilt=rebuilt, advantage=1.0)
    bad, good = t.turns
    bad.well_formed = False
    (sample,) = as_group([t], drop_invalid_format=True).samples
    kept = [x for x, in_loss in zip(sample.ids, sample.in_loss, strict=True) if in_loss]
    assert kept == t.ids[good.start : good.end]
    assert sum(s.count for s in as_group([t]).samples) == sum(t.sampled)
    record_logprobs([t], [[-1.0] * len(kept)], True)
    assert t.trainer_logprobs == [None] * (bad.end - bad.start) + [-1.0] * len(kept)


def test_the_trainers_log_probabilities_reach_the_attempts():
    def attempt(*contexts):
        turns = [Turn(start, start + 1, "", context=begin) for begin, start in contexts]
        sampled = [False, True, len(turns) == 1, True]
        return Trajectory("t", 0, 1, [5, 6, 7, 8], sampled, [0.0] * 4, [-1, 3, 4, 4], turns)

    whole, turns = attempt((0, 1)), attempt((0, 1), (2, 3))
    record_logprobs([whole, turns], [[-1.5, -2.5, -0.5], [-3.0], [-3.5]])
    assert [t.trainer_logprobs for t in (whole, turns)] == [[-1.5, -2.5, -0.5], [-3.0, -3.5]]


def test_rows_of_another_tokenizer_and_missing_runs_are_refused(nano_tokenizer, tmp_path):
    (row,) = write(tmp_path, nano_tokenizer, ("grpo", made(nano_tokenizer)))
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(row)[:99])  # its writer was killed, or is at work
    assert len(load(tmp_path, nano_tokenizer)[0]) == 1
    other = train_bpe(["a different text of other words; " * 9], nano_tokenizer.vocab_size)
    with pytest.raises(UserError, match="another tokenizer"):
        load(tmp_path, other)
    save(tmp_path, [row | {"ids": [10**6, *row["ids"][1:]]}])
    with pytest.raises(UserError, match="another tokenizer"):
        load(tmp_path, nano_tokenizer)
    with pytest.raises(UserError, match="holds no config.toml; give the directory of a run"):
        load(tmp_path / "nowhere", nano_tokenizer)


def test_a_warm_start_learns_from_several_files(nano_tokenizer, tmp_path, make_training, capsys):
    for name in "ab":
        right, wrong = made(nano_tokenizer, task=name), made(nano_tokenizer, outcome=0.0)
        write(tmp_path / name, nano_tokenizer, ("grpo", right), ("grpo", wrong))
    settings = {
        "warm_start.trajectories": f"{tmp_path / 'a'}, {tmp_path / 'b'}",
        "warm_start.steps": 8,
        "warm_start.prompts": 2,
    }
    run = make_training("student", settings | {"grpo.steps": 0})
    assert run.train()
    assert "warm start on 2 recorded trajectories of 2 tasks; not kept: 2 wrong" in (
        capsys.readouterr().out
    )
    losses = [row["loss"] for row in steps_of(run) if row["phase"] == "warm_start"]
    assert losses[-1] < 0.9 * losses[0]
